"""Parses OpenAI's request bodies into requests to the engine, and formats errors as OpenAI does."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from blocktrain.errors import (
    ConfigError,
    DataError,
    OverloadedError,
    RefusedError,
    RequestError,
    UnavailableError,
    closest_match,
)
from blocktrain.numerics.sampling import Sampling
from blocktrain.protocol.messages import first_problem
from blocktrain.serve.http.served_model import ServedModel
from blocktrain.serve.router.decode import DRAFTS, MODES, GenerationRequest

STATUS_OF = {
    "invalid_api_key": 401, "model_not_found": 404, "not_found": 404, "method_not_allowed": 405,
    "timeout": 408, "too_large": 413,
}  # fmt: skip
CODE_OF = {404: "not_found", 405: "method_not_allowed"}


@dataclass(frozen=True)
class ApiError:
    status: int
    message: str
    code: str | None = None
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        types = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        kind = types.get(self.status, "invalid_request_error")
        fields = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}


def api_error(error: Exception) -> ApiError:
    """The response to an error. Clients are told the cause only if they can act on it; any other
    error becomes a 500, with the cause in the log only."""
    match error:
        case ConfigError():
            code, field = getattr(error, "code", None), getattr(error, "field", None)
            return ApiError(400, str(error), code, field)
        case RefusedError():
            return ApiError(STATUS_OF.get(error.code, 400), str(error), error.code)
        case OverloadedError():
            later = {"retry-after": str(math.ceil(error.seconds))}
            return ApiError(429, str(error), "rate_limit_exceeded", headers=later)
        case UnavailableError():
            return ApiError(503, str(error), "unavailable", headers={"retry-after": "1"})
        case DataError():  # a faulty file of the model, such as its chat template
            return ApiError(500, str(error), "broken_model")
    return ApiError(500, "internal error; the server's log has details", "internal")


MAX_STOPS = 4
SEEDS = 2**63
LEAST_TEMPERATURE = 1e-4  # lower ones count as 0, because log-probabilities would overflow
LEAST_TOP_P = 1e-9  # OpenAI allows 0, which keeps only the likeliest token

# OpenAI's fields that are accepted without effect.
IGNORED = {
    "function_call", "metadata", "modalities", "parallel_tool_calls", "prediction",
    "prompt_cache_key", "prompt_cache_retention", "reasoning_effort", "safety_identifier",
    "service_tier", "store", "tool_choice", "user", "verbosity", "web_search_options",
}  # fmt: skip
MAX_SHOWN = 64  # characters of an unknown field's name in its error


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one request. `long_prompts`: what happens to a prompt that exceeds the model's
    window; "truncate" reads its end, "reject" is an error."""

    long_prompts: str = "truncate"
    prompt_tokens: int = 65_536
    output_tokens: int = 8_192
    default_tokens: int = 256  # output if the request sets no limit
    choices: int = 8
    biases: int = 300  # tokens in logit_bias


@dataclass(frozen=True)
class CompletionRequest:
    """A parsed request: one answer for each of `generations`."""

    model: str | None
    generations: tuple[GenerationRequest, ...]
    prompt_tokens: int
    stream: bool
    include_usage: bool
    truncated_tokens: int = 0  # of prompts, which the answers do not depend on

    @property
    def tenant(self) -> str:
        return self.generations[0].tenant

    @property
    def log_probs(self) -> bool:
        return self.generations[0].top_log_probs is not None

    def of_tenant(self, tenant: str) -> Self:
        """The same request, which shares contexts with others of this tenant only."""
        generations = tuple(replace(each, tenant=tenant) for each in self.generations)
        return replace(self, generations=generations)


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class _StreamOptions(_Body):
    include_usage: bool | None = None


Penalty = Annotated[float, Field(ge=-2, le=2)]


class _CommonBody(_Body):
    """Fields of both kinds of request."""

    model_config = ConfigDict(extra="allow")  # `_parsed` checks them
    # Unsupported fields: the neutral values that are accepted, and why others are not.
    neutral: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {}

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-SEEDS, lt=SEEDS)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: str | tuple[str, ...] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    # not OpenAI's
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    mode: str | None = None
    passes: Annotated[int, Field(ge=0, le=1024)] | None = None
    drafts: str | None = None

    @property
    def output_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def top_log_probs(self) -> int | None:
        """How many likeliest tokens to report; None if no log-probabilities are requested."""
        raise NotImplementedError

    @property
    def echoes(self) -> bool:
        return False


_Tokens = tuple[Annotated[int, Field(ge=0)], ...]


