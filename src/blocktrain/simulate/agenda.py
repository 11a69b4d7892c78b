"""A virtual clock: what is to happen when, in order. Nobody sleeps."""

import gc
import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PAGE_SECONDS = 1.0

Plan = tuple[float, int, Callable[..., None], tuple[Any, ...]]


class Agenda:
    """Pages of a second each. Only the open one is kept in order, which is several times as fast as
    one heap of everything that is ever to come."""

    def __init__(self) -> None:
        self.now = 0.0
        self.happened = 0
        self._number = 0  # of the same moment, what was planned first comes first
        self._open: list[Plan] = []  # a heap
        self._open_page = -1
        self._pages: dict[int, list[Plan]] = {}
        self._next_pages: list[int] = []  # a heap
        self._ended = False

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        self._number += 1
        plan = (time, self._number, action, arguments)
        page = int(time / PAGE_SECONDS)
        if page <= self._open_page:
            heapq.heappush(self._open, plan)
        elif page in self._pages:
            self._pages[page].append(plan)
        else:
            self._pages[page] = [plan]
            heapq.heappush(self._next_pages, page)

    def end(self) -> None:
        """After this nothing happens any more."""
        self._ended = True

    def run(self, until: float) -> None:
        """Let things happen until the clock stands at `until`, or somebody ends it."""
        with _without_garbage_collection():
            while not self._ended and self._has_plans() and self._open[0][0] <= until:
                self._turn_page(until)
        if not self._ended:
            self.now = until

    def _turn_page(self, until: float) -> None:
        plans = self._open
        while plans and plans[0][0] <= until and not self._ended:
            self.now, _, action, arguments = heapq.heappop(plans)
            self.happened += 1
            action(*arguments)

    def _has_plans(self) -> bool:
        if not self._open and self._next_pages:
            self._open_page = heapq.heappop(self._next_pages)
            self._open = self._pages.pop(self._open_page)
            heapq.heapify(self._open)
        return bool(self._open)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """A simulation leaves no cycles behind, and looking for some among millions of plans takes a
    fifth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
