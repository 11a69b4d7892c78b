"""Final tokens of an answer: held back while they may be the start of a stop string; ended by a
stop string, an end token or a limit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

Spell = Callable[[int], bytes]  # the text of a token


@dataclass(frozen=True)
class OutputToken:
    """A token that will not change any more. `data` is its bytes, up to a stop string if one begins
    in it."""

    id: int
    data: bytes
    log_prob: float | None = None  # None: no token comes before it
    top: Mapping[int, float] | None = None  # likeliest tokens at its position, if requested


class Output:
    """Takes final tokens in order, and decides which may be shown."""

    def __init__(
        self, max_tokens: int, stop: Sequence[bytes] = (), eos: Sequence[int] = ()
    ) -> None:
        self._max_tokens, self._eos = max_tokens, eos
        self._stop = [text for text in stop if text]
        self._longest = max(map(len, self._stop), default=1)
        self._text = b""  # the end of the text, where a stop string may begin
        self._pending: list[OutputToken] = []
        self._count = 0
        self.length = 0  # tokens
        self.reason = "" if max_tokens > 0 else "length"

    def add(self, tokens: Sequence[OutputToken]) -> list[OutputToken]:
        """Returns the tokens that may be shown now. Tokens after the end are dropped."""
        for token in tokens:
            if token.id in self._eos:
                self.reason = "stop"
                break
            self._take(token)
            if self.reason:
                break
        ready = self._pending if self.reason else self._decided()
        self._pending = self._pending[len(ready) :]
        self.length += len(ready)
        return ready

    def _take(self, token: OutputToken) -> None:
        self._pending.append(token)
        self._count += 1
        start = max(0, len(self._text) - self._longest + 1)
        self._text = self._text[start:] + token.data
        ends = [at for at in map(self._text.find, self._stop) if at >= 0]
        if ends:
            self.reason = "stop"
            self._drop_text(len(self._text) - min(ends))
        elif self._count >= self._max_tokens:
            self.reason = "length"

    def _drop_text(self, count: int) -> None:
        """Remove the last bytes of text, and the tokens that consist only of them."""
        while count:
            last = self._pending.pop()
            if len(last.data) > count:
                self._pending.append(replace(last, data=last.data[:-count]))
            count = max(0, count - len(last.data))

    def _decided(self) -> list[OutputToken]:
        """Pending tokens that cannot be part of a stop string."""
        undecided = max(
            (
                count
                for stop in self._stop
                for count in range(1, len(stop))
                if self._text.endswith(stop[:count])
            ),
            default=0,
        )
        keep = len(self._pending)
        while undecided > 0:
            keep -= 1
            undecided -= len(self._pending[keep].data)
        return self._pending[:keep]
