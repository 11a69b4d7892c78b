"""What is written together is on disk together, and what went wrong in one harms no other."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sql
from blocktrain.ledger.shared_commits import SharedCommits, Turns
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError
from tests.support.postgres import fresh_database

from blocktrain.ledger import driver
from blocktrain.ledger.database import open_engine
from blocktrain.ledger.ledger import Ledger

ROOT = Path(__file__).resolve().parents[3]

tables = sql.MetaData()
notes = sql.Table(
    "notes",
    tables,
    sql.Column("text", sql.Text, primary_key=True),
    # Looked at when the transaction is committed, not before.
    sql.Column("after", sql.ForeignKey("notes.text", deferrable=True, initially="DEFERRED")),
)


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    engine = open_engine(url)
    tables.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def commits(engine: Engine) -> SharedCommits:
    return SharedCommits(engine)


@pytest.fixture
def postgres() -> Iterator[Engine]:
    engine = open_engine(fresh_database())
    tables.create_all(engine)
    yield engine
    engine.dispose()


def write(
    commits: SharedCommits, *texts: str, after: str | None = None, fails: bool = False
) -> None:
    with commits.writer() as connection:
        for text in texts:
            connection.execute(notes.insert().values(text=text, after=after))
        if fails:
            raise KeyError


def on_disk(engine: Engine) -> set[str]:
    """What another connection sees."""
    with engine.connect().execution_options(read=True) as connection:
        return seen(connection)


def seen(connection: Connection) -> set[str]:
    return set(connection.scalars(sql.select(notes.c.text)))


def terminate(engine: Engine, connection: Connection) -> None:
    """End the server's side of a connection and wait until it is gone."""
    of = {"pid": connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()}
    alive = sql.text("SELECT count(*) FROM pg_stat_activity WHERE pid = :pid")
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as other:
        other.execute(sql.text("SELECT pg_terminate_backend(:pid)"), of)
        wait_until(lambda: other.execute(alive, of).scalar() == 0)


def wait_until(happened: Callable[[], bool], seconds: float = 20.0) -> None:
    ends = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < ends, f"not within {seconds} s"
        time.sleep(0.001)


# All or nothing


def test_writers_inside_are_on_disk_only_at_the_end(commits: SharedCommits, engine: Engine):
    with commits.together():
        write(commits, "a")
        write(commits, "b")
        assert on_disk(engine) == set()
    assert on_disk(engine) == {"a", "b"}


def test_an_error_that_nobody_waited_for_is_that_of_its_writer(
    commits: SharedCommits, engine: Engine
):
    def write_again_and_again(text: str) -> None:
        with commits.writer() as connection:
            for _ in range(3):
                driver.send(connection, f"INSERT INTO notes (text) VALUES ('{text}')")

    with commits.together():
        write(commits, "a")
        with pytest.raises(IntegrityError):
            write_again_and_again("b")
        write(commits, "c")
    assert on_disk(engine) == {"a", "c"}
    with pytest.raises(IntegrityError):
        write_again_and_again("d")
    assert on_disk(engine) == {"a", "c"}


def test_postgresql_is_waited_for_only_where_somebody_does(postgres: Engine):
    commits = SharedCommits(postgres)
    with commits.together(), commits.writer() as connection:
        cursor = driver.send(connection, "INSERT INTO notes (text) VALUES ('a'), ('b')")
        assert cursor.rowcount == -1
        driver.wait(connection)
        assert cursor.rowcount == 2


def test_all_inside_are_put_on_disk_by_one_commit(commits: SharedCommits, engine: Engine):
    counted = []
    sql.event.listen(engine, "commit", counted.append)
    with commits.together():
        for text in "abcdef":
            write(commits, text)
    assert len(counted) == 1
    write(commits, "g")
    write(commits, "h")
    assert len(counted) == 3


def test_a_writer_outside_is_on_disk_when_it_is_done(commits: SharedCommits, engine: Engine):
    write(commits, "a")
    assert on_disk(engine) == {"a"}
    with pytest.raises(IntegrityError):
        write(commits, "b", "a")
    assert on_disk(engine) == {"a"}


def test_a_later_writer_sees_what_was_written_before(commits: SharedCommits):
    with commits.together():
        write(commits, "a")
        with commits.writer() as connection:
            assert seen(connection) == {"a"}


def test_a_reader_inside_sees_what_was_written_before(url: str):
    ledger = Ledger(url)
    with ledger.together():
        with ledger.write() as tx:
            tx.events.add(1.0, "joined")
        with ledger.read() as tx:
            assert [event.kind for event in tx.events.after(0, 10)] == ["joined"]
    ledger.close()


