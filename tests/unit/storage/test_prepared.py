"""The driver alone does what SQLAlchemy would have done, for every statement there is."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sql
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, Executable
from sqlalchemy.exc import IntegrityError, OperationalError
from tests.support.postgres import fresh_database

from blocktrain.ledger import statements
from blocktrain.ledger.ledger import Ledger
from blocktrain.ledger.prepared import PreparedStatements
from blocktrain.ledger.schema import events, metadata
from blocktrain.protocol.messages import Blob, Moved

NOW = 1_700_000_000.0
LEASE = {
    "worker": "w0", "block": 0, "base_version": 0, "first_batch": 0, "steps": 10,
    "schedule_start": 0, "schedule_stride": 1, "fence": 1, "deadline": NOW + 60,
    "created": NOW,
}  # fmt: skip
UPDATE = {
    "worker": "w0", "block": 0, "base_version": 0, "steps": 10, "offer": "{}", "signature": "s",
    "loss": None, "downloads": '[{"block":0}]',
}  # fmt: skip
EVENT = {"time": NOW, "kind": "leased", "worker": None, "block": 1, "detail": "it's 100% :fine ?"}

MOVED = {"up": 1, "up_raw": 2**40, "down_whole": 3, "down_differences": 4, "down_raw": 2**33}

STATEMENTS: dict[str, Executable] = {
    name: value for name, value in vars(statements).items() if isinstance(value, Executable)
}
# What each is asked with, so that it finds or changes something in the ledger below.
VALUES: dict[str, dict[str, Any]] = {
    "WORKER": {"of_worker": "w1"},
    "TOUCH_WORKER": {"of_worker": "w1", "now": NOW + 5},
    "LOCK_BLOCKS": {},
    "BLOCKS": {},
    "BLOCK": {"of_block": 1},
    "RETURNED": {},
    "FIRST_GAP": {"of_block": 0},
    "HAND_OUT": {"of_block": 1, "end": 2**40, "token": 2**41},
    "COUNT_MET": {"of_block": 1},
    "COUNT_MISSED": {"of_block": 1},
    "LEASE": {"of_lease": "open"},
    "ADD_LEASE": {**LEASE, "id": "new", "fence": 2**40, "state": "open"},
    "HELD_LEASES": {},
    "OVERDUE": {"now": NOW + 61},
    "SILENT": {"now": NOW + 10.0, "silence": 5.0},
    "TRAINED_LEASE": {"of_lease": "open", "of_worker": "w0"},
    "EXPECT_LEASE": {"of_lease": "open", "at": NOW + 7},
    "MOVE_DEADLINE": {"of_lease": "open", "until": NOW + 7},
    "MOVE_LEASE": {"of_lease": "open", "to": "returned"},
    "UPDATE": {"of_lease": "pending"},
    "ADD_UPDATE": {
        **UPDATE, "lease": "open", "state": "offered", "reason": "", "weight": 0.1,
        "committed": None, "merged_into": None,
    },
    "PENDING": {},
    "WAITING": {"of_block": 0},
    "ACCEPT_UPDATE": {"of_lease": "offered", "base": 1, "share": 0.3, "now": NOW + 9},
    "REBASE_UPDATE": {"of_lease": "pending", "base": 1},
    "VERSION": {"of_block": 0, "of_version": 0},
    "NEWEST_VERSION": {"of_block": 0},
    "NEWEST_VERSIONS": {},
    "COUNT_TRAFFIC": {"worker": "w0", "block": 0, **MOVED},
    "ADD_EVENT": EVENT,
}  # fmt: skip
NOBODY = {"of_worker": "?", "of_lease": "?", "of_block": 7}
FINDING = [name for name, value in STATEMENTS.items() if value.is_select]
CHANGING = [name for name, value in STATEMENTS.items() if not value.is_select]
TELLING = [name for name in CHANGING if STATEMENTS[name]._returning]  # what they changed


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def ledger(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ledger]:
    """Two blocks, two workers, gaps, and a lease of each kind. Stays as it is: see `undone`."""
    file = tmp_path_factory.mktemp("prepared") / "ledger.db"
    ledger = Ledger(f"sqlite:///{file}" if request.param == "sqlite" else fresh_database())
    with ledger.write() as tx:
        for block in range(2):
            tx.add_block(block, 600, Blob(name="a" * 64, size=2**40), NOW)
            tx.give_back_range(block, 20, 5)
            tx.give_back_range(block, 10, 4)
        for number in range(2):
            tx.people.add_worker(
                id=f"w{number}", public_key=f"key {number}", name=f"Zoë {number}", device="cpu",
                role="train", joined=NOW + number, seen=NOW,
            )  # fmt: skip
        for name in ("open", "offered", "pending"):
            tx.add_lease(id=name, **LEASE)
        for name in ("offered", "pending"):
            tx.add_update(lease=name, **UPDATE)
            tx.move_lease(name, "sending")
        tx.accept_update(tx.update("pending"), 0, 0.7, NOW + 3)
        tx.records.count_traffic("w0", 0, Moved(up=5))
    yield ledger
    ledger.close()


@pytest.fixture
def prepared(ledger: Ledger) -> PreparedStatements:
    return PreparedStatements(ledger.engine.dialect)


@contextmanager
def undone(ledger: Ledger) -> Iterator[Connection]:
    """A transaction that comes to nothing."""
    with ledger.engine.connect() as connection, connection.begin() as transaction:
        yield connection
        transaction.rollback()


def contents(connection: Connection) -> list[Any]:
    """Every row of every table, but for the numbers of events: a rollback does not reset them."""
    columns = [
        [column for column in table.c if column is not events.c.number]
        for table in metadata.sorted_tables
    ]
    return [sorted(connection.execute(sql.select(*each)), key=repr) for each in columns]


def test_every_statement_is_tried_here():
    assert STATEMENTS.keys() == VALUES.keys()
    assert set(FINDING) | set(CHANGING) == STATEMENTS.keys()
    assert len(FINDING) > 10 and len(CHANGING) > 10


@pytest.mark.parametrize("name", FINDING)
def test_the_same_rows(ledger: Ledger, prepared: PreparedStatements, name: str):
    statement, values = STATEMENTS[name], VALUES[name]
    with undone(ledger) as connection:
        expected = connection.execute(statement, values)
        names, rows = tuple(expected.keys()), [tuple(row) for row in expected]
        for _ in range(2):  # as compiled now, and as kept
            found = prepared.rows(connection, statement, **values)
            assert [tuple(row) for row in found] == rows != []
            assert {row._fields for row in found} == {names}


@pytest.mark.parametrize("name", CHANGING)
def test_the_same_change(ledger: Ledger, prepared: PreparedStatements, name: str):
    statement, values = STATEMENTS[name], VALUES[name]
    with undone(ledger) as connection:
        before = contents(connection)
        done = connection.execute(statement, values)
        told = [tuple(row) for row in done] if name in TELLING else None
        assert told or statement.is_insert or done.rowcount == 1
        expected = contents(connection)
    for _ in range(2):
        with undone(ledger) as connection:
            assert contents(connection) == before
            if told:
                found = prepared.rows(connection, statement, **values)
                assert [tuple(row) for row in found] == told
            else:
                assert prepared.change(connection, statement, **values) == 1
            assert contents(connection) == expected != before


@pytest.mark.parametrize("name", [name for name in STATEMENTS if NOBODY.keys() & VALUES[name]])
def test_nothing_where_there_is_nothing(ledger: Ledger, prepared: PreparedStatements, name: str):
    """A statement that names a row finds and changes no other one."""
    statement = STATEMENTS[name]
    values = {key: NOBODY.get(key, value) for key, value in VALUES[name].items()}
    with undone(ledger) as connection:
        before = contents(connection)
        if name in FINDING or name in TELLING:
            assert prepared.rows(connection, statement, **values) == []
        else:
            assert prepared.change(connection, statement, **values) == 0
        assert contents(connection) == before


def test_a_row_has_its_columns_as_attributes(ledger: Ledger, prepared: PreparedStatements):
    with undone(ledger) as connection:
        (worker,) = prepared.rows(connection, statements.WORKER, of_worker="w1")
        (gap, _) = prepared.rows(connection, statements.RETURNED)
    assert (worker.id, worker.name, worker.seen, worker.banned) == ("w1", "Zoë 1", NOW, False)
    assert gap.steps == 9


def test_an_insert_may_leave_out_what_may_be_missing(ledger: Ledger, prepared: PreparedStatements):
    """Which columns are named is a part of what was compiled."""
    few = {key: value for key, value in EVENT.items() if key not in ("worker", "block")}
    with undone(ledger) as connection:
        for values in (EVENT, few, EVENT):
            prepared.change(connection, statements.ADD_EVENT, **values)
        rows = connection.execute(sql.select(events).order_by(events.c.number)).all()
    assert [row.block for row in rows] == [1, None, 1]
    assert {row.detail for row in rows} == {EVENT["detail"]}


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    time=st.floats(allow_nan=False, allow_infinity=False),
    worker=st.none() | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
    block=st.none() | st.integers(-(2**31), 2**31 - 1),
)
def test_any_value_comes_back(
    ledger: Ledger,
    prepared: PreparedStatements,
    time: float,
    worker: str | None,
    block: int | None,
):
    worker = worker and worker[:64]
    values = {**EVENT, "time": time, "worker": worker, "block": block}
    with undone(ledger) as connection:
        prepared.change(connection, statements.ADD_EVENT, **values)
        row = connection.execute(sql.select(events)).one()
        assert (row.time, row.worker, row.block) == (time, worker, block)


def test_threads_that_begin_at_once(ledger: Ledger, prepared: PreparedStatements):
    begun = threading.Barrier(8)

    def ask(number: int) -> str:
        with ledger.read() as tx:
            begun.wait()
            rows = prepared.rows(
                tx._session.connection, statements.WORKER, of_worker=f"w{number % 2}"
            )
            return str(rows[0].id)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == ["w0", "w1"] * 4


# Errors


@pytest.mark.parametrize(
    "values",
    [{"id": "open"}, {"id": "new", "worker": "nobody"}, {"id": "new", "state": None}],
    ids=["twice", "of nobody", "without a state"],
)
def test_what_the_schema_forbids_is_an_integrity_error(
    ledger: Ledger, prepared: PreparedStatements, values: dict[str, Any]
):
    given = {**VALUES["ADD_LEASE"], **values}
    with pytest.raises(IntegrityError) as ours, ledger.engine.begin() as connection:
        prepared.change(connection, statements.ADD_LEASE, **given)
    with pytest.raises(IntegrityError) as theirs, ledger.engine.begin() as connection:
        connection.execute(statements.ADD_LEASE, given)
    assert str(ours.value.orig) == str(theirs.value.orig)
    assert type(ours.value.orig) is type(theirs.value.orig)
    with ledger.read() as tx:
        assert tx.lease("new") is None and tx.lease("open").state == "open"


def test_an_error_while_rows_are_fetched_is_sqlalchemys(tmp_path: Path):
    """SQLite reads as the rows are fetched, so that is where a bad disk shows."""
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    with ledger.write() as tx:
        for block in range(1000):
            tx.add_block(block, 600, Blob(name="a" * 64, size=1), NOW)
    with ledger.read() as tx:
        driver: Any = tx._session.connection.connection.driver_connection
        steps = iter([0, 0])
        driver.set_progress_handler(lambda: next(steps, 1), 1000)
        with pytest.raises(OperationalError, match="interrupted"):
            tx._session.rows(statements.BLOCKS)
        driver.set_progress_handler(None, 0)
    ledger.close()


def test_a_lost_connection_is_an_operational_error_and_the_next_works():
    ledger = Ledger(fresh_database())

    def lose() -> None:
        with ledger.write() as tx:
            tx.records.add_event(NOW, "joined")
            pid = tx._session.connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
            with ledger.engine.begin() as other:
                other.exec_driver_sql(f"SELECT pg_terminate_backend({pid}, 10000)")
            try:
                tx.people.worker("w0")
            finally:
                assert tx._session.connection.invalidated

    with pytest.raises(OperationalError):
        lose()
    with ledger.write() as tx:
        assert tx.records.events(0, 10) == []
        tx.records.add_event(NOW, "leased")
    with ledger.read() as tx:
        assert [event.kind for event in tx.records.events(0, 10)] == ["leased"]
    ledger.close()
