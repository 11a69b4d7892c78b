"""Every error as OpenAI says it: a status, and {"error": {message, type, param, code}}."""

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
from blocktrain.serve.router.decode import DRAFTS, MODES, Request, Sampling

REFUSED = {
    "invalid_api_key": 401, "model_not_found": 404, "not_found": 404, "method_not_allowed": 405,
    "timeout": 408, "too_large": 413,
}  # fmt: skip
SOON = {"retry-after": "1"}
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
    """What concerns the client is said; anything else stays in the log."""
    match error:
        case RequestError():
            return ApiError(400, str(error), "invalid_request_error", error.code, error.field)
        case ConfigError():
            return ApiError(400, str(error), "invalid_request_error")
        case RefusedError():
            status = REFUSED.get(error.code, 400)
            return ApiError(status, str(error), "invalid_request_error", error.code)
        case OverloadedError():
            later = {"retry-after": str(math.ceil(error.seconds))}
            code = "rate_limit_exceeded"
            return ApiError(429, str(error), "rate_limit_error", code, headers=later)
        case UnavailableError():
            return ApiError(503, str(error), "server_error", "unavailable", headers=SOON)
    return ApiError(500, "the server failed; its log tells more", "server_error", "internal")


SPEAKERS = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}
END_OF_TURN = b"\nUser:"
MOST_STOPS = 4
SEEDS = 2**63
COLDEST = 1e-4  # below it is greedy: dividing by less leaves nothing finite to compare
LEAST_TOP_P = 1e-9  # of 0, which OpenAI allows: the likeliest byte is kept in any case

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
# OpenAI's, that say nothing about the text of an answer or only how to come by it.
IGNORED = {
    "function_call", "metadata", "modalities", "parallel_tool_calls", "prediction",
    "prompt_cache_key", "prompt_cache_retention", "reasoning_effort", "safety_identifier",
    "service_tier", "store", "tool_choice", "user", "verbosity", "web_search_options",
}  # fmt: skip
LONGEST_NAME = 64  # of an unknown field, in the error that names it


@dataclass(frozen=True)
class RequestLimits:
    """How much one request may ask for."""

    prompt_bytes: int = 65_536
    output_bytes: int = 8_192
    usual_bytes: int = 256  # of an answer, where the request does not say
    choices: int = 8


@dataclass(frozen=True)
class CompletionRequest:
    """What one HTTP request asks for: an answer to each of `requests`."""

    chat: bool
    model: str | None
    requests: tuple[Request, ...]
    prompt_bytes: int
    log_probs: bool
    stream: bool
    include_usage: bool


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class _StreamOptions(_Body):
    include_usage: bool | None = None


class _Asked(_Body):
    """What both kinds of request may say."""

    model_config = ConfigDict(extra="allow")  # to be looked at by name

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
    top_k: Annotated[int, Field(ge=0, le=256)] | None = None
    mode: str | None = None
    passes: Annotated[int, Field(ge=0, le=1024)] | None = None
    drafts: str | None = None
    # refused, unless neutral
    logit_bias: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None


_Byte = Annotated[int, Field(ge=0, lt=256)]


class _Completion(_Asked):
    prompt: str | tuple[str, ...] | tuple[_Byte, ...] | tuple[tuple[_Byte, ...], ...]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: Any = None
    suffix: Any = None
    best_of: Any = None


class _TextPart(_Body):
    type: str
    text: str


class _Said(_Body):
    role: str
    content: str | tuple[_TextPart, ...] | None = None


class _Chat(_Asked):
    messages: Annotated[tuple[_Said, ...], Field(min_length=1)]
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
    asked = _parsed(_Completion, body)
    prompts = _prompts(asked.prompt)
    top = -1 if asked.logprobs is None else asked.logprobs
    return _ask(asked, prompts, asked.max_tokens, (), top, limits, new_seed)


def chat(body: bytes, limits: RequestLimits, new_seed: Callable[[], int]) -> CompletionRequest:
    """POST /v1/chat/completions."""
    asked = _parsed(_Chat, body)
    if asked.top_logprobs is not None and not asked.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    top = (asked.top_logprobs or 0) if asked.logprobs else -1
    most = asked.max_completion_tokens or asked.max_tokens
    prompt = conversation([(said.role, _words(said)) for said in asked.messages])
    return _ask(asked, [prompt], most, (END_OF_TURN,), top, limits, new_seed)


def conversation(turns: Sequence[tuple[str, str]]) -> bytes:
    """The plain template: a line per turn, each with its speaker, and the answer's beginning."""
    for role, _ in turns:
        if role not in SPEAKERS:
            raise RequestError(f"a message's role is one of {', '.join(SPEAKERS)}", "messages")
    lines = [f"{SPEAKERS[role]}: {words}\n" for role, words in turns]
    return "".join([*lines, "Assistant: "]).encode()


