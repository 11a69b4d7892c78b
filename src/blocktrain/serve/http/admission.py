"""How many answers are made at once, and who waits for a place: first come, first served.

Places are taken together, so that a request for several answers never holds some and waits for
the others. The queue is bounded in length and in time. A closed gate lets nobody in, and tells
those inside.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NoReturn

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from blocktrain.errors import OverloadedError, UnavailableError
from blocktrain.serve.router.decode import Account


class AdmissionQueue:
    def __init__(self, places: int, queue: int, patience: float) -> None:
        self.places = places
        self._free = places
        self._queue = queue
        self._patience = patience
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._closed = asyncio.Event()

    @property
    def inside(self) -> int:
        return self.places - self._free

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        self._closed.set()

    async def closing(self) -> NoReturn:
        """Waits until the gate is closed."""
        await self._closed.wait()
        raise UnavailableError("the server is stopping")

    @asynccontextmanager
    async def enter(self, places: int) -> AsyncIterator[None]:
        await self._take(places)
        try:
            yield
        finally:
            self._leave(places)

    async def _take(self, places: int) -> None:
        if not self._waiting and places <= self._free:
            self._free -= places
            return
        if len(self._waiting) >= self._queue:
            raise OverloadedError(f"{self.inside} answers under way and {self.waiting} waiting")
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((places, turn))
        try:
            async with asyncio.timeout(self._patience):
                await turn
        except (asyncio.CancelledError, TimeoutError) as error:
            if turn.cancelled():
                self._waiting.remove((places, turn))
                self._admit()  # behind a large one that left, smaller ones may fit
            else:
                self._leave(places)  # its turn came as it left
            if isinstance(error, TimeoutError):
                raise OverloadedError(f"no place within {self._patience:g} s") from None
            raise

    def _leave(self, places: int) -> None:
        self._free += places
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            places, turn = self._waiting[0]
            if turn.cancelled():
                return  # it is about to remove itself, and to admit who follows
            self._waiting.popleft()
            self._free -= places
            turn.set_result(None)


SUMS = {
    "prompt_bytes": "Bytes of prompts read",
    "output_bytes": "Bytes of answers written",
    "traversals": "Traversals of the ring",
    "drafted": "Bytes drafted",
    "accepted": "Drafted bytes that were accepted",
    "replays": "Prefixes sent again after a stage was lost",
}


class ServerMetrics:
    def __init__(self, gate: AdmissionQueue) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "blocktrain_serve_requests", "Requests answered", ["path", "status"], registry=registry
        )
        self._seconds = Histogram(
            "blocktrain_serve_request_seconds", "From the first byte of a request to the last of"
            " its answer", ["path"], registry=registry,
        )  # fmt: skip
        self._sums = {
            name: Counter(f"blocktrain_serve_{name}", text, registry=registry)
            for name, text in SUMS.items()
        }
        self._stages = Counter(
            "blocktrain_serve_stage_seconds", "Time spent in a stage", ["stage"], registry=registry
        )
        for name, text, value in (
            ("answering", "Answers under way", lambda: gate.inside),
            ("waiting", "Requests that wait for a place", lambda: gate.waiting),
        ):
            Gauge(f"blocktrain_serve_{name}", text, registry=registry).set_function(value)

    def requested(self, path: str, status: int, seconds: float) -> None:
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def answered(self, accounts: Sequence[Account]) -> None:
        for account in accounts:
            for name, total in self._sums.items():
                total.inc(getattr(account, name))
            for stage, seconds in account.stage_seconds.items():
                self._stages.labels(stage).inc(seconds)

    def page(self) -> tuple[bytes, str]:
        return generate_latest(self._registry), CONTENT_TYPE_LATEST
