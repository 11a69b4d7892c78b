"""Responses in OpenAI's formats, and the decoding of an answer's tokens.

A stream never splits a character: its texts joined equal the whole answer decoded at once. U+FFFD
stands only for bytes that are not UTF-8.
"""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from blocktrain.serve.http.served_model import ServedModel
from blocktrain.serve.router.decode import AnswerCost
from blocktrain.serve.router.output import OutputToken

Json = dict[str, Any]

# Added up over several answers.
SUMMED = ("traversals", "drafted", "accepted", "replays", "network_seconds")
LEAST_LOG_PROB = -9999.0  # OpenAI's value for impossible tokens; JSON has no infinity

PlacedToken = tuple[OutputToken, int]  # with the offset of its first character in the text


@dataclass(frozen=True)
class TextDelta:
    """New text of an answer, with its tokens if log-probabilities were requested."""

    text: str = ""
    tokens: tuple[PlacedToken, ...] | None = None

    @classmethod
    def joined(cls, deltas: Sequence["TextDelta"]) -> "TextDelta":
        tokens = tuple(token for delta in deltas for token in delta.tokens or ())
        text = "".join(delta.text for delta in deltas)
        return cls(text, None if deltas[0].tokens is None else tokens)


class Transcript:
    """Decodes one answer piece by piece, and counts its characters."""

    def __init__(self, *, log_probs: bool) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._log_probs = log_probs
        self._characters = 0

    def take(self, tokens: Sequence[OutputToken]) -> TextDelta:
        if not self._log_probs:
            return TextDelta(self._decoder.decode(b"".join(token.data for token in tokens)))
        texts, placed = [], []
        for token in tokens:
            # The first byte may end an incomplete character of the token before: decode it alone.
            texts.append(self._decode(token.data[:1]))
            is_whole = token.data and not self._decoder.getstate()[0]
            placed.append((token, self._characters - bool(is_whole)))
            texts.append(self._decode(token.data[1:]))
        return TextDelta("".join(texts), tuple(placed))

    def rest(self) -> TextDelta:
        """The remainder of a character that was never completed."""
        return TextDelta(self._decoder.decode(b"", final=True), () if self._log_probs else None)

    def _decode(self, data: bytes) -> str:
        text = self._decoder.decode(data)
        self._characters += len(text)
        return text


@dataclass(frozen=True)
class ResponseFormat(ABC):
    """The JSON format of one response. Its bodies, whole or in chunks, share an id."""

    id: str  # without the prefix
    created: int
    model: ServedModel

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def whole(self, choices: Sequence[Json], **more: Json) -> Json:
        return self._body(self.whole_object, choices) | more

    def chunk(self, choices: Sequence[Json], **more: Json | None) -> Json:
        return self._body(self.chunk_object, choices) | more

    def _body(self, kind: str, choices: Sequence[Json]) -> Json:
        head = {"id": self.prefix + self.id, "created": self.created, "model": self.model.name}
        return {**head, "object": kind, "choices": list(choices)}

    def choice(self, index: int, answer: TextDelta, reason: str) -> Json:
        """The JSON of a whole answer."""
        return self.delta(index, answer, reason)

    def opening(self, index: int) -> Json | None:
        """The JSON of a streamed answer's first chunk, before any text; None if the format has
        none."""
        return None

    @abstractmethod
    def delta(self, index: int, delta: TextDelta, reason: str | None = None) -> Json:
        """The JSON of new text of an answer. `reason`: why the answer ends, only at its end."""


class TextFormat(ResponseFormat):
    """The format of /v1/completions."""

    prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def delta(self, index: int, delta: TextDelta, reason: str | None = None) -> Json:
        log_probs = None if delta.tokens is None else self._log_probs(delta.tokens)
        choice = {"index": index, "text": delta.text}
        return {**choice, "logprobs": log_probs, "finish_reason": reason}

    def _log_probs(self, placed: Sequence[PlacedToken]) -> Json:
        return {
            "tokens": [self.model.token_name(token.id) for token, _ in placed],
            "token_logprobs": [_finite(token.log_prob) for token, _ in placed],
            "top_logprobs": [self._top(token.top) for token, _ in placed],
            "text_offset": [offset for _, offset in placed],
        }

    def _top(self, top: Mapping[int, float] | None) -> Json | None:
        if top is None:
            return None
        named: Json = {}
        for token, log_prob in top.items():  # the likeliest of tokens with the same name
            named.setdefault(self.model.token_name(token), _finite(log_prob))
        return named


class ChatFormat(ResponseFormat):
    """The format of /v1/chat/completions."""

    prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, answer: TextDelta, reason: str) -> Json:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        return self._choice(index, "message", message, answer, reason)

    def opening(self, index: int) -> Json | None:
        delta = {"role": "assistant", "content": ""}
        return self._choice(index, "delta", delta, TextDelta(), None)

    def delta(self, index: int, delta: TextDelta, reason: str | None = None) -> Json:
        content = {"content": delta.text} if delta.text or delta.tokens else {}
        return self._choice(index, "delta", content, delta, reason)

    def _choice(
        self, index: int, key: str, message: Json, delta: TextDelta, reason: str | None
    ) -> Json:
        log_probs = None
        if delta.tokens is not None:
            log_probs = {"content": [self._log_probs(token) for token, _ in delta.tokens]}
        return {"index": index, key: message, "logprobs": log_probs, "finish_reason": reason}

    def _log_probs(self, token: OutputToken) -> Json:
        top = [self._named(likely, log_prob) for likely, log_prob in (token.top or {}).items()]
        return {**self._named(token.id, token.log_prob), "top_logprobs": top}

    def _named(self, token: int, log_prob: float | None) -> Json:
        data = list(self.model.tokenizer.token_bytes(token))
        name = self.model.token_name(token)
        return {"token": name, "logprob": _finite(log_prob), "bytes": data}


def usage_body(prompt_tokens: int, output_tokens: int, truncated: int = 0, cached: int = 0) -> Json:
    """`truncated`: tokens of prompts that were left out because the window is full. `cached`: those
    whose context was copied from other requests."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        **({"truncated_prompt_tokens": truncated} if truncated else {}),
    }


def cost_body(costs: Iterable[AnswerCost]) -> Json:
    """The cost of one answer, or of several together."""
    total, tokens = AnswerCost(), 0
    for cost in costs:
        tokens += cost.output_tokens
        total.add_seconds(cost.stage_seconds)
        for name in SUMMED:
            setattr(total, name, getattr(total, name) + getattr(cost, name))
    return {
        **{name: round(getattr(total, name), 6) for name in SUMMED},
        "tokens_per_traversal": round(tokens / max(1, total.traversals), 3),
        "stage_seconds": {name: round(each, 6) for name, each in total.stage_seconds.items()},
    }


def _finite(log_prob: float | None) -> float | None:
    return None if log_prob is None else max(float(log_prob), LEAST_LOG_PROB)
