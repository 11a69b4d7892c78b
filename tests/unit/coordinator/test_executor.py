"""Many callers, one thread: each gets its own result, and what it wrote is on disk by then."""

import asyncio
import random
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sql
from sqlalchemy.exc import SQLAlchemyError
from tests.support.postgres import fresh_database

from blocktrain.coordinator.executor import (
    JOBS_PER_COMMIT,
    LedgerExecutor,
    LedgerUnreachableError,
)
from blocktrain.errors import RefusedError, UnreachableError
from blocktrain.ledger.ledger import Ledger
from blocktrain.ledger.schema import InviteRow

NOW = 1_700_000_000.0


@pytest.fixture(params=["sqlite", "postgresql"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ledger]:
    local = request.param == "sqlite"
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}" if local else fresh_database())
    yield ledger
    ledger.close()


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    yield ledger
    ledger.close()


@contextmanager
def working(ledger: Ledger) -> Iterator[LedgerExecutor]:
    executor = LedgerExecutor(ledger)
    executor.start()
    try:
        yield executor
    finally:
        executor.stop()


class Held:
    """A job that keeps the executor busy until it is let go, so that others wait together."""

    def __init__(self) -> None:
        self.begun, self._go = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self._go.wait(20)
        return "held"

    def let_go(self) -> None:
        self._go.set()


async def together(executor: LedgerExecutor, *calls: Callable[[], Any]) -> list[Any]:
    """The results, errors among them, of calls that wait at the same time."""
    held = Held()
    first = asyncio.create_task(executor.run(held))
    await asyncio.to_thread(held.begun.wait, 20)
    asked = [asyncio.create_task(executor.run(call)) for call in calls]
    await asyncio.sleep(0)  # all of them have asked
    held.let_go()
    assert await first == "held"
    return await asyncio.gather(*asked, return_exceptions=True)


def note(ledger: Ledger, detail: str) -> str:
    with ledger.write() as tx:
        tx.events.add(NOW, "joined", detail=detail)
    return detail


def notes(ledger: Ledger) -> list[str]:
    with ledger.read() as tx:
        return [event.detail for event in tx.events.after(0, 10_000)]


def noting(ledger: Ledger, *details: str) -> list[Callable[[], str]]:
    return [lambda detail=detail: note(ledger, detail) for detail in details]


def is_running() -> bool:
    return any(thread.name == "ledger" for thread in threading.enumerate())


def count_commits(ledger: Ledger) -> list[Any]:
    counted: list[Any] = []
    sql.event.listen(ledger.engine, "commit", counted.append)
    return counted


def fail(error: Exception) -> Any:
    raise error


# Answers


def test_a_result_comes_once_it_is_on_disk(ledger: Ledger):
    async def ask(executor: LedgerExecutor) -> None:
        other = Ledger(ledger.engine.url.render_as_string(hide_password=False))
        for number in range(5):
            assert await executor.run(note, ledger, str(number)) == str(number)
            assert notes(other)[-1] == str(number)
        other.close()

    with working(ledger) as executor:
        asyncio.run(ask(executor))


def test_each_caller_gets_its_own_result_in_any_order(local: Ledger):
    async def ask(executor: LedgerExecutor) -> None:
        async def one(number: int) -> tuple[int, int]:
            await asyncio.sleep(random.Random(number).random() / 50)
            return number, await executor.run(lambda: number * number)

        found = await asyncio.gather(*map(one, range(300)))
        assert all(answer == number * number for number, answer in found)

    with working(local) as executor:
        asyncio.run(ask(executor))


def test_arguments_are_handed_on(local: Ledger):
    with working(local) as executor:
        assert asyncio.run(executor.run(sorted, [1, 3, 2], reverse=True)) == [3, 2, 1]


def test_calls_that_wait_together_are_run_in_their_order(ledger: Ledger):
    details = [str(number) for number in range(20)]
    with working(ledger) as executor:
        assert asyncio.run(together(executor, *noting(ledger, *details))) == details
    assert notes(ledger) == details


