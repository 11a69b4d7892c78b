"""Where the time of a step goes: consecutive laps on one clock, which add up to the whole time.

Knows nothing of stages or messages. Nothing is measured unless somebody asks: `UNTIMED` ignores
every lap. On a device that computes asynchronously, such as a GPU, a lap has the time of the calls;
the computation itself counts for the lap that waits for its result.
"""

import time
from collections.abc import Callable

Clock = Callable[[], float]


class Laps:
    """The seconds of each lap by name, in the order of their first laps."""

    def __init__(self, started: float | None = None, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self.started = clock() if started is None else started
        self._ended = self.started
        self.seconds: dict[str, float] = {}

    @property
    def total(self) -> float:
        return self._ended - self.started

    def lap(self, name: str, block: int | None = None) -> None:
        """End a lap that began when the one before it ended."""
        now = self._clock()
        self._add(name if block is None else f"block {block}: {name}", now - self._ended)
        self._ended = now

    def include(self, others: "Laps", until_then: str) -> None:
        """Add laps that were measured elsewhere on the same clock, after a lap named `until_then`
        that ended when they began."""
        self._add(until_then, others.started - self._ended)
        for name, seconds in others.seconds.items():
            self._add(name, seconds)
        self._ended = others.started + others.total

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


class _Untimed(Laps):
    def __init__(self) -> None:
        super().__init__(0.0, lambda: 0.0)

    def lap(self, name: str, block: int | None = None) -> None:
        pass

    def include(self, others: Laps, until_then: str) -> None:
        pass


UNTIMED: Laps = _Untimed()
