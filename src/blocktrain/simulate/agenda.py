"""A virtual clock: what is to happen when, in order. Nobody sleeps."""

import heapq
from collections.abc import Callable
from typing import Any


class Agenda:
    def __init__(self) -> None:
        self.now = 0.0
        self.happened = 0
        self._planned: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0  # of the same moment, what was planned first comes first
        self._ended = False

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        self._number += 1
        heapq.heappush(self._planned, (time, self._number, action, arguments))

    def end(self) -> None:
        """After this nothing happens any more."""
        self._ended = True

    def run(self, until: float) -> None:
        """Let things happen until the clock stands at `until`, or somebody ends it."""
        planned = self._planned
        while planned and planned[0][0] <= until and not self._ended:
            self.now, _, action, arguments = heapq.heappop(planned)
            self.happened += 1
            action(*arguments)
        if not self._ended:
            self.now = until
