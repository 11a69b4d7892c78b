"""Bounds on what callers may cost: a rate limiter, and a cache that forgets its oldest entries."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from blocktrain.errors import RefusedError

# A token bucket for each caller: far more than a worker needs, so that one which sends requests in
# a loop cannot keep the others waiting or fill the ledger.
COST_PER_SECOND = 1_000.0
BURST_COST = 10_000.0
MANY_CALLERS = 10_000


class RateLimiter:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._full_at: dict[str, float] = {}  # by caller: when its bucket is full again

    def spend(self, caller: str, cost: float) -> None:
        now = self._clock()
        full_at = max(self._full_at.get(caller, now), now) + cost / COST_PER_SECOND
        if (full_at - now) * COST_PER_SECOND > BURST_COST:
            raise RefusedError("slow_down", "too many requests; wait a second before the next one")
        self._full_at[caller] = full_at
        if len(self._full_at) > MANY_CALLERS:
            self._full_at = {name: at for name, at in self._full_at.items() if at > now}


T = TypeVar("T")


class BoundedCache(Generic[T]):
    """Keeps the newest entries. May be used from several threads at once."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: dict[str, T] = {}
        self._lock = threading.Lock()

    def put(self, key: str, value: T) -> None:
        with self._lock:
            self._entries.pop(key, None)
            self._entries[key] = value
            if len(self._entries) > self._limit:
                del self._entries[next(iter(self._entries))]

    def get(self, key: str) -> T | None:
        return self._entries.get(key)

    def pop(self, key: str) -> T | None:
        with self._lock:
            return self._entries.pop(key, None)
