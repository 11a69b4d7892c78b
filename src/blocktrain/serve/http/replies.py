"""An answer's bytes as text, as they come: no character is ever cut in two.

What is said piece by piece is, joined, the whole answer decoded at once; U+FFFD stands only for
bytes that are no UTF-8.
"""

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from blocktrain.serve.router.decode import Account, Piece


@dataclass(frozen=True)
class TokenText:
    """A byte, the log-probability it was picked with, and which character of the text it is in."""

    byte: int
    log_prob: float
    top: Mapping[int, float]
    offset: int


@dataclass(frozen=True)
class Fragment:
    """Text that can be shown, and the bytes that came, where log-probabilities are asked for."""

    text: str = ""
    tokens: tuple[TokenText, ...] | None = None


class Transcript:
    """One answer. Counts its bytes and its characters."""

    def __init__(self, *, log_probs: bool) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._log_probs = log_probs
        self._characters = 0
        self.bytes = 0

    def take(self, piece: Piece) -> Fragment:
        self.bytes += len(piece.data)
        if not self._log_probs:
            return Fragment(self._decoder.decode(piece.data))
        texts, tokens = [], []
        for index, byte in enumerate(piece.data):
            texts.append(self._decoder.decode(bytes([byte])))
            self._characters += len(texts[-1])
            unfinished = bool(self._decoder.getstate()[0])
            offset = self._characters - (not unfinished)
            top = piece.top[index] if piece.top else {}
            tokens.append(TokenText(byte, piece.log_probs[index], top, offset))
        return Fragment("".join(texts), tuple(tokens))

    def rest(self) -> Fragment:
        """What was held back of a character that never became whole."""
        return Fragment(self._decoder.decode(b"", final=True), () if self._log_probs else None)


def joined(fragments: list[Fragment]) -> Fragment:
    tokens = [fragment.tokens for fragment in fragments]
    return Fragment(
        "".join(fragment.text for fragment in fragments),
        tuple(token for some in tokens for token in some or ()) if tokens[0] is not None else None,
    )


Json = dict[str, Any]

LEAST_LOG_PROB = -9999.0  # OpenAI's number for what cannot be; JSON has no infinity


class Dialect(Protocol):
    prefix: str
    whole: str
    part: str

    def choice(self, index: int, said: Fragment, reason: str) -> Json:
        """A whole answer."""

    def opening(self, index: int) -> Json | None:
        """What a stream says of an answer before its first text."""

    def delta(self, index: int, said: Fragment, reason: str | None = None) -> Json:
        """Some text of an answer, or its end."""


class Completions:
    prefix, whole, part = "cmpl-", "text_completion", "text_completion"

    def choice(self, index: int, said: Fragment, reason: str) -> Json:
        return self.delta(index, said, reason)

    def opening(self, index: int) -> Json | None:
        return None

    def delta(self, index: int, said: Fragment, reason: str | None = None) -> Json:
        log_probs = None if said.tokens is None else _columns(said.tokens)
        return {
            "index": index,
            "text": said.text,
            "logprobs": log_probs,
            "finish_reason": reason,
        }


class Chat:
    prefix, whole, part = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, said: Fragment, reason: str) -> Json:
        message = {"role": "assistant", "content": said.text, "refusal": None}
        return self._choice(index, "message", message, said, reason)

    def opening(self, index: int) -> Json | None:
        delta = {"role": "assistant", "content": ""}
        return self._choice(index, "delta", delta, Fragment(), None)

    def delta(self, index: int, said: Fragment, reason: str | None = None) -> Json:
        delta = {"content": said.text} if said.text or said.tokens else {}
        return self._choice(index, "delta", delta, said, reason)

    def _choice(
        self, index: int, key: str, message: Json, said: Fragment, reason: str | None
    ) -> Json:
        log_probs = None if said.tokens is None else {"content": [_row(t) for t in said.tokens]}
        return {"index": index, key: message, "logprobs": log_probs, "finish_reason": reason}


@dataclass(frozen=True)
class Reply:
    """One response's letterhead; the bodies it makes."""

    dialect: Dialect
    id: str
    created: int
    model: str

    def whole(self, choices: Sequence[Json], usage: Json, cost: Json) -> Json:
        head = self._head(self.dialect.whole)
        return {**head, "choices": list(choices), "usage": usage, "blocktrain": cost}

    def part(self, choices: Sequence[Json], **more: Json | None) -> Json:
        return {**self._head(self.dialect.part), "choices": list(choices), **more}

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def usage(prompt_bytes: int, output_bytes: int) -> Json:
    """A token is a byte."""
    return {
        "prompt_tokens": prompt_bytes,
        "completion_tokens": output_bytes,
        "total_tokens": prompt_bytes + output_bytes,
    }


def cost(accounts: Sequence[Account]) -> Json:
    """What one answer or several together took."""
    total = Account()
    for account in accounts:
        total.output_bytes += account.output_bytes
        total.traversals += account.traversals
        total.drafted += account.drafted
        total.accepted += account.accepted
        total.replays += account.replays
        for stage, seconds in account.stage_seconds.items():
            total.stage_seconds[stage] = total.stage_seconds.get(stage, 0.0) + seconds
    return {
        "traversals": total.traversals,
        "bytes_per_traversal": round(total.bytes_per_traversal, 3),
        "drafted": total.drafted,
        "accepted": total.accepted,
        "replays": total.replays,
        "stage_seconds": {
            name: round(total.stage_seconds[name], 6) for name in total.stage_seconds
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
