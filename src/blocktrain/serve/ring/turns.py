"""Which prompts a turn reads, so that a long prompt does not hold up other requests.

A router and a stage compute in turns. A turn first computes all steps that wait, then a chunk of
prompts: a limited number of positions. Knows nothing of tensors and connections.
"""

from collections.abc import Iterable, Mapping

CPU_CHUNK, ACCELERATOR_CHUNK = 32, 512  # positions
OLDEST_EVERY = 8  # turns; the oldest prompt then goes first, so that it never waits forever
MAX_REMEMBERED = 10_000  # requests


def chunk_for(device: str, positions: int = 0) -> int:
    """The number of positions in a chunk; `positions` 0 is the default for the device."""
    return positions or (CPU_CHUNK if device == "cpu" else ACCELERATOR_CHUNK)


class PromptTurns:
    """Divides prompts into chunks. The prompts of which the fewest positions were read go first, so
    a short prompt passes a long one that began earlier. A prompt that ends within two chunks is
    read at once, because a second turn would cost it more than it saves others."""

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk
        self._turn = 0
        self._read: dict[int, int] = {}  # positions read so far, by request

    def choose(self, waiting: Mapping[int, int]) -> dict[int, int]:
        """How many positions to read of which requests in this turn. `waiting`: the number of
        positions that each request could read now, the oldest request first."""
        if not waiting:
            return {}
        self._turn += 1
        order = sorted(waiting, key=lambda request: self._read.get(request, 0))
        if self._turn % OLDEST_EVERY == 0:
            order = list(waiting)
        first, *others = order
        whole = waiting[first] <= 2 * self._chunk
        chosen = {first: waiting[first] if whole else self._chunk}
        for request in others:
            left = self._chunk - sum(chosen.values())
            if waiting[request] <= left or left > self._chunk // 2:
                chosen[request] = min(left, waiting[request])
        for request, count in chosen.items():
            self._read[request] = self._read.pop(request, 0) + count
        self.forget([*self._read][:-MAX_REMEMBERED])
        return chosen

    def forget(self, requests: Iterable[int]) -> None:
        for request in requests:
            self._read.pop(request, None)
