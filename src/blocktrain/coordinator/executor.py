"""One thread that does the ledger's work for every request: what waits is done in one go and put
on disk by one commit.

Requests that each had a thread would wait for each other at every statement, twice: for the
database and for the interpreter.
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

MOST_AT_ONCE = 64  # other coordinators wait for the database too
UNREACHABLE = "the ledger does not answer; try again"


@dataclass
class _Job:
    call: Callable[[], Any]
    answer: asyncio.Future[Any]
    outcome: Any = None
    error: BaseException | None = None
    failure: SQLAlchemyError | None = None  # of the ledger, where that is the error

    def run(self) -> None:
        try:
            self.outcome = self.call()
        except SQLAlchemyError as error:
            self.failure, self.error = error, UnreachableError(UNREACHABLE)
        except Exception as error:
            self.error = error

    def deliver(self) -> None:
        if self.answer.done():  # whoever asked has left
            return
        if self.error:
            self.answer.set_exception(self.error)
        else:
            self.answer.set_result(self.outcome)


class LedgerExecutor:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._questions: SimpleQueue[_Job | None] = SimpleQueue()
        self._answers = True
        self._thread = threading.Thread(target=self._work, name="desk", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._questions.put(None)
        self._thread.join()

    async def ask(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What the call returns, once all it wrote is on disk."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._questions.put(_Job(partial(call, *args, **kwargs), answer))
        return await answer

    def _work(self) -> None:
        while questions := self._next():
            self._answer(questions)
            self._deliver(questions)

    def _next(self) -> list[_Job]:
        """All that waits; nothing once there is to be no more."""
        questions = [self._questions.get()]
        while questions[-1] is not None and len(questions) < MOST_AT_ONCE:
            try:
                questions.append(self._questions.get_nowait())
            except Empty:
                break
        if questions[-1] is None and len(questions) > 1:
            self._questions.put(None)
        return [question for question in questions if question is not None]

    def _answer(self, questions: list[_Job]) -> None:
        try:
            with self._ledger.together():
                for question in questions:
                    question.run()
        except SQLAlchemyError as error:
            for question in questions:
                question.failure, question.error = error, UnreachableError(UNREACHABLE)
        except BaseException as error:
            # Whatever it is: without this thread all who ask would wait for ever.
            log.exception("the desk failed, and goes on")
            for question in questions:
                question.error = RuntimeError(f"the desk failed: {error!r}")
        self._tell(next((q.failure for q in questions if q.failure), None))

    def _tell(self, failure: SQLAlchemyError | None) -> None:
        """Once when the ledger stops answering, and once when it does again."""
        if failure and self._answers:
            log.warning("the ledger does not answer: %s", failure)
        elif not failure and not self._answers:
            log.warning("the ledger answers again")
        self._answers = failure is None

    def _deliver(self, questions: list[_Job]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[_Job]] = defaultdict(list)
        for question in questions:
            by_loop[question.answer.get_loop()].append(question)
        for loop, asked in by_loop.items():
            try:
                loop.call_soon_threadsafe(_deliver_all, asked)
            except RuntimeError:  # the loop has ended, and with it whoever asked
                continue


def _deliver_all(questions: list[_Job]) -> None:
    for question in questions:
        question.deliver()


class VerificationQueue:
    def __init__(self, at_once: int) -> None:
        self._turn = asyncio.Semaphore(at_once)
        self._under_way: dict[str, asyncio.Task[Receipt]] = {}

    async def in_turn(self, verify: Callable[..., T], *args: Any) -> T:
        async with self._turn:
            return await run_in_threadpool(verify, *args)

    async def once(self, lease: str, settle: Callable[[], Coroutine[Any, Any, Receipt]]) -> Receipt:
        """The receipt of a lease's update. Goes on when whoever asked first has left."""
        task = self._under_way.get(lease)
        if task is None:
            task = self._under_way[lease] = asyncio.create_task(settle())
            task.add_done_callback(lambda done: self._under_way.pop(lease))
        return await asyncio.shield(task)


class Notifier:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected: set[asyncio.Future[None]] = set()

    def expected(self) -> "asyncio.Future[None]":
        """Done when there is news from now on. Not to be asked for by anything but a coroutine."""
        news = asyncio.get_running_loop().create_future()
        with self._lock:
            self._expected.add(news)
        news.add_done_callback(self._forget)
        return news

    def tell(self) -> None:
        """From any thread."""
        with self._lock:
            expected = list(self._expected)
        for news in expected:
            try:
                news.get_loop().call_soon_threadsafe(_settle, news)
            except RuntimeError:  # the loop has ended, and with it whoever waited
                self._forget(news)

    def _forget(self, news: "asyncio.Future[None]") -> None:
        with self._lock:
            self._expected.discard(news)


def _settle(news: "asyncio.Future[None]") -> None:
    if not news.done():
        news.set_result(None)
