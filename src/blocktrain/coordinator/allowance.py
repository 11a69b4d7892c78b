"""How much one caller may ask for: so much a second, and so much at once after a pause.

Far more than any worker needs; it is there for one that asks in a loop, by mistake or on purpose,
while the others wait behind it and the ledger grows.
"""

from collections.abc import Callable

from blocktrain.errors import RefusedError

PER_SECOND = 1_000.0
AT_ONCE = 10_000.0
MANY_CALLERS = 10_000


class Allowance:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._paid_until: dict[str, float] = {}  # by caller: when it has used up nothing any more

    def spend(self, caller: str, cost: float) -> None:
        now = self._clock()
        until = max(self._paid_until.get(caller, now), now) + cost / PER_SECOND
        if (until - now) * PER_SECOND > AT_ONCE:
            raise RefusedError("slow_down", "too many requests; wait before the next one")
        self._paid_until[caller] = until
        if len(self._paid_until) > MANY_CALLERS:
            self._paid_until = {who: at for who, at in self._paid_until.items() if at > now}
