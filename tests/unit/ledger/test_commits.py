"""Transactions committed together are on disk together, and an error in one harms no other."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import sqlalchemy as sql
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError
from tests.support.postgres import fresh_database

from blocktrain.ledger.ledger import FairLock, Ledger

ROOT = Path(__file__).resolve().parents[3]

tables = sql.MetaData()
notes = sql.Table(
    "notes",
    tables,
    sql.Column("text", sql.Text, primary_key=True),
    # Checked when the transaction is committed, not before.
    sql.Column("after", sql.ForeignKey("notes.text", deferrable=True, initially="DEFERRED")),
)


def with_notes(url: str) -> Iterator[Ledger]:
    ledger = Ledger(url)
    tables.create_all(ledger.engine)
    yield ledger
    ledger.close()


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    yield from with_notes(url)


@pytest.fixture
def postgres() -> Iterator[Ledger]:
    yield from with_notes(fresh_database())


def write(ledger: Ledger, *texts: str, after: str | None = None, fails: bool = False) -> None:
    with ledger.write() as tx:
        for text in texts:
            tx.connection.execute(notes.insert().values(text=text, after=after))
        if fails:
            raise KeyError


def on_disk(ledger: Ledger) -> set[str]:
    """What another connection sees."""
    with ledger.engine.connect().execution_options(reads=True) as connection:
        return seen(connection)


def seen(connection: Connection) -> set[str]:
    return set(connection.scalars(sql.select(notes.c.text)))


def terminate(ledger: Ledger, connection: Connection) -> None:
    """End the server's side of a connection and wait until it is gone."""
    server = {"pid": connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()}
    alive = sql.text("SELECT count(*) FROM pg_stat_activity WHERE pid = :pid")
    with ledger.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as other:
        other.execute(sql.text("SELECT pg_terminate_backend(:pid)"), server)
        ends = time.monotonic() + 20
        while other.execute(alive, server).scalar():
            assert time.monotonic() < ends
            time.sleep(0.001)


# All or nothing


def test_writers_inside_are_on_disk_only_at_the_end(ledger: Ledger):
    with ledger.together():
        write(ledger, "a")
        write(ledger, "b")
        assert on_disk(ledger) == set()
    assert on_disk(ledger) == {"a", "b"}


def test_all_inside_are_put_on_disk_by_one_commit(ledger: Ledger):
    commits: list[Connection] = []
    sql.event.listen(ledger.engine, "commit", commits.append)
    with ledger.together():
        for text in "abcdef":
            write(ledger, text)
    assert len(commits) == 1
    write(ledger, "g")
    write(ledger, "h")
    assert len(commits) == 3


def test_a_writer_outside_is_on_disk_when_it_is_done(ledger: Ledger):
    write(ledger, "a")
    assert on_disk(ledger) == {"a"}
    with pytest.raises(IntegrityError):
        write(ledger, "b", "a")
    assert on_disk(ledger) == {"a"}


def test_a_later_writer_sees_what_was_written_before(ledger: Ledger):
    with ledger.together():
        write(ledger, "a")
        with ledger.write() as tx:
            assert seen(tx.connection) == {"a"}
        with ledger.read() as tx:
            assert seen(tx.connection) == {"a"}


@pytest.mark.parametrize("error", [KeyError("mine"), KeyboardInterrupt()], ids=repr)
def test_a_writer_that_raises_leaves_nothing(ledger: Ledger, error: BaseException):
    def fail() -> None:
        with ledger.write() as tx:
            tx.connection.execute(notes.insert().values(text="b"))
            raise error

    with ledger.together():
        write(ledger, "a")
        with pytest.raises(type(error)) as raised:
            fail()
        assert raised.value is error
        write(ledger, "c")
    assert on_disk(ledger) == {"a", "c"}


def test_an_error_of_the_database_in_one_does_not_disturb_the_others(ledger: Ledger):
    def read_badly() -> None:
        with ledger.read() as tx:
            tx.connection.exec_driver_sql("SELECT nothing")

    with ledger.together():
        write(ledger, "a")
        with pytest.raises(IntegrityError):
            write(ledger, "b", "a")
        with pytest.raises(SQLAlchemyError):
            read_badly()
        write(ledger, "c")
    assert on_disk(ledger) == {"a", "c"}


def test_an_exception_that_leaves_together_leaves_nothing(ledger: Ledger):
    error = KeyError("mine")

    def fail() -> None:
        with ledger.together():
            write(ledger, "a")
            raise error

    with pytest.raises(KeyError) as raised:
        fail()
    assert raised.value is error
    assert on_disk(ledger) == set()
    write(ledger, "b")
    assert on_disk(ledger) == {"b"}


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(st.lists(st.sampled_from("abcdef"), max_size=4), st.booleans())))
def test_whatever_fails_the_rest_is_there(ledger: Ledger, writers: list[tuple[list[str], bool]]):
    """Writers of some texts, of which each may be written once; some raise at their end."""
    with ledger.engine.begin() as connection:
        connection.execute(notes.delete())
    expected: set[str] = set()
    with ledger.together():
        for texts, raises in writers:
            twice = len(set(texts)) < len(texts) or not expected.isdisjoint(texts)
            if twice or raises:
                with pytest.raises(IntegrityError if twice else KeyError):
                    write(ledger, *texts, fails=raises)
            else:
                write(ledger, *texts)
                expected.update(texts)
            with ledger.read() as tx:
                assert seen(tx.connection) == expected
    assert on_disk(ledger) == expected