@pytest.mark.parametrize("broken", [KeyError("mine"), KeyboardInterrupt()], ids=repr)
def test_one_that_raises_leaves_nothing_of_itself(
    commits: SharedCommits, engine: Engine, broken: BaseException
):
    def fail() -> None:
        with commits.writer() as connection:
            connection.execute(notes.insert().values(text="b"))
            raise broken

    with commits.together():
        write(commits, "a")
        with pytest.raises(type(broken)) as raised:
            fail()
        assert raised.value is broken
        write(commits, "c")
    assert on_disk(engine) == {"a", "c"}


def test_one_that_the_database_refuses_does_not_disturb_the_others(
    commits: SharedCommits, engine: Engine
):
    with commits.together():
        write(commits, "a")
        with pytest.raises(IntegrityError):
            write(commits, "b", "a")
        write(commits, "c")
    assert on_disk(engine) == {"a", "c"}


def test_an_exception_that_leaves_together_leaves_nothing(commits: SharedCommits, engine: Engine):
    broken = KeyError("mine")

    def fail() -> None:
        with commits.together():
            write(commits, "a")
            raise broken

    with pytest.raises(KeyError) as raised:
        fail()
    assert raised.value is broken
    assert on_disk(engine) == set()
    write(commits, "b")
    assert on_disk(engine) == {"b"}


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(st.lists(st.sampled_from("abcdef"), max_size=4), st.booleans())))
def test_whatever_fails_the_rest_is_there(
    commits: SharedCommits, engine: Engine, writers: list[tuple[list[str], bool]]
):
    """Writers of some texts, of which each may be written once; some raise at their end."""
    with engine.begin() as connection:
        connection.execute(notes.delete())
    expected: set[str] = set()
    with commits.together():
        for texts, raises in writers:
            twice = len(set(texts)) < len(texts) or not expected.isdisjoint(texts)
            if twice or raises:
                with pytest.raises(IntegrityError if twice else KeyError):
                    write(commits, *texts, fails=raises)
            else:
                write(commits, *texts)
                expected.update(texts)
            with commits.writer() as connection:
                assert seen(connection) == expected
    assert on_disk(engine) == expected


