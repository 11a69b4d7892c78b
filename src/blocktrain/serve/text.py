"""An answer's bytes as text, as they come: no character is ever cut in two.

What is said piece by piece is, joined, the whole answer decoded at once; U+FFFD stands only for
bytes that are no UTF-8.
"""

import codecs
from collections.abc import Mapping
from dataclasses import dataclass

from blocktrain.serve.request import Piece


@dataclass(frozen=True)
class Token:
    """A byte, the log-probability it was picked with, and which character of the text it is in."""

    byte: int
    log_prob: float
    top: Mapping[int, float]
    offset: int


@dataclass(frozen=True)
class Fragment:
    """Text that can be shown, and the bytes that came, where log-probabilities are asked for."""

    text: str = ""
    tokens: tuple[Token, ...] | None = None


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
            tokens.append(Token(byte, piece.log_probs[index], top, offset))
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
