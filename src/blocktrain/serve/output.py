"""The bytes of one answer: which of them may be shown, and where it ends.

A stop string ends the answer and is no part of it, also where it arrives in pieces: bytes that may
still become one are held back, and no others. Knows nothing of how bytes are found.
"""

from collections.abc import Sequence

from blocktrain.serve.request import Piece

Top = dict[int, float]


class Output:
    def __init__(self, stop: Sequence[bytes], most_bytes: int) -> None:
        self._stop = [text for text in stop if text]
        self._most = most_bytes
        self._data = bytearray()
        self._log_probs: list[float] = []
        self._top: list[Top] = []
        self.shown = 0
        self.reason = "" if most_bytes > 0 else "length"

    def add(self, data: bytes, log_probs: Sequence[float], top: Sequence[Top]) -> Piece:
        """Bytes that are final; gives those that may be shown by now."""
        known = len(self._data)
        self._data += data
        self._log_probs += log_probs
        self._top += top
        end = self._end(known)
        piece = Piece(
            bytes(self._data[self.shown : end]),
            tuple(self._log_probs[self.shown : end]),
            tuple(self._top[self.shown : end]),
        )
        self.shown = end
        return piece

    def _end(self, known: int) -> int:
        """Up to where bytes may be shown; sets the reason where the answer ends."""
        found = (
            self._data.find(stop, max(0, known - len(stop) + 1), self._most) for stop in self._stop
        )
        if ends := [index for index in found if index >= 0]:
            self.reason = "stop"
            return min(ends)
        if len(self._data) >= self._most:
            self.reason = "length"
            return self._most
        return len(self._data) - self._undecided()

    def _undecided(self) -> int:
        """How many of the last bytes may still become a stop string."""
        return max(
            (
                count
                for stop in self._stop
                for count in range(1, min(len(stop), len(self._data) + 1))
                if self._data.endswith(stop[:count])
            ),
            default=0,
        )
