"""Responses in OpenAI's formats, and an answer's bytes as text.

A stream never splits a character: joined, its texts are the whole answer decoded at once. U+FFFD
stands only for bytes that are not UTF-8.
"""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from blocktrain.serve.router.decode import AnswerCost, Piece

Json = dict[str, Any]

LEAST_LOG_PROB = -9999.0  # OpenAI's number for what is impossible; JSON has no infinity


@dataclass(frozen=True)
class TokenText:
    """A byte, its log-probability, the likeliest bytes, and its character's place in the text."""

    byte: int
    log_prob: float
    top: Mapping[int, float]
    offset: int


@dataclass(frozen=True)
class TextDelta:
    """More text of an answer, with its bytes if log-probabilities were requested."""

    text: str = ""
    tokens: tuple[TokenText, ...] | None = None


class Transcript:
    """Decodes one answer piece by piece; counts its bytes and characters."""

    def __init__(self, *, log_probs: bool) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._log_probs = log_probs
        self._characters = 0
        self.bytes = 0

    def take(self, piece: Piece) -> TextDelta:
        self.bytes += len(piece.data)
        if not self._log_probs:
            return TextDelta(self._decoder.decode(piece.data))
        texts, tokens = [], []
        for index, byte in enumerate(piece.data):
            texts.append(self._decoder.decode(bytes([byte])))
            self._characters += len(texts[-1])
            unfinished = bool(self._decoder.getstate()[0])
            offset = self._characters - (not unfinished)
            top = piece.top[index] if piece.top else {}
            tokens.append(TokenText(byte, piece.log_probs[index], top, offset))
        return TextDelta("".join(texts), tuple(tokens))

    def rest(self) -> TextDelta:
        """What was held back of a character that was never completed."""
        return TextDelta(self._decoder.decode(b"", final=True), () if self._log_probs else None)


def joined(deltas: list[TextDelta]) -> TextDelta:
    tokens = [delta.tokens for delta in deltas]
    return TextDelta(
        "".join(delta.text for delta in deltas),
        tuple(token for some in tokens for token in some or ()) if tokens[0] is not None else None,
    )


@dataclass(frozen=True)
class ResponseFormat(ABC):
    """How one response is written: its bodies, whole or in chunks, share an id."""

    id: str  # without its prefix
    created: int
    model: str

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def whole(self, choices: Sequence[Json], **more: Json) -> Json:
        return self._body(self.whole_object, choices, more)

    def chunk(self, choices: Sequence[Json], **more: Json | None) -> Json:
        return self._body(self.chunk_object, choices, more)

    def _body(self, kind: str, choices: Sequence[Json], more: Mapping[str, Json | None]) -> Json:
        head: Json = {"id": self.prefix + self.id, "object": kind}
        head |= {"created": self.created, "model": self.model}
        return {**head, "choices": list(choices), **more}

    @abstractmethod
    def choice(self, index: int, answer: TextDelta, reason: str) -> Json:
        """A whole answer."""

    @abstractmethod
    def opening(self, index: int) -> Json | None:
        """What a stream sends before an answer's first text."""

    @abstractmethod
    def delta(self, index: int, delta: TextDelta, reason: str | None = None) -> Json:
        """More text of an answer; `reason` with its end."""


class TextFormat(ResponseFormat):
    """/v1/completions"""

    prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def choice(self, index: int, answer: TextDelta, reason: str) -> Json:
        return self.delta(index, answer, reason)

    def opening(self, index: int) -> Json | None:
        return None

    def delta(self, index: int, delta: TextDelta, reason: str | None = None) -> Json:
        log_probs = None if delta.tokens is None else _columns(delta.tokens)
        choice = {"index": index, "text": delta.text}
        return {**choice, "logprobs": log_probs, "finish_reason": reason}


class ChatFormat(ResponseFormat):
    """/v1/chat/completions"""

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
        log_probs = None if delta.tokens is None else {"content": [_row(t) for t in delta.tokens]}
        return {"index": index, key: message, "logprobs": log_probs, "finish_reason": reason}


def usage_body(prompt_bytes: int, output_bytes: int) -> Json:
    """A token is a byte."""
    return {
        "prompt_tokens": prompt_bytes,
        "completion_tokens": output_bytes,
        "total_tokens": prompt_bytes + output_bytes,
    }


def cost_body(costs: Sequence[AnswerCost]) -> Json:
    """What one answer took, or several together."""
    total = AnswerCost()
    for cost in costs:
        total.add(cost)
    return {
        "traversals": total.traversals,
        "bytes_per_traversal": round(total.bytes_per_traversal, 3),
        "drafted": total.drafted,
        "accepted": total.accepted,
        "replays": total.replays,
        "stage_seconds": {
            stage: round(seconds, 6) for stage, seconds in total.stage_seconds.items()
        },
    }


def model_card(name: str, created: int) -> Json:
    return {"id": name, "object": "model", "created": created, "owned_by": "blocktrain"}


def token_text(byte: int) -> str:
    """A byte's name in log-probabilities: its character, or bytes:\\xNN beyond ASCII."""
    return chr(byte) if byte < 128 else f"bytes:\\x{byte:02x}"


def _columns(tokens: Sequence[TokenText]) -> Json:
    """As /v1/completions has them."""
    return {
        "tokens": [token_text(token.byte) for token in tokens],
        "token_logprobs": [_finite(token.log_prob) for token in tokens],
        "top_logprobs": [
            {token_text(byte): _finite(value) for byte, value in token.top.items()}
            for token in tokens
        ],
        "text_offset": [token.offset for token in tokens],
    }


def _row(token: TokenText) -> Json:
    """As /v1/chat/completions has them."""
    top = [_named(byte, log_prob) for byte, log_prob in token.top.items()]
    return {**_named(token.byte, token.log_prob), "top_logprobs": top}


def _named(byte: int, log_prob: float) -> Json:
    return {"token": token_text(byte), "logprob": _finite(log_prob), "bytes": [byte]}


def _finite(log_prob: float) -> float:
    return max(float(log_prob), LEAST_LOG_PROB)