HALF_DONE = """
import sys
from tests.unit.storage.test_shared_commits import write
from blocktrain.ledger.database import open_engine
from blocktrain.ledger.shared_commits import SharedCommits

commits = SharedCommits(open_engine(sys.argv[1]))
with commits.together():
    write(commits, "a")
    write(commits, "b")
with commits.together():
    write(commits, "c")
    write(commits, "d")
    print("half", flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="kill -9 is a POSIX thing")
def test_kill_9_in_the_middle_leaves_nothing_of_it(
    commits: SharedCommits, engine: Engine, url: str
):
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
    assert on_disk(engine) == {"a", "b"}
    write(commits, "c")
    assert on_disk(engine) == {"a", "b", "c"}


# A commit that fails


def test_a_commit_that_fails_raises_and_leaves_nothing(commits: SharedCommits, engine: Engine):
    def promise() -> None:
        with commits.together():
            write(commits, "a")
            write(commits, "b", after="nothing that is there")

    with pytest.raises(IntegrityError):
        promise()
    assert on_disk(engine) == set()
    write(commits, "c")
    assert on_disk(engine) == {"c"}


def nothing_more(commits: SharedCommits) -> None:
    """The connection is lost after the last writer."""
    assert commits.open_connection is not None
    terminate(commits._engine, commits.open_connection)


def one_more_writer(commits: SharedCommits) -> None:
    nothing_more(commits)
    for _ in range(2):
        with pytest.raises(SQLAlchemyError):
            write(commits, "b")


def one_that_raises_by_itself(commits: SharedCommits) -> None:
    def fail() -> None:
        with commits.writer() as connection:
            terminate(commits._engine, connection)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with pytest.raises(SQLAlchemyError):
        write(commits, "b")


@pytest.mark.parametrize("lose", [nothing_more, one_more_writer, one_that_raises_by_itself])
def test_a_connection_lost_in_the_middle_raises(
    postgres: Engine, lose: Callable[[SharedCommits], None]
):
    commits = SharedCommits(postgres)

    def go_on() -> None:
        with commits.together():
            write(commits, "a")
            lose(commits)

    with pytest.raises(SQLAlchemyError):
        go_on()
    assert on_disk(postgres) == set()
    write(commits, "d")
    assert on_disk(postgres) == {"d"}


def test_a_failed_read_is_not_a_commit_of_nothing(postgres: Engine):
    """PostgreSQL answers a commit with a rollback then, and says so to nobody who does not ask."""
    commits = SharedCommits(postgres)

    def read_badly() -> None:
        assert commits.open_connection is not None
        with pytest.raises(SQLAlchemyError):
            commits.open_connection.exec_driver_sql("SELECT 1 / 0")

    def go_on() -> None:
        with commits.together():
            write(commits, "a")
            read_badly()

    with pytest.raises(SQLAlchemyError):
        go_on()
    assert on_disk(postgres) == set()


def test_a_full_disk_is_not_a_commit_of_nothing(tmp_path: Path):
    """SQLite rolls all of it back then, and a commit of nothing is no error."""
    engine = open_engine(f"sqlite:///{tmp_path / 'notes.db'}")
    tables.create_all(engine)
    commits = SharedCommits(engine)

    def fill() -> None:
        with commits.writer() as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
            for number in range(1000):
                connection.execute(notes.insert().values(text=f"{number} " + "x" * 1000))

    def go_on() -> None:
        with commits.together():
            write(commits, "a")
            with pytest.raises(OperationalError, match="full"):
                fill()
            with pytest.raises(SQLAlchemyError):
                write(commits, "b")

    with pytest.raises(SQLAlchemyError):
        go_on()
    assert on_disk(engine) == set()
    write(commits, "c")
    assert on_disk(engine) == {"c"}
    engine.dispose()


def test_sqlite_syncs_what_it_commits(tmp_path: Path):
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")

    def modes(connection: Connection) -> tuple[object, ...]:
        names = ("synchronous", "journal_mode")
        return tuple(connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in names)

    full = 2
    with ledger.together(), ledger.engine.connect().execution_options(read=True) as other:
        with ledger.write() as tx:
            assert modes(tx.connection) == (full, "wal")
        assert modes(other) == (full, "wal")
    ledger.close()


# Threads


def test_another_thread_waits_and_commits_by_itself(commits: SharedCommits, engine: Engine):
    other = threading.Thread(target=write, args=(commits, "b"))

    def go_wrong() -> None:
        with commits.together():
            write(commits, "a")
            other.start()
            wait_until(lambda: len(commits._turns._waiting) == 1)
            raise KeyError

    with pytest.raises(KeyError):
        go_wrong()
    other.join()
    assert on_disk(engine) == {"b"}


def test_threads_that_write_in_both_manners_lose_nothing(commits: SharedCommits, engine: Engine):
    def alone(name: str) -> None:
        for number in range(10):
            write(commits, f"{name} {number}")

    def shared(name: str) -> None:
        for number in range(0, 10, 5):
            with commits.together():
                for each in range(number, number + 5):
                    write(commits, f"{name} {each}")

    manners = {"a": alone, "b": alone, "c": shared, "d": shared}
    threads = [threading.Thread(target=run, args=(name,)) for name, run in manners.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert on_disk(engine) == {f"{name} {number}" for name in manners for number in range(10)}


def test_turns_come_in_the_order_in_which_they_were_asked_for():
    turns, came = Turns(), []

    def ask(number: int) -> None:
        with turns.next():
            came.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
    with turns.next():
        for number, thread in enumerate(threads):
            thread.start()
            wait_until(lambda waiting=number + 1: len(turns._waiting) == waiting)
        assert came == []
    for thread in threads:
        thread.join()
    assert came == list(range(20))


def test_one_that_always_comes_back_starves_nobody():
    """Each comes back at once, and hands on only when all others wait: so they alternate."""
    turns, came, rounds = Turns(), [], 200
    busy = 3
    begun = threading.Barrier(busy)

    def come_back(number: int) -> None:
        nonlocal busy
        begun.wait()
        for count in range(rounds):
            with turns.next():
                came.append(number)
                busy -= count == rounds - 1
                others = busy if count == rounds - 1 else busy - 1
                wait_until(lambda others=others: len(turns._waiting) == others)

    threads = [threading.Thread(target=come_back, args=(number,)) for number in range(busy)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(came[:3]) == [0, 1, 2]
    assert came == came[:3] * rounds


def test_a_turn_that_ends_with_an_exception_is_handed_on():
    turns, came = Turns(), []

    def ask() -> None:
        with turns.next():
            came.append("other")

    def fail(other: threading.Thread) -> None:
        with turns.next():
            other.start()
            wait_until(lambda: len(turns._waiting) == 1)
            raise KeyError

    other = threading.Thread(target=ask)
    with pytest.raises(KeyError):
        fail(other)
    other.join()
    with turns.next():
        assert came == ["other"]


def test_one_has_the_turn_at_a_time():
    turns, inside, most = Turns(), 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(100):
            with turns.next():
                inside += 1
                most = max(most, inside)
                time.sleep(0)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, inside) == (1, 0)