HALF_DONE = """
import sys
from tests.unit.ledger.test_commits import write
from blocktrain.ledger.ledger import FairLock, Ledger

ledger = Ledger(sys.argv[1])
with ledger.together():
    write(ledger, "a")
    write(ledger, "b")
with ledger.together():
    write(ledger, "c")
    write(ledger, "d")
    print("half", flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="kill -9 is a POSIX thing")
def test_kill_9_in_the_middle_leaves_nothing_of_it(ledger: Ledger, url: str):
    child = subprocess.Popen(
        [sys.executable, "-c", HALF_DONE, url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "half\n"
        child.kill()
    assert child.returncode == -9
    assert on_disk(ledger) == {"a", "b"}
    write(ledger, "c")
    assert on_disk(ledger) == {"a", "b", "c"}


# A commit that fails


def test_a_commit_that_fails_raises_and_leaves_nothing(ledger: Ledger):
    def promise() -> None:
        with ledger.together():
            write(ledger, "a")
            write(ledger, "b", after="nothing that is there")

    with pytest.raises(IntegrityError):
        promise()
    assert on_disk(ledger) == set()
    write(ledger, "c")
    assert on_disk(ledger) == {"c"}


def lose_the_connection(ledger: Ledger) -> None:
    with pytest.raises(SQLAlchemyError), ledger.read() as tx:
        terminate(ledger, tx.connection)


def lose_it_and_go_on(ledger: Ledger) -> None:
    lose_the_connection(ledger)
    for _ in range(2):
        with pytest.raises(SQLAlchemyError):
            write(ledger, "b")


def swallow_an_error(ledger: Ledger) -> None:
    """PostgreSQL would answer the commit with a rollback, which is no error."""
    with pytest.raises(SQLAlchemyError), ledger.read() as tx, pytest.raises(SQLAlchemyError):
        tx.connection.exec_driver_sql("SELECT 1 / 0")


@pytest.mark.parametrize("lose", [lose_the_connection, lose_it_and_go_on, swallow_an_error])
def test_a_transaction_lost_in_the_middle_raises(postgres: Ledger, lose: Callable[[Ledger], None]):
    def go_on() -> None:
        with postgres.together():
            write(postgres, "a")
            lose(postgres)

    with pytest.raises(SQLAlchemyError):
        go_on()
    assert on_disk(postgres) == set()
    write(postgres, "d")
    assert on_disk(postgres) == {"d"}


@pytest.mark.parametrize("swallowed", [False, True])
def test_a_full_disk_is_not_a_commit_of_nothing(tmp_path: Path, swallowed: bool):
    """SQLite rolls everything back then, and a commit of nothing is no error."""
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    tables.create_all(ledger.engine)

    def fill() -> None:
        with ledger.write() as tx:
            pages = tx.connection.exec_driver_sql("PRAGMA page_count").scalar()
            tx.connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
            rows = [{"text": f"{number} " + "x" * 1000} for number in range(1000)]
            with pytest.raises(OperationalError, match="full") as raised:
                tx.connection.execute(notes.insert(), rows)
            if not swallowed:
                raise raised.value

    def go_on() -> None:
        with ledger.together():
            write(ledger, "a")
            with pytest.raises(OperationalError):
                fill()
            with pytest.raises(SQLAlchemyError):
                write(ledger, "b")

    with pytest.raises(SQLAlchemyError):
        go_on()
    assert on_disk(ledger) == set()
    write(ledger, "c")
    assert on_disk(ledger) == {"c"}
    ledger.close()


def test_sqlite_syncs_what_it_commits(tmp_path: Path):
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")

    def modes(connection: Connection) -> tuple[object, ...]:
        names = ("synchronous", "journal_mode")
        return tuple(connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in names)

    full = 2
    with ledger.together(), ledger.engine.connect().execution_options(reads=True) as other:
        with ledger.write() as tx:
            assert modes(tx.connection) == (full, "wal")
        assert modes(other) == (full, "wal")
    ledger.close()


# Threads


def test_another_thread_waits_and_commits_by_itself(ledger: Ledger):
    other = threading.Thread(target=write, args=(ledger, "b"))

    def go_wrong() -> None:
        with ledger.together():
            write(ledger, "a")
            other.start()
            time.sleep(0.05)
            raise KeyError

    with pytest.raises(KeyError):
        go_wrong()
    other.join()
    assert on_disk(ledger) == {"b"}


def test_threads_that_write_in_both_manners_lose_nothing(ledger: Ledger):
    def alone(name: str) -> None:
        for number in range(10):
            write(ledger, f"{name} {number}")

    def shared(name: str) -> None:
        for number in range(0, 10, 5):
            with ledger.together():
                for each in range(number, number + 5):
                    write(ledger, f"{name} {each}")

    manners = {"a": alone, "b": alone, "c": shared, "d": shared}
    threads = [threading.Thread(target=run, args=(name,)) for name, run in manners.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert on_disk(ledger) == {f"{name} {number}" for name in manners for number in range(10)}


def test_a_busy_thread_does_not_starve_another(ledger: Ledger):
    """The executor's thread commits without a pause, and merges happen on another."""
    begun, stop, busy, rounds = threading.Event(), threading.Event(), 0, 30

    def work() -> None:
        nonlocal busy
        while not stop.is_set():
            with ledger.together():
                begun.set()
                time.sleep(0.002)
                busy += 1

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    before = busy
    for number in range(rounds):
        write(ledger, str(number))
    between = busy - before
    stop.set()
    thread.join()
    assert between <= 2 * rounds


def test_the_lock_is_had_by_one_at_a_time_in_turn():
    lock, inside, order = FairLock(), 0, []

    def work(number: int) -> None:
        nonlocal inside
        with lock.hold():
            inside += 1
            assert inside == 1
            order.append(number)
            inside -= 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(10)]
    with suppress(KeyError), lock.hold():
        for thread in threads:
            thread.start()
            time.sleep(0.02)
        raise KeyError
    for thread in threads:
        thread.join()
    assert order == list(range(10))
