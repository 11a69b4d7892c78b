"""Runs all ledger work of a coordinator on one thread.

Waiting jobs share one transaction and one commit. Several threads would only wait for each other,
for the database and for the interpreter lock.
"""

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from blocktrain.errors import UnreachableError
from blocktrain.ledger.ledger import Ledger

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

JOBS_PER_COMMIT = 64  # bounded, because other coordinators wait for the database
UNREACHABLE = "the ledger's database does not answer; try again"


class LedgerUnreachableError(UnreachableError):
    """The ledger's database does not answer."""


@dataclass
class _Job:
    call: Callable[[], Any]
    future: asyncio.Future[Any]
    result: Any = None
    error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.call()
        except Exception as error:
            self.error = error


class LedgerExecutor:
    """Runs calls that use the ledger one after another on one thread."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._reachable = True
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish all queued jobs, then end the thread."""
        self._queue.put(None)
        self._thread.join()

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call on the thread; returns once its writes are committed."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.put(_Job(partial(call, *args, **kwargs), future))
        return await future

    def _work(self) -> None:
        while jobs := self._next_jobs():
            self._run(jobs)
            _deliver(jobs)

    def _next_jobs(self) -> list[_Job]:
        """Wait for a job, and take all that are queued, up to JOBS_PER_COMMIT. Returns an empty
        list after `stop`."""
        jobs = [self._queue.get()]
        while jobs[-1] is not None and len(jobs) < JOBS_PER_COMMIT:
            try:
                jobs.append(self._queue.get_nowait())
            except Empty:
                break
        if jobs[-1] is None and len(jobs) > 1:
            self._queue.put(None)
        return [job for job in jobs if job is not None]

    def _run(self, jobs: list[_Job]) -> None:
        try:
            with self._ledger.together():
                for job in jobs:
                    job.run()
        except BaseException as error:
            # Callers would hang without this thread, so it survives every error.
            cause = error
            if not isinstance(error, SQLAlchemyError):
                log.exception("the ledger thread caught an unexpected error, and continues")
                cause = RuntimeError(f"unexpected error on the ledger thread: {error!r}")
            for job in jobs:
                job.error = cause
        failure = next((job.error for job in jobs if isinstance(job.error, SQLAlchemyError)), None)
        if failure and self._reachable:  # log changes only, not every failure
            log.warning("the ledger's database does not answer: %s", failure)
        elif not failure and not self._reachable:
            log.warning("the ledger's database answers again")
        self._reachable = failure is None


def _deliver(jobs: list[_Job]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[_Job]] = defaultdict(list)
    for job in jobs:
        by_loop[job.future.get_loop()].append(job)
    for loop, loop_jobs in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed: no caller waits
            loop.call_soon_threadsafe(_deliver_all, loop_jobs)


def _deliver_all(jobs: list[_Job]) -> None:
    """Pass the jobs' results and errors to their futures. Runs on the event loop of these
    futures."""
    for job in jobs:
        if job.future.done():  # the caller was cancelled
            continue
        if isinstance(job.error, SQLAlchemyError):
            # A new exception for each future: a shared one would collect all tracebacks.
            job.future.set_exception(LedgerUnreachableError(UNREACHABLE))
        elif job.error:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(job.result)


class Notifier:
    """Wakes coroutines of any event loop, from any thread."""

    def __init__(self) -> None:
        self._futures: set[asyncio.Future[None]] = set()  # add, discard and copy are atomic

    def next(self) -> "asyncio.Future[None]":
        """A future that completes at the next `notify`. Cancel it if it is no longer needed."""
        future = asyncio.get_running_loop().create_future()
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def notify(self) -> None:
        for future in self._futures.copy():
            try:
                future.get_loop().call_soon_threadsafe(_set_done, future)
            except RuntimeError:  # the loop is closed
                self._futures.discard(future)


def _set_done(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


class BoundedCache(Generic[T]):
    """A thread-safe cache of the newest entries."""

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
