"""How many answers are generated at once, who waits for a place, and the metrics of both.

Places are given first come, first served. A request for several answers takes all its places
together, so it never holds some while it waits for others. The queue is bounded in length and time.
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
from blocktrain.serve.router.decode import AnswerCost


class AdmissionQueue:
    def __init__(self, places: int, queue: int, queue_seconds: float) -> None:
        self.places = places
        self._free = places
        self._max_waiting = queue
        self._queue_seconds = queue_seconds
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._closed = asyncio.Event()

    @property
    def inside(self) -> int:
        return self.places - self._free

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        """Admit no further request, and wake what waits in `closing`."""
        self._closed.set()

    async def closing(self) -> NoReturn:
        """Wait until the queue is closed, then raise UnavailableError."""
        await self._closed.wait()
        raise UnavailableError("the server is stopping")

    @asynccontextmanager
    async def enter(self, places: int) -> AsyncIterator[None]:
        await self._take(places)
        try:
            yield
        finally:
            self._give_back(places)

    async def _take(self, places: int) -> None:
        if not self._waiting and places <= self._free:
            self._free -= places
            return
        if len(self._waiting) >= self._max_waiting:
            raise OverloadedError(
                f"the server is full: {self.inside} answers in progress, {self.waiting} waiting"
            )
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((places, turn))
        try:
            async with asyncio.timeout(self._queue_seconds):
                await turn
        except (asyncio.CancelledError, TimeoutError) as error:
            if turn.cancelled():
                self._waiting.remove((places, turn))
                self._admit()  # smaller requests behind this one may fit
            else:
                self._give_back(places)  # admitted in the same moment
            if isinstance(error, TimeoutError):
                raise OverloadedError(
                    f"the server is full: no answer ended within {self._queue_seconds:g} s"
                ) from None
            raise

    def _give_back(self, places: int) -> None:
        self._free += places
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            places, turn = self._waiting[0]
            if turn.cancelled():
                return  # its own task is about to remove it and to call this again
            self._waiting.popleft()
            self._free -= places
            turn.set_result(None)


SUMS = {
    "prompt_bytes": "Bytes of prompts read",
    "output_bytes": "Bytes of answers written",
    "traversals": "Traversals of the ring",
    "drafted": "Bytes drafted",
    "accepted": "Drafted bytes that were accepted",
    "replays": "Contexts sent again after a stage or its cache lost them",
}


class ServerMetrics:
    def __init__(self, queue: AdmissionQueue) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "blocktrain_serve_requests", "Requests answered", ["path", "status"], registry=registry
        )
        self._seconds = Histogram(
            "blocktrain_serve_request_seconds", "From a request's headers to the end of its"
            " answer", ["path"], registry=registry,
        )  # fmt: skip
        self._sums = {
            name: Counter(f"blocktrain_serve_{name}", text, registry=registry)
            for name, text in SUMS.items()
        }
        self._stages = Counter(
            "blocktrain_serve_stage_seconds", "Time spent in a stage", ["stage"], registry=registry
        )
        for name, text, value in (
            ("answering", "Answers in progress", lambda: queue.inside),
            ("waiting", "Requests that wait for a place", lambda: queue.waiting),
        ):
            Gauge(f"blocktrain_serve_{name}", text, registry=registry).set_function(value)

    def requested(self, path: str, status: int, seconds: float) -> None:
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def answered(self, costs: Sequence[AnswerCost]) -> None:
        for cost in costs:
            for name, total in self._sums.items():
                total.inc(getattr(cost, name))
            for stage, seconds in cost.stage_seconds.items():
                self._stages.labels(stage).inc(seconds)

    def page(self) -> tuple[bytes, str]:
        return generate_latest(self._registry), CONTENT_TYPE_LATEST
