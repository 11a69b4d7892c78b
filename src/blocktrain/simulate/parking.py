"""Workers for whom there is nothing now, in the order of their asking.

Most of them wait for what their own update becomes. They are passed over once and then not looked
at before something has happened to their block: text comes back often, and they are many.
"""

from collections import defaultdict
from collections.abc import Callable


class Parking:
    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._looked_at: dict[str, None] = {}
        self._passed_over: defaultdict[int, list[str]] = defaultdict(list)  # by block

    def __contains__(self, worker: str) -> bool:
        return worker in self._seconds

    def __len__(self) -> int:
        return len(self._seconds)

    def park(self, worker: str, seconds: float) -> None:
        """`seconds`: when it should ask again."""
        self._seconds[worker] = seconds
        self._looked_at[worker] = None

    def leave(self, worker: str) -> float | None:
        """Its seconds; None where it is not here."""
        self._looked_at.pop(worker, None)
        return self._seconds.pop(worker, None)

    def first(
        self, awaits: Callable[[str], int | None], may_take: Callable[[str], bool]
    ) -> str | None:
        """The first that may take something and awaits nothing of a block."""
        found, passed = None, []
        for worker in self._looked_at:
            block = awaits(worker)
            if block is not None:
                passed.append((worker, block))
            elif may_take(worker):
                found = worker
                break
        for worker, block in passed:
            del self._looked_at[worker]
            self._passed_over[block].append(worker)
        return found

    def look_again(self, block: int) -> None:
        """Something has happened to a block: who awaits something of it may not any more."""
        for worker in self._passed_over.pop(block, ()):
            if worker in self._seconds:
                self._looked_at[worker] = None