@pytest.mark.parametrize("number", [2, JOBS_PER_COMMIT, 3 * JOBS_PER_COMMIT + 1])
def test_calls_that_wait_together_share_commits(ledger: Ledger, number: int):
    details = [str(each) for each in range(number)]
    commits = count_commits(ledger)
    with working(ledger) as executor:
        assert asyncio.run(together(executor, *noting(ledger, *details))) == details
    batches = -(-number // JOBS_PER_COMMIT)
    assert len(commits) == 1 + batches  # one was for whom they waited
    assert notes(ledger) == details


# Errors


def test_an_error_reaches_its_caller_and_no_other(ledger: Ledger):
    error = RefusedError("conflict", "not yours")

    def half() -> None:
        with ledger.write() as tx:
            tx.events.add(NOW, "joined", detail="half")
            raise error

    first, last = noting(ledger, "first", "last")
    with working(ledger) as executor:
        found = asyncio.run(together(executor, first, half, lambda: fail(KeyError("k")), last))
    assert found[0] == "first" and found[3] == "last"
    assert found[1] is error
    assert isinstance(found[2], KeyError)
    assert notes(ledger) == ["first", "last"]


def test_an_error_of_the_database_in_one_call_does_not_disturb_the_others(ledger: Ledger):
    def twice() -> None:
        with ledger.write() as tx:
            tx.events.add(NOW, "joined", detail="half")
            for _ in range(2):
                tx.members.add_invite(
                    InviteRow(id="same", secret_hash="", role="train", uses_left=1, expires=NOW)
                )

    first, last = noting(ledger, "first", "last")
    with working(ledger) as executor:
        found = asyncio.run(together(executor, first, twice, last))
    assert [found[0], found[2]] == ["first", "last"]
    assert isinstance(found[1], UnreachableError)
    assert notes(ledger) == ["first", "last"]


def test_what_is_not_on_disk_is_an_error_for_every_caller(ledger: Ledger):
    """A full disk ends the whole transaction on SQLite; a swallowed error does on PostgreSQL."""

    def break_it() -> None:
        if ledger.engine.dialect.name == "postgresql":
            with ledger.read() as tx, suppress(SQLAlchemyError):
                tx.connection.exec_driver_sql("SELECT 1 / 0")
            return
        with ledger.write() as tx:
            pages = tx.connection.exec_driver_sql("PRAGMA page_count").scalar()
            tx.connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
            for _ in range(1000):
                tx.events.add(NOW, "joined", detail="x" * 500)

    first, last = noting(ledger, "first", "last")
    with working(ledger) as executor:
        found = asyncio.run(together(executor, first, break_it, last))
        assert {type(each) for each in found} == {LedgerUnreachableError}
        assert notes(ledger) == []
        assert asyncio.run(executor.run(note, ledger, "later")) == "later"
    assert notes(ledger) == ["later"]


class BrokenOnce(Ledger):
    """Fails at one commit, in a way that no database does."""

    error: BaseException | None = None

    @contextmanager
    def together(self) -> Iterator[None]:
        with super().together():
            yield
            error, self.error = self.error, None
            if error:
                raise error


@pytest.mark.parametrize("error", [OSError("too many open files"), SystemExit(1)])
def test_any_failure_reaches_all_who_wait_and_the_thread_goes_on(
    tmp_path: Path, error: BaseException, caplog: pytest.LogCaptureFixture
):
    ledger = BrokenOnce(f"sqlite:///{tmp_path / 'ledger.db'}")

    def break_it() -> None:
        ledger.error = error

    first, last = noting(ledger, "first", "last")
    with working(ledger) as executor:
        found = asyncio.run(asyncio.wait_for(together(executor, first, break_it, last), 20))
        assert [type(each) for each in found] == [RuntimeError] * 3
        assert repr(error) in str(found[0])
        assert asyncio.run(executor.run(note, ledger, "later")) == "later"
    assert notes(ledger) == ["later"]
    assert "unexpected error" in caplog.text
    ledger.close()


def test_errors_do_not_grow(local: Ledger):
    """One object raised again and again would keep every frame that ever saw it."""

    def break_it() -> None:
        with local.read() as tx:
            tx.connection.exec_driver_sql("SELECT nothing")

    async def ask(executor: LedgerExecutor) -> list[int]:
        depths = []
        for _ in range(5):
            with pytest.raises(UnreachableError) as raised:
                await executor.run(break_it)
            depths.append(len(traceback.extract_tb(raised.value.__traceback__)))
        return depths

    with working(local) as executor:
        assert len(set(asyncio.run(ask(executor)))) == 1


def test_after_a_lost_connection_later_calls_succeed():
    ledger = Ledger(fresh_database())

    def lose() -> None:
        with ledger.read() as tx:
            pid = tx.connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
        with ledger.engine.begin() as other:
            other.exec_driver_sql(f"SELECT pg_terminate_backend({pid}, 10000)")

    first, last = noting(ledger, "first", "last")
    with working(ledger) as executor:
        for number in range(3):
            found = asyncio.run(together(executor, first, lose, last))
            assert {type(each) for each in found} == {LedgerUnreachableError}
            assert asyncio.run(executor.run(note, ledger, f"later {number}")) == f"later {number}"
    assert notes(ledger) == ["later 0", "later 1", "later 2"]
    ledger.close()


# Callers that leave


def test_a_cancelled_caller_does_no_harm(ledger: Ledger):
    complaints: list[Any] = []

    async def ask(executor: LedgerExecutor) -> list[Any]:
        asyncio.get_running_loop().set_exception_handler(lambda _, told: complaints.append(told))
        held = Held()
        first = asyncio.create_task(executor.run(held))
        await asyncio.to_thread(held.begun.wait, 20)
        calls = [*noting(ledger, "a", "left"), lambda: fail(KeyError("left")), *noting(ledger, "b")]
        asked = [asyncio.create_task(executor.run(call)) for call in calls]
        await asyncio.sleep(0)
        for task in (first, asked[1], asked[2]):
            task.cancel()
        held.let_go()
        return await asyncio.gather(*asked, return_exceptions=True)

    with working(ledger) as executor:
        found = asyncio.run(ask(executor))
        assert asyncio.run(executor.run(note, ledger, "later")) == "later"
    assert [found[0], found[3]] == ["a", "b"]
    assert {type(each) for each in found[1:3]} == {asyncio.CancelledError}
    assert complaints == []
    assert notes(ledger) == ["a", "left", "b", "later"]


def test_an_event_loop_that_has_ended_does_no_harm(local: Ledger):
    held = Held()

    async def leave(executor: LedgerExecutor) -> None:
        task = asyncio.create_task(executor.run(held))
        await asyncio.to_thread(held.begun.wait, 20)
        task.cancel()

    with working(local) as executor:
        asyncio.run(leave(executor))
        held.let_go()
        assert asyncio.run(executor.run(note, local, "later")) == "later"


def test_two_event_loops_in_two_threads(ledger: Ledger):
    begun, found = threading.Barrier(2), {}

    async def ask(executor: LedgerExecutor, name: str) -> None:
        begun.wait()
        details = [f"{name}{number}" for number in range(40)]
        found[name] = await asyncio.gather(*(executor.run(note, ledger, each) for each in details))
        assert found[name] == details

    with working(ledger) as executor:
        threads = [
            threading.Thread(target=lambda name=name: asyncio.run(ask(executor, name)))
            for name in ("a", "b")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found["a"]) == len(found["b"]) == 40
    assert sorted(notes(ledger)) == sorted(found["a"] + found["b"])


def test_a_result_is_delivered_in_the_loop_of_its_caller(local: Ledger):
    async def ask(executor: LedgerExecutor) -> None:
        asker, worker = threading.get_ident(), await executor.run(threading.get_ident)
        assert threading.get_ident() == asker != worker

    with working(local) as executor:
        asyncio.run(ask(executor))


# The end


@pytest.mark.parametrize("number", [1, JOBS_PER_COMMIT - 1, JOBS_PER_COMMIT, 2 * JOBS_PER_COMMIT])
def test_stop_runs_what_was_queued_before(local: Ledger, number: int):
    details = [str(each) for each in range(number)]

    async def ask(executor: LedgerExecutor) -> list[Any]:
        held = Held()
        first = asyncio.create_task(executor.run(held))
        await asyncio.to_thread(held.begun.wait, 20)
        asked = [asyncio.create_task(executor.run(note, local, detail)) for detail in details]
        await asyncio.sleep(0)
        stopping = asyncio.create_task(asyncio.to_thread(executor.stop))
        await asyncio.sleep(0.05)
        assert not stopping.done()
        held.let_go()
        await asyncio.wait_for(stopping, 20)
        assert await first == "held"
        return await asyncio.gather(*asked)

    executor = LedgerExecutor(local)
    executor.start()
    assert asyncio.run(ask(executor)) == details
    assert not is_running()
    assert notes(local) == details


def test_stop_with_an_empty_queue_ends_the_thread(local: Ledger):
    executor = LedgerExecutor(local)
    executor.start()
    executor.stop()
    assert not is_running()


# Beside the executor


def test_others_write_to_the_same_ledger_meanwhile(ledger: Ledger):
    """The rounds of a coordinator write from their own thread."""
    mine = [f"mine {number}" for number in range(40)]
    theirs = [f"theirs {number}" for number in range(40)]

    async def ask(executor: LedgerExecutor) -> None:
        await asyncio.gather(*(executor.run(note, ledger, each) for each in theirs))

    with working(ledger) as executor:
        rounds = threading.Thread(target=lambda: [note(ledger, each) for each in mine])
        rounds.start()
        asyncio.run(ask(executor))
        rounds.join()
    found = notes(ledger)
    assert [each for each in found if each in mine] == mine
    assert [each for each in found if each in theirs] == theirs
    assert len(found) == 80
