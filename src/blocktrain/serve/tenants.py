"""Which request has which slot of a stage's cache, how much it holds, and who has to go.

Knows nothing of tensors. Room is counted in whole windows, so that a request that was let in can
always grow to its end. Times are handed in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from blocktrain.errors import CacheFullError, MissingPrefixError
from blocktrain.serve.work import Row


@dataclass(frozen=True)
class Limits:
    """What a stage's cache may take."""

    requests: int = 256
    cache_bytes: int = 4 << 30
    idle_seconds: float = 30.0  # a request without a step for so long may have to make room


DEFAULT_LIMITS = Limits()


@dataclass
class Tenant:
    slot: int
    held: int
    seen: float


class Tenants:
    def __init__(self, most: int, idle_seconds: float) -> None:
        self.most = most
        self.idle_seconds = idle_seconds
        self._by_request: dict[int, Tenant] = {}
        self._free = list(range(most))  # a heap: low slots first, so that those in use lie together

    @property
    def requests(self) -> tuple[int, ...]:
        return tuple(self._by_request)

    def held(self, request: int) -> int:
        """Positions held; 0 for one that is not known."""
        tenant = self._by_request.get(request)
        return tenant.held if tenant else 0

    def admit(self, rows: Sequence[Row], now: float) -> list[Tenant]:
        """A tenant per row. All of them or, with an error that names the others, none."""
        if missing := tuple(row.request for row in rows if row.start > self.held(row.request)):
            raise MissingPrefixError("the positions before are not held here", missing)
        for row in rows:
            if tenant := self._by_request.get(row.request):
                tenant.seen = now
        new = [row.request for row in rows if row.request not in self._by_request]
        self._make_room(new, now)
        for request in new:
            self._by_request[request] = Tenant(heappop(self._free), 0, now)
        return [self._by_request[row.request] for row in rows]

    def release(self, request: int) -> None:
        """Forget a request; nothing happens to one that is not known."""
        if tenant := self._by_request.pop(request, None):
            heappush(self._free, tenant.slot)

    def _make_room(self, new: Sequence[int], now: float) -> None:
        lacking = len(new) - len(self._free)
        if lacking <= 0:
            return
        idle = sorted(
            (tenant.seen, request)
            for request, tenant in self._by_request.items()
            if now - tenant.seen >= self.idle_seconds and tenant.seen < now
        )
        if len(idle) < lacking:
            unmet = tuple(new[len(self._free) + len(idle) :])
            raise CacheFullError(f"there is room for {self.most} requests, all in use", unmet)
        for _, request in idle[:lacking]:
            self.release(request)