class _CompletionBody(_CommonBody):
    neutral = {
        "suffix": ((None, ""), "the model continues a text and cannot fill gaps in one"),
        "best_of": ((None, 1), "answers are not ranked; ask for several with n"),
    }

    prompt: str | tuple[str, ...] | _Tokens | tuple[_Tokens, ...]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @property
    def top_log_probs(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return bool(self.echo)


class _TextPart(_Body):
    type: str
    text: str


class _ChatMessage(_Body):
    role: str
    content: str | tuple[_TextPart, ...] | None = None


class _ChatBody(_CommonBody):
    neutral = {
        "tools": ((None, []), "the server does not call tools; describe them in a message"),
        "functions": ((None, []), "the server does not call functions; describe them in a message"),
        "audio": ((None,), "the model reads and writes text only"),
        "response_format": (
            (None, {"type": "text"}),
            "the answer's form cannot be enforced; ask for it in a message",
        ),
    }  # fmt: skip

    messages: Annotated[tuple[_ChatMessage, ...], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    # not OpenAI's
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def output_tokens(self) -> int | None:
        longest = self.max_completion_tokens
        return self.max_tokens if longest is None else longest

    @property
    def top_log_probs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs; set logprobs to true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


def completion(
    body: bytes, model: ServedModel, limits: RequestLimits, seed: int
) -> CompletionRequest:
    """Parse the body of POST /v1/completions. `seed`: the seed if the body has none."""
    fields = _parsed(_CompletionBody, body)
    return _request(fields, _prompts(fields.prompt, model), (), model, limits, seed)


def chat(body: bytes, model: ServedModel, limits: RequestLimits, seed: int) -> CompletionRequest:
    """Parse the body of POST /v1/chat/completions. `seed`: the seed if the body has none."""
    fields = _parsed(_ChatBody, body)
    turns = [(message.role, _content(message)) for message in fields.messages]
    prompt, own_stops = model.conversation(turns, fields.chat_template_kwargs or {})
    return _request(fields, [prompt], own_stops, model, limits, seed)


class _TokenizeBody(_Body):
    prompt: str
    add_special_tokens: bool = True


class _DetokenizeBody(_Body):
    tokens: _Tokens


def tokens(body: bytes, model: ServedModel) -> list[int]:
    """The answer to the body of POST /tokenize."""
    fields = _validated(_TokenizeBody, body)
    start = [model.vocabulary.bos] if model.vocabulary.starts_with_bos else []
    return [*(start if fields.add_special_tokens else ()), *model.encode(fields.prompt)]


def text(body: bytes, model: ServedModel) -> str:
    """The answer to the body of POST /detokenize."""
    data = model.tokenizer.decode(_validated(_DetokenizeBody, body).tokens)
    return data.decode(errors="replace")


A = TypeVar("A", bound=_Body)
B = TypeVar("B", bound=_CommonBody)


def _validated(kind: type[A], body: bytes) -> A:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        path, problem = first_problem(error)
        field = path.partition(".")[0]
        raise RequestError(f"{field or 'the body'}: {problem}", field or None) from None


def _parsed(kind: type[B], body: bytes) -> B:
    fields = _validated(kind, body)
    for name, value in (fields.model_extra or {}).items():
        if name in kind.neutral:
            accepted, reason = kind.neutral[name]
            if value not in accepted:
                reason = f"{name} is not supported: {reason}"
                raise RequestError(reason, name, "unsupported_parameter")
        elif name not in IGNORED:
            excerpt = name[:MAX_SHOWN]
            guess = closest_match(excerpt, kind.model_fields)
            hint = f"; did you mean {guess}?" if guess else ""
            raise RequestError(f"unknown field {excerpt}{hint}", excerpt, "unknown_parameter")
    return fields


def _request(
    fields: _CommonBody,
    prompts: Sequence[Sequence[int]],
    own_stops: tuple[bytes, ...],
    model: ServedModel,
    limits: RequestLimits,
    seed: int,
) -> CompletionRequest:
    if fields.stream_options is not None and not fields.stream:
        raise RequestError("stream_options needs stream; set stream to true", "stream_options")
    count, seed = fields.n or 1, seed if fields.seed is None else fields.seed
    _check_limit("n", "choices", len(prompts) * count, limits.choices)
    for prompt in prompts:
        too_long = "context_length_exceeded"
        _check_limit("prompt", "prompt tokens", len(prompt), limits.prompt_tokens, too_long)
    output_tokens = _output_tokens(fields, limits)
    truncated = [_truncated(prompt, model) if output_tokens else 0 for prompt in prompts]
    if any(truncated) and limits.long_prompts == "reject":
        raise RequestError(
            f"the prompt has {max(map(len, prompts))} tokens, {max(truncated)} more than fit into"
            f" the window of {model.name} ({model.config.model.window}); shorten it",
            "prompt",
            too_long,
        )
    generation = GenerationRequest(
        (),
        output_tokens,
        mode=_one_of("mode", MODES, fields.mode or "speculative"),
        passes=1 if fields.passes is None else fields.passes,
        drafts=model.drafts(
            fields.mode, fields.drafts and _one_of("drafts", DRAFTS, fields.drafts)
        ),
        sampling=_sampling(fields, model, limits),
        stop=(*_stops(fields.stop), *own_stops),
        top_log_probs=fields.top_log_probs,
        echo=fields.echoes,
    )
    generations = [
        replace(
            generation,
            prompt=prompt,
            sampling=replace(generation.sampling, seed=(seed + choice) % SEEDS),
        )
        for prompt, choice in product(prompts, range(count))
    ]
    return CompletionRequest(
        model=fields.model,
        generations=tuple(generations),
        prompt_tokens=sum(map(len, prompts)),
        stream=bool(fields.stream),
        include_usage=bool(fields.stream_options and fields.stream_options.include_usage),
        truncated_tokens=sum(truncated),
    )


def _truncated(prompt: Sequence[int], model: ServedModel) -> int:
    """How many of the prompt's first tokens the model does not read, because they do not fit into
    its window."""
    vocabulary = model.vocabulary
    adds_bos = vocabulary.starts_with_bos and list(prompt[:1]) != [vocabulary.bos]
    return max(0, len(prompt) + adds_bos - model.config.model.window)


def _output_tokens(fields: _CommonBody, limits: RequestLimits) -> int:
    count = fields.output_tokens
    if count is None:
        return min(limits.default_tokens, limits.output_tokens)
    if count == 0 and not fields.echoes:
        raise RequestError("max_tokens: 0 needs echo to be true; use 1 or more", "max_tokens")
    _check_limit("max_tokens", "output tokens", count, limits.output_tokens)
    return count


def _sampling(fields: _CommonBody, model: ServedModel, limits: RequestLimits) -> Sampling:
    """The sampling options except the seed."""
    _check_limit("top_k", "tokens for top_k", fields.top_k or 0, model.vocabulary.size)
    temperature = 1.0 if fields.temperature is None else fields.temperature
    return Sampling(
        temperature=temperature if temperature >= LEAST_TEMPERATURE else 0.0,
        top_k=fields.top_k or 0,
        top_p=1.0 if fields.top_p is None else max(fields.top_p, LEAST_TOP_P),
        min_p=fields.min_p or 0.0,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        bias=_biases(fields.logit_bias or {}, model, limits.biases),
    )


def _biases(given: Mapping[str, float], model: ServedModel, most: int) -> dict[int, float]:
    _check_limit("logit_bias", "tokens in logit_bias", len(given), most)
    for name in given:
        if not name.isdecimal() or int(name) >= model.vocabulary.size:
            raise RequestError(_no_token("logit_bias", name[:MAX_SHOWN], model), "logit_bias")
    return {int(name): bias for name, bias in given.items() if bias}


def _no_token(field: str, name: object, model: ServedModel) -> str:
    unit = "bytes" if model.vocabulary.is_bytes else "the ids of its tokenizer"
    return (
        f"{field}: {name} is not a token of {model.name}; its tokens are {unit},"
        f" 0 to {model.vocabulary.size - 1}"
    )


def _prompts(prompt: Any, model: ServedModel) -> list[Sequence[int]]:
    """One prompt or several, each as text or as a list of tokens."""
    if not prompt and not isinstance(prompt, str):
        raise RequestError("prompt is an empty list; give at least one text or token", "prompt")
    several = prompt if isinstance(prompt, tuple) and not isinstance(prompt[0], int) else [prompt]
    for tokens in several:
        if not isinstance(tokens, str) and max(tokens, default=0) >= model.vocabulary.size:
            raise RequestError(_no_token("prompt", max(tokens), model), "prompt")
    return [model.encode(each) if isinstance(each, str) else each for each in several]


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
        raise RequestError("a stop string is empty; leave it out", "stop")
    return tuple(each.encode() for each in stops)


def _one_of(field: str, allowed: Collection[str], value: str) -> str:
    if value not in allowed:
        raise RequestError(f"{field} must be one of {', '.join(allowed)}", field)
    return value


def _check_limit(field: str, what: str, value: int, limit: int, code: str | None = None) -> None:
    if value > limit:
        raise RequestError(f"{value} {what} requested, but the limit is {limit}", field, code)
