"""OpenAI's request bodies as what the engine is to generate, and errors in OpenAI's format."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from blocktrain.config import closest_match
from blocktrain.errors import (
    ConfigError,
    OverloadedError,
    RefusedError,
    RequestError,
    UnavailableError,
)
from blocktrain.protocol.messages import first_problem
from blocktrain.serve.router.decode import DRAFTS, MODES, GenerationRequest, Sampling
from blocktrain.vocabulary import BYTES

STATUS_OF = {
    "invalid_api_key": 401, "model_not_found": 404, "not_found": 404, "method_not_allowed": 405,
    "timeout": 408, "too_large": 413,
}  # fmt: skip
CODE_OF = {404: "not_found", 405: "method_not_allowed"}


@dataclass(frozen=True)
class ApiError:
    status: int
    message: str
    type: str
    code: str | None = None
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


def api_error(error: Exception) -> ApiError:
    """Errors the client can act on, in words; any other is a 500 whose cause is in the log."""
    match error:
        case RequestError():
            return ApiError(400, str(error), "invalid_request_error", error.code, error.field)
        case ConfigError():
            return ApiError(400, str(error), "invalid_request_error")
        case RefusedError():
            status = STATUS_OF.get(error.code, 400)
            return ApiError(status, str(error), "invalid_request_error", error.code)
        case OverloadedError():
            later = {"retry-after": str(math.ceil(error.seconds))}
            code = "rate_limit_exceeded"
            return ApiError(429, str(error), "rate_limit_error", code, headers=later)
        case UnavailableError():
            return ApiError(
                503, str(error), "server_error", "unavailable", headers={"retry-after": "1"}
            )
    return ApiError(500, "internal error; the server's log has details", "server_error", "internal")


SPEAKER_OF = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}
END_OF_TURN = b"\nUser:"
MAX_STOPS = 4
SEEDS = 2**63
LEAST_TEMPERATURE = 1e-4  # below it is greedy: divided by less, log-probabilities overflow
LEAST_TOP_P = 1e-9  # OpenAI allows 0; the likeliest byte is always kept

# Fields that are not supported, with the values that ask for nothing and are accepted.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "echo": (None, False),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "audio": (None,),
}
# OpenAI's fields that do not change an answer's text.
IGNORED = {
    "function_call", "metadata", "modalities", "parallel_tool_calls", "prediction",
    "prompt_cache_key", "prompt_cache_retention", "reasoning_effort", "safety_identifier",
    "service_tier", "store", "tool_choice", "user", "verbosity", "web_search_options",
}  # fmt: skip
MAX_SHOWN = 64  # characters of an unknown field in its error


@dataclass(frozen=True)
class RequestLimits:
    """How much one request may ask for."""

    prompt_bytes: int = 65_536
    output_bytes: int = 8_192
    default_bytes: int = 256  # of an answer, if the request does not say
    choices: int = 8


@dataclass(frozen=True)
class CompletionRequest:
    """The body of an HTTP request: one answer for each of `generations`."""

    chat: bool
    model: str | None
    generations: tuple[GenerationRequest, ...]
    prompt_bytes: int
    log_probs: bool
    stream: bool
    include_usage: bool


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class _StreamOptions(_Body):
    include_usage: bool | None = None


class _CommonBody(_Body):
    """The fields of both kinds of request."""

    model_config = ConfigDict(extra="allow")  # `_parsed` looks at them

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-SEEDS, lt=SEEDS)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: str | tuple[str, ...] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    # not OpenAI's
    top_k: Annotated[int, Field(ge=0, le=BYTES)] | None = None
    mode: str | None = None
    passes: Annotated[int, Field(ge=0, le=1024)] | None = None
    drafts: str | None = None
    # unsupported, see NEUTRAL
    logit_bias: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None


_Byte = Annotated[int, Field(ge=0, lt=BYTES)]


class _CompletionBody(_CommonBody):
    prompt: str | tuple[str, ...] | tuple[_Byte, ...] | tuple[tuple[_Byte, ...], ...]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: Any = None
    suffix: Any = None
    best_of: Any = None


class _TextPart(_Body):
    type: str
    text: str


class _ChatMessage(_Body):
    role: str
    content: str | tuple[_TextPart, ...] | None = None


class _ChatBody(_CommonBody):
    messages: Annotated[tuple[_ChatMessage, ...], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Any = None
    functions: Any = None
    response_format: Any = None
    audio: Any = None


def completion(
    body: bytes, limits: RequestLimits, new_seed: Callable[[], int]
) -> CompletionRequest:
    """POST /v1/completions."""
    fields = _parsed(_CompletionBody, body)
    prompts = _prompts(fields.prompt)
    return _request(fields, prompts, fields.max_tokens, (), fields.logprobs, limits, new_seed)


def chat(body: bytes, limits: RequestLimits, new_seed: Callable[[], int]) -> CompletionRequest:
    """POST /v1/chat/completions."""
    fields = _parsed(_ChatBody, body)
    if fields.top_logprobs is not None and not fields.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    top = (fields.top_logprobs or 0) if fields.logprobs else None
    max_bytes = fields.max_completion_tokens or fields.max_tokens
    prompt = conversation([(message.role, _content(message)) for message in fields.messages])
    return _request(fields, [prompt], max_bytes, (END_OF_TURN,), top, limits, new_seed)


def conversation(turns: Sequence[tuple[str, str]]) -> bytes:
    """A line for every message, with its speaker, and the beginning of the answer's line."""
    for role, _ in turns:
        if role not in SPEAKER_OF:
            raise RequestError(
                f"a message's role must be one of {', '.join(SPEAKER_OF)}", "messages"
            )
    lines = [f"{SPEAKER_OF[role]}: {content}\n" for role, content in turns]
    return "".join([*lines, "Assistant: "]).encode()


