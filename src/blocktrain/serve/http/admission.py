"""Who may begin an answer: a limited number of places, and a queue for each tenant.

A free place goes to the tenant with the fewest answers in progress; among equals, to the one that
was served longest ago. So a tenant with many requests does not delay one with few.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NoReturn

from blocktrain.errors import OverloadedError, UnavailableError

LONGEST_RETRY_SECONDS = 60.0
SMOOTHING = 1 / 8


@dataclass(eq=False)
class QueuedRequest:
    """A request in a queue. `ahead`: how many requests of all tenants waited when it came;
    `seconds`: how long it waited, once it has a place."""

    tenant: str
    places: int
    ahead: int
    came_at: float
    admitted: "asyncio.Future[None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    seconds: float = 0.0


@dataclass(eq=False)
class TenantQueue:
    inside: int = 0  # places in use
    turn: int = 0  # when it was last given a place; larger is later
    waiting: deque[QueuedRequest] = field(default_factory=deque)


class AdmissionQueue:
    """Limits the answers in progress, and the waiting requests of each tenant. Within a tenant,
    first come, first served: a small request does not overtake a large one."""

    def __init__(
        self,
        places: int,
        queue: int,
        queue_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._places, self._max_waiting, self._queue_seconds = places, queue, queue_seconds
        self._clock = clock
        self._tenants: dict[str, TenantQueue] = {}
        self._turn = 0
        self._answer_seconds = 0.0  # how long an answer takes, smoothed
        self._closed = asyncio.Event()

    @property
    def inside(self) -> int:
        """Answers in progress."""
        return sum(each.inside for each in self._tenants.values())

    @property
    def waiting(self) -> int:
        """Waiting requests."""
        return sum(len(each.waiting) for each in self._tenants.values())

    def close(self) -> None:
        """Admit no more requests, and end the wait in `closing`."""
        self._closed.set()

    async def closing(self) -> NoReturn:
        """Wait until the queue is closed, then raise UnavailableError."""
        await self._closed.wait()
        raise UnavailableError("the server is stopping; try again in a minute")

    @asynccontextmanager
    async def enter(self, places: int, tenant: str = "") -> AsyncIterator[QueuedRequest]:
        request = await self._take(places, tenant)
        began = self._clock()
        try:
            yield request
        finally:
            seconds = self._clock() - began
            self._answer_seconds += SMOOTHING * (seconds - self._answer_seconds)
            self._give_back(request)

    async def _take(self, places: int, tenant: str) -> QueuedRequest:
        queue = self._tenants.setdefault(tenant, TenantQueue())
        request = QueuedRequest(tenant, places, self.waiting, self._clock())
        queue.waiting.append(request)
        self._admit()
        try:
            if not request.admitted.done() and len(queue.waiting) > self._max_waiting:
                raise OverloadedError(self._full(queue), self._retry_seconds)
            async with asyncio.timeout(self._queue_seconds):
                await asyncio.shield(request.admitted)  # a cancelled request may still get a place
        except BaseException as error:
            self._leave(request)
            if isinstance(error, TimeoutError):
                raise OverloadedError(
                    f"the server is full: no place became free within {self._queue_seconds:g} s;"
                    " try again later",
                    self._retry_seconds,
                ) from None
            raise
        request.seconds = self._clock() - request.came_at
        return request

    def _admit(self) -> None:
        """Give free places to waiting requests."""
        while waiting := [each for each in self._tenants.values() if each.waiting]:
            queue = min(waiting, key=lambda each: (each.inside, each.turn))
            if self.inside + queue.waiting[0].places > self._places:
                return
            request = queue.waiting.popleft()
            self._turn += 1
            queue.turn, queue.inside = self._turn, queue.inside + request.places
            request.admitted.set_result(None)

    def _leave(self, request: QueuedRequest) -> None:
        """Forget a request that waits no longer, or that got its place too late."""
        queue = self._tenants[request.tenant]
        if request in queue.waiting:
            queue.waiting.remove(request)
            self._admit()
        else:
            self._give_back(request)

    def _give_back(self, request: QueuedRequest) -> None:
        self._tenants[request.tenant].inside -= request.places
        self._admit()

    def _full(self, queue: TenantQueue) -> str:
        return (
            f"the server is full ({self.inside} answers in progress, {len(queue.waiting) - 1} of"
            " your requests waiting); try again later"
        )

    @property
    def _retry_seconds(self) -> float:
        """About how long it takes until those that wait now have places."""
        rounds = (self.waiting + 1) / self._places
        return min(max(1.0, rounds * self._answer_seconds), LONGEST_RETRY_SECONDS)
