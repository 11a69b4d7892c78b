"""Where a coordinator's requests run: ledger work on one thread, verification on a few.

One thread does all ledger work that waits in one transaction with one commit. Threads of their own
would wait for each other at every statement, for the database and for the interpreter.
"""

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from blocktrain.errors import UnreachableError
from blocktrain.ledger.ledger import Ledger
from blocktrain.protocol.messages import Receipt

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

JOBS_PER_COMMIT = 64  # at most: other coordinators wait for the database too
UNREACHABLE = "the ledger's database does not answer; try again"


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

    def deliver(self) -> None:
        """On the event loop of the future."""
        if self.future.done():  # its caller was cancelled
            return
        if isinstance(self.error, SQLAlchemyError):
            # An error of its own for each: one raised again and again would keep every traceback.
            self.future.set_exception(UnreachableError(UNREACHABLE))
        elif self.error:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class LedgerExecutor:
    """Runs calls that use the ledger, one after another, on its thread."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._reachable = True
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Once all jobs that were queued before are done."""
        self._queue.put(None)
        self._thread.join()

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of the call, once everything it wrote is on disk."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.put(_Job(partial(call, *args, **kwargs), future))
        return await future

    def _work(self) -> None:
        while jobs := self._next_jobs():
            self._run(jobs)
            _deliver(jobs)

    def _next_jobs(self) -> list[_Job]:
        """All jobs that wait, at least one; none after `stop`."""
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
            # Without this thread all callers would wait for ever, so it survives anything.
            if not isinstance(error, SQLAlchemyError):
                log.exception("the ledger's thread failed and goes on")
            for job in jobs:
                job.error = _failure(error)
        self._log_change(
            next((j.error for j in jobs if isinstance(j.error, SQLAlchemyError)), None)
        )

    def _log_change(self, failure: SQLAlchemyError | None) -> None:
        """Once when the database stops answering, and once when it answers again."""
        if failure and self._reachable:
            log.warning("the ledger's database does not answer: %s", failure)
        elif not failure and not self._reachable:
            log.warning("the ledger's database answers again")
        self._reachable = failure is None


def _failure(error: BaseException) -> Exception:
    if isinstance(error, SQLAlchemyError):
        return error
    return RuntimeError(f"the ledger's thread failed: {error!r}")


def _deliver(jobs: list[_Job]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[_Job]] = defaultdict(list)
    for job in jobs:
        by_loop[job.future.get_loop()].append(job)
    for loop, of_loop in by_loop.items():
        try:
            loop.call_soon_threadsafe(_deliver_all, of_loop)
        except RuntimeError:  # the loop was closed, and its callers are gone
            continue


def _deliver_all(jobs: list[_Job]) -> None:
    for job in jobs:
        job.deliver()


class VerificationQueue:
    """Verifies a few updates at a time, and each update once however many requests wait for it."""

    def __init__(self, limit: int) -> None:
        self._places = asyncio.Semaphore(limit)
        self._tasks: dict[str, asyncio.Task[Receipt]] = {}

    async def run(self, verify: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The call's result, from a thread of its own once there is a free place."""
        async with self._places:
            return await run_in_threadpool(verify, *args, **kwargs)

    async def run_once(
        self, lease: str, settle: Callable[[], Coroutine[Any, Any, Receipt]]
    ) -> Receipt:
        """The receipt of a lease's update. Goes on if the first request is cancelled."""
        task = self._tasks.get(lease)
        if task is None:
            task = self._tasks[lease] = asyncio.create_task(settle())
            task.add_done_callback(lambda done: self._tasks.pop(lease))
        return await asyncio.shield(task)


class Notifier:
    """Wakes coroutines, on any event loop, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: set[asyncio.Future[None]] = set()

    def next(self) -> "asyncio.Future[None]":
        """Done at the next `notify`. Cancel it when it is not needed any more."""
        future = asyncio.get_running_loop().create_future()
        with self._lock:
            self._futures.add(future)
        future.add_done_callback(self._forget)
        return future

    def notify(self) -> None:
        with self._lock:
            futures = list(self._futures)
        for future in futures:
            try:
                future.get_loop().call_soon_threadsafe(_set_done, future)
            except RuntimeError:  # the loop was closed
                self._forget(future)

    @property
    def waiting(self) -> int:
        """The number of futures that are not done."""
        return len(self._futures)

    def _forget(self, future: "asyncio.Future[None]") -> None:
        with self._lock:
            self._futures.discard(future)


def _set_done(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
