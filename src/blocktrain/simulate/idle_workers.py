"""Workers for whom there is nothing now, in the order of their asking.

Most of them wait for what their own update becomes. They stand apart, by its block, and are not
looked at while that has text: text comes back often, and they are many.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence


class IdleWorkers:
    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._awaited: dict[str, int | None] = {}
        # By what they await; a plain dict is slow to find its first after many have gone.
        self._groups: defaultdict[int | None, OrderedDict[str, None]] = defaultdict(OrderedDict)

    def __contains__(self, worker: str) -> bool:
        return worker in self._seconds

    def __len__(self) -> int:
        return len(self._seconds)

    def park(self, worker: str, seconds: float, awaited: int | None) -> None:
        """`seconds`: when it should ask again; `awaited`: the block of its own update."""
        self._seconds[worker] = seconds
        self._join(worker, awaited)

    def leave(self, worker: str) -> float | None:
        """Its seconds; None where it is not here."""
        if worker not in self._seconds:
            return None
        del self._groups[self._awaited.pop(worker)][worker]
        return self._seconds.pop(worker)

    def awaiting(self, block: int) -> Sequence[str]:
        return tuple(self._groups[block])

    def first(
        self,
        holds_back: Callable[[int], bool],
        awaits: Callable[[str], int | None],
        may_take: Callable[[str], bool],
    ) -> str | None:
        """The first that may take something, of those who await nothing of a block that holds them
        back."""
        found = self._first_free(awaits, may_take)
        for block, workers in self._groups.items():
            if found is None and block is not None and not holds_back(block):
                found = next(filter(may_take, workers), None)
        return found

    def _first_free(
        self, awaits: Callable[[str], int | None], may_take: Callable[[str], bool]
    ) -> str | None:
        """Of those of whom nobody knows that they await anything. Who does stands apart from now
        on."""
        found, passed = None, []
        for worker in self._groups[None]:
            block = awaits(worker)
            if block is not None:
                passed.append((worker, block))
            elif may_take(worker):
                found = worker
                break
        for worker, block in passed:
            del self._groups[None][worker]
            self._join(worker, block)
        return found

    def reconsider(self, worker: str, awaits: Callable[[str], int | None]) -> None:
        """Something has happened to a worker: what it awaited it may not any more."""
        if worker in self._seconds:
            del self._groups[self._awaited[worker]][worker]
            self._join(worker, awaits(worker))

    def look_again(self, block: int, awaits: Callable[[str], int | None]) -> None:
        """Something has happened to a block: who awaits something of it may not any more."""
        for worker in self._groups.pop(block, ()):
            self._join(worker, awaits(worker))

    def _join(self, worker: str, awaited: int | None) -> None:
        self._awaited[worker] = awaited
        self._groups[awaited][worker] = None