A = TypeVar("A", bound=_Asked)


def _parsed(kind: type[A], body: bytes) -> A:
    try:
        asked = kind.model_validate_json(body)
    except ValidationError as error:
        path, problem = first_problem(error)
        field = path.partition(".")[0]
        raise RequestError(f"{field or 'the body'}: {problem}", field or None) from None
    for field in asked.model_extra or {}:
        if field not in IGNORED:
            raise _unknown(field[:LONGEST_NAME], kind)
    for field, neutral in NEUTRAL.items():
        if getattr(asked, field, None) not in neutral:
            raise RequestError(
                f"{field} is not supported by a model of bytes; leave it out",
                field,
                "unsupported_parameter",
            )
    return asked


def _unknown(field: str, kind: type[_Asked]) -> RequestError:
    guess = closest_match(field, kind.model_fields)
    hint = f"; did you mean {guess}?" if guess else ""
    return RequestError(f"there is no field {field}{hint}", field, "unknown_parameter")


def _ask(
    asked: _Asked,
    prompts: Sequence[bytes],
    most_bytes: int | None,
    own_stops: tuple[bytes, ...],
    top_log_probs: int,
    limits: RequestLimits,
    new_seed: Callable[[], int],
) -> CompletionRequest:
    """`top_log_probs` is -1 where no log-probabilities are asked for."""
    if asked.stream_options is not None and not asked.stream:
        raise RequestError("stream_options needs stream to be true", "stream_options")
    count = asked.n or 1
    _bounded("n", "choices", len(prompts) * count, limits.choices)
    for prompt in prompts:
        too_long = "context_length_exceeded"
        _bounded("prompt", "bytes of prompt", len(prompt), limits.prompt_bytes, too_long)
    most_bytes = most_bytes or min(limits.usual_bytes, limits.output_bytes)
    _bounded("max_tokens", "bytes of output", most_bytes, limits.output_bytes)
    seed = new_seed() if asked.seed is None else asked.seed
    requests = [
        Request(
            prompt,
            most_bytes,
            mode=_one_of("mode", MODES, asked.mode or Request.mode),
            passes=Request.passes if asked.passes is None else asked.passes,
            drafts=_one_of("drafts", DRAFTS, asked.drafts) if asked.drafts else Request.drafts,
            sampling=_sampling(asked, (seed + choice) % SEEDS),
            stop=(*_stops(asked.stop), *own_stops),
            top_log_probs=max(top_log_probs, 0),
        )
        for prompt, choice in product(prompts, range(count))
    ]
    return CompletionRequest(
        chat=isinstance(asked, _Chat),
        model=asked.model,
        requests=tuple(requests),
        prompt_bytes=sum(map(len, prompts)),
        log_probs=top_log_probs >= 0,
        stream=bool(asked.stream),
        include_usage=bool(asked.stream_options and asked.stream_options.include_usage),
    )


def _sampling(asked: _Asked, seed: int) -> Sampling:
    temperature = 1.0 if asked.temperature is None else asked.temperature
    return Sampling(
        temperature=temperature if temperature >= COLDEST else 0.0,
        top_k=asked.top_k or 0,
        top_p=1.0 if asked.top_p is None else max(asked.top_p, LEAST_TOP_P),
        seed=seed,
    )


def _prompts(prompt: Any) -> list[bytes]:
    """One prompt or several, each of text or of bytes as numbers."""
    if isinstance(prompt, str):
        return [prompt.encode()]
    if not prompt:
        raise RequestError("prompt is an empty list", "prompt")
    if isinstance(prompt[0], int):
        return [bytes(prompt)]
    return [each.encode() if isinstance(each, str) else bytes(each) for each in prompt]


def _words(said: _Said) -> str:
    if said.content is None or isinstance(said.content, str):
        return said.content or ""
    if any(part.type != "text" for part in said.content):
        raise RequestError("a message's parts are of type text", "messages")
    return "".join(part.text for part in said.content)


def _stops(stop: str | tuple[str, ...] | None) -> tuple[bytes, ...]:
    stops = (stop,) if isinstance(stop, str) else stop or ()
    _bounded("stop", "stop strings", len(stops), MOST_STOPS)
    if "" in stops:
        raise RequestError("a stop string is empty", "stop")
    return tuple(each.encode() for each in stops)


def _one_of(field: str, allowed: Sequence[str], value: str) -> str:
    if value not in allowed:
        raise RequestError(f"{field} is one of {', '.join(allowed)}", field)
    return value


def _bounded(field: str, what: str, value: int, most: int, code: str | None = None) -> None:
    if value > most:
        raise RequestError(f"{value} {what} are asked for; at most {most} are served", field, code)