A = TypeVar("A", bound=_CommonBody)


def _parsed(kind: type[A], body: bytes) -> A:
    try:
        fields = kind.model_validate_json(body)
    except ValidationError as error:
        path, problem = first_problem(error)
        field = path.partition(".")[0]
        raise RequestError(f"{field or 'the body'}: {problem}", field or None) from None
    for field in fields.model_extra or {}:
        if field not in IGNORED:
            raise _unknown(field[:MAX_SHOWN], kind)
    for field, neutral in NEUTRAL.items():
        if getattr(fields, field, None) not in neutral:
            raise RequestError(
                f"{field} is not supported; leave it out",
                field,
                "unsupported_parameter",
            )
    return fields


def _unknown(field: str, kind: type[_CommonBody]) -> RequestError:
    guess = closest_match(field, kind.model_fields)
    hint = f"; did you mean {guess}?" if guess else ""
    return RequestError(f"unknown field {field}{hint}", field, "unknown_parameter")


def _request(
    fields: _CommonBody,
    prompts: Sequence[bytes],
    max_bytes: int | None,
    own_stops: tuple[bytes, ...],
    top_log_probs: int | None,
    limits: RequestLimits,
    new_seed: Callable[[], int],
) -> CompletionRequest:
    """`top_log_probs` is None if no log-probabilities are requested."""
    if fields.stream_options is not None and not fields.stream:
        raise RequestError("stream_options needs stream to be true", "stream_options")
    count = fields.n or 1
    _check_limit("n", "choices", len(prompts) * count, limits.choices)
    for prompt in prompts:
        too_long = "context_length_exceeded"
        _check_limit("prompt", "prompt bytes", len(prompt), limits.prompt_bytes, too_long)
    max_bytes = max_bytes or min(limits.default_bytes, limits.output_bytes)
    _check_limit("max_tokens", "output bytes", max_bytes, limits.output_bytes)
    seed = new_seed() if fields.seed is None else fields.seed
    default = GenerationRequest(b"", 0)
    generations = [
        GenerationRequest(
            prompt,
            max_bytes,
            mode=_one_of("mode", MODES, fields.mode or default.mode),
            passes=default.passes if fields.passes is None else fields.passes,
            drafts=_one_of("drafts", DRAFTS, fields.drafts) if fields.drafts else default.drafts,
            sampling=_sampling(fields, (seed + choice) % SEEDS),
            stop=(*_stops(fields.stop), *own_stops),
            top_log_probs=top_log_probs or 0,
        )
        for prompt, choice in product(prompts, range(count))
    ]
    return CompletionRequest(
        chat=isinstance(fields, _ChatBody),
        model=fields.model,
        generations=tuple(generations),
        prompt_bytes=sum(map(len, prompts)),
        log_probs=top_log_probs is not None,
        stream=bool(fields.stream),
        include_usage=bool(fields.stream_options and fields.stream_options.include_usage),
    )


def _sampling(fields: _CommonBody, seed: int) -> Sampling:
    temperature = 1.0 if fields.temperature is None else fields.temperature
    return Sampling(
        temperature=temperature if temperature >= LEAST_TEMPERATURE else 0.0,
        top_k=fields.top_k or 0,
        top_p=1.0 if fields.top_p is None else max(fields.top_p, LEAST_TOP_P),
        seed=seed,
    )


def _prompts(prompt: Any) -> list[bytes]:
    """One prompt or several, each as text or as a list of bytes."""
    if isinstance(prompt, str):
        return [prompt.encode()]
    if not prompt:
        raise RequestError("prompt is an empty list", "prompt")
    if isinstance(prompt[0], int):
        return [bytes(prompt)]
    return [each.encode() if isinstance(each, str) else bytes(each) for each in prompt]


def _content(message: _ChatMessage) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    if any(part.type != "text" for part in message.content):
        raise RequestError("a message's content parts must be of type text", "messages")
    return "".join(part.text for part in message.content)


def _stops(stop: str | tuple[str, ...] | None) -> tuple[bytes, ...]:
    stops = (stop,) if isinstance(stop, str) else stop or ()
    _check_limit("stop", "stop strings", len(stops), MAX_STOPS)
    if "" in stops:
        raise RequestError("a stop string is empty", "stop")
    return tuple(each.encode() for each in stops)


def _one_of(field: str, allowed: Sequence[str], value: str) -> str:
    if value not in allowed:
        raise RequestError(f"{field} must be one of {', '.join(allowed)}", field)
    return value


def _check_limit(field: str, what: str, value: int, limit: int, code: str | None = None) -> None:
    if value > limit:
        raise RequestError(f"{value} {what} requested; the limit is {limit}", field, code)
