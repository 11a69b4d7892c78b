"""How much one caller may ask for: so much a second, and so much at once after a pause.

Far more than any worker needs; it is there for one that asks in a loop, by mistake or on purpose,
while the others wait behind it and the ledger grows.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from blocktrain.errors import RefusedError

PER_SECOND = 1_000.0
AT_ONCE = 10_000.0
MANY_CALLERS = 10_000


class RateLimiter:
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


T = TypeVar("T")


class LruCache(Generic[T]):
    """May be used from several threads at once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[str, T] = {}
        self._lock = threading.Lock()

    def remember(self, name: str, found: T) -> None:
        with self._lock:
            self._known.pop(name, None)
            self._known[name] = found
            if len(self._known) > self._most:
                del self._known[next(iter(self._known))]

    def get(self, name: str) -> T | None:
        return self._known.get(name)

    def forget(self, name: str) -> T | None:
        """What was known of it."""
        with self._lock:
            return self._known.pop(name, None)
