"""Steps that came before the context they need, each for a bounded time; and what was here once."""

from collections.abc import Collection, Iterable

from blocktrain.serve.steps import Step


class Parking:
    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._waiting: dict[int, tuple[float, Step]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def enter(self, step: Step, now: float) -> None:
        """A step of one row; a newer one of the same request takes the older one's place."""
        self._waiting[step.work.rows[0].request] = (now + self._patience, step)

    def leave(self, requests: Collection[int]) -> list[Step]:
        """The steps whose context has come."""
        here = [request for request in requests if request in self._waiting]
        return [self._waiting.pop(request)[1] for request in here]

    def expired(self, now: float) -> list[Step]:
        """The steps that have waited long enough."""
        late = [request for request, (until, _) in self._waiting.items() if until <= now]
        return [self._waiting.pop(request)[1] for request in late]

    def forget(self, request: int) -> None:
        self._waiting.pop(request, None)


class Recent:
    """The last numbers that were added, and no more than so many."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[int, None] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._held

    def add(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._held.pop(number, None)
            self._held[number] = None
        while len(self._held) > self._most:
            del self._held[next(iter(self._held))]
