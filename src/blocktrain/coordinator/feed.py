"""Serves the run page to many viewers at the cost of one: answers are made and compressed once for
all of them, and live streams send the same bytes to everybody.

For the thread of the event loop; the ledger is read in other threads.
"""

import asyncio
import gzip
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Generic, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from blocktrain.coordinator.overview import Page
from blocktrain.protocol.messages import Message

T = TypeVar("T")

REFRESH_SECONDS = 1.0  # between two reads of the ledger, while somebody watches
OVERVIEW_SECONDS = 2.0
CHARTS_SECONDS = 5.0
WORKERS_SECONDS = 5.0
STREAM_SECONDS = 3600.0  # then a viewer connects again, and is authorized again
COMPRESSION = 5


class Shared(Generic[T]):
    """A value that is made at most once in these seconds, for all that ask meanwhile."""

    def __init__(self, make: Callable[[], Awaitable[T]], seconds: float) -> None:
        self._make, self._seconds = make, seconds
        self._task: asyncio.Task[T] | None = None
        self._until = -math.inf

    async def get(self) -> T:
        task = self._task
        if task is None or (task.done() and time.monotonic() >= self._until):
            task = self._task = asyncio.create_task(self._renew())
        return await asyncio.shield(task)

    def expire(self) -> None:
        """Make a new value for the next caller."""
        self._task = None

    async def _renew(self) -> T:
        self._until = -math.inf  # a failure is not kept
        value = await self._make()
        self._until = time.monotonic() + self._seconds
        return value


class Packed:
    """A message as JSON, plain and compressed."""

    def __init__(self, message: Message) -> None:
        self.json = message.model_dump_json().encode()
        self.gzip = gzip.compress(self.json, COMPRESSION)

    def response(self, request: Request) -> Response:
        headers = {"cache-control": "no-store", "vary": "accept-encoding, authorization"}
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(self.json, 200, headers, "application/json")
        return Response(self.gzip, 200, {**headers, "content-encoding": "gzip"}, "application/json")


class Feed:
    def __init__(self, page: Page) -> None:
        self.page = page
        self._fresh = Shared(lambda: run_in_threadpool(page.refresh), REFRESH_SECONDS)
        self.overview = self._packed(page.overview, OVERVIEW_SECONDS)
        self.charts = self._packed(page.charts, CHARTS_SECONDS)
        self._workers = {
            private: self._packed(partial(page.contributors, private=private), WORKERS_SECONDS)
            for private in (False, True)
        }

    def _packed(self, make: Callable[[], Message], seconds: float) -> Shared[Packed]:
        async def packed() -> Packed:
            await self._fresh.get()
            return await run_in_threadpool(lambda: Packed(make()))

        return Shared(packed, seconds)

    async def call(self, make: Callable[[], T]) -> T:
        """Call a method of the page in a thread, once its data are up to date."""
        await self._fresh.get()
        return await run_in_threadpool(make)

    def expire(self) -> None:
        """Show at once what the operator has done."""
        self._fresh.expire()
        for shared in (self.overview, *self._workers.values()):
            shared.expire()

    def workers(self, *, private: bool) -> Shared[Packed]:
        return self._workers[private]

    async def stream(self, after: int, *, private: bool) -> AsyncIterator[bytes]:
        """Overviews and events after this number, as server-sent events. `behind` tells a viewer to
        search the events that the stream leaves out."""
        ends, sent = time.monotonic() + STREAM_SECONDS, None
        while time.monotonic() < ends:
            await self._fresh.get()
            events = self.page.newest_events(after, private=private)
            if events is None:
                after = self.page.last_event
                yield f"id: {after}\nevent: behind\ndata: {{}}\n\n".encode()
            for event in events or ():
                after = event.number
                yield f"id: {after}\nevent: event\ndata: {event.model_dump_json()}\n\n".encode()
            overview = await self.overview.get()
            if overview is not sent:
                sent = overview
                yield b"event: overview\ndata: " + overview.json + b"\n\n"
            else:
                yield b": nothing new\n\n"
            await asyncio.sleep(REFRESH_SECONDS)
