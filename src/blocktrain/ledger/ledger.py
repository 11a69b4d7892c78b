"""The ledger: its database (SQLite or PostgreSQL, by URL) and its transactions."""

import sqlite3
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import sqlalchemy as sql
from alembic.util import CommandError
from sqlalchemy import Connection
from sqlalchemy.exc import DatabaseError, SQLAlchemyError

from blocktrain.errors import ConfigError, UnreachableError
from blocktrain.ledger.migrations import create_or_upgrade
from blocktrain.ledger.transaction import Transaction

PSYCOPG = "postgresql+psycopg"
CONNECTIONS = 16
BUSY_MILLISECONDS = 30_000
CACHE_KILOBYTES = 16_000  # of each connection


def open_engine(url: str) -> sql.Engine:
    try:
        parsed = sql.make_url(url)
    except sql.exc.ArgumentError:
        raise ConfigError(f"{without_password(url)} is not a database URL") from None
    if parsed.drivername == "sqlite":
        return _sqlite_engine(parsed)
    if parsed.drivername in ("postgresql", "postgres", PSYCOPG):
        return _postgresql_engine(parsed.set(drivername=PSYCOPG))
    raise ConfigError(f"{without_password(url)} is neither SQLite nor PostgreSQL")


def without_password(url: str) -> str:
    try:
        return sql.make_url(url).render_as_string(hide_password=True)
    except sql.exc.ArgumentError:
        return "given"


def _postgresql_engine(url: sql.URL) -> sql.Engine:
    try:
        engine = sql.create_engine(url, pool_pre_ping=True, pool_size=CONNECTIONS)
    except ImportError:
        raise ConfigError("PostgreSQL needs psycopg: pip install 'blocktrain[postgres]'") from None

    @sql.event.listens_for(engine, "connect")
    def prepare(connection: Any, record: Any) -> None:
        # Plans are cached: one made while a table was small would go on reading all of it.
        # Before version 18 the high cost of such a plan would also start the compiler.
        connection.execute("SET enable_seqscan = off; SET jit = off")
        connection.commit()

    return engine


def _sqlite_engine(url: sql.URL) -> sql.Engine:
    if url.database:
        _make_private(Path(url.database))
    engine = sql.create_engine(url, pool_size=CONNECTIONS)

    @sql.event.listens_for(engine, "connect")
    def prepare(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # transactions are begun below, not by the driver
        connection.execute(f"PRAGMA busy_timeout={BUSY_MILLISECONDS}")
        _write_ahead(connection)
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute(f"PRAGMA cache_size=-{CACHE_KILOBYTES}")

    @sql.event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A writer takes the lock at once: of two that began by reading, one could not go on.
        reads = connection.get_execution_options().get("reads")
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine


def _make_private(path: Path) -> None:
    """The database holds the run's secrets. SQLite gives the files beside it the same mode."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(OSError):  # SQLite reports it better
        path.touch(mode=0o600)


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Switch to the write-ahead log. SQLite's own timeout does not cover this statement, which
    fails if another process opens the same new file."""
    deadline = time.monotonic() + BUSY_MILLISECONDS / 1000
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


class Ledger:
    def __init__(self, url: str) -> None:
        self.url = url
        self.engine = open_engine(url)
        self._writing = FairLock()
        self._batch = _Batch()
        shown = without_password(url)
        try:
            create_or_upgrade(self.engine)
        except DatabaseError as error:
            self.engine.dispose()
            raise UnreachableError(f"cannot open the ledger {shown}: {error.orig}") from None
        except CommandError:
            self.engine.dispose()
            raise ConfigError(
                f"the ledger {shown} was written by a newer blocktrain, or by one before 0.1;"
                " open it with that release"
            ) from None

    @contextmanager
    def write(self) -> Iterator[Transaction]:
        """A transaction: all of it happens, or nothing. It is on disk afterwards, or at the end of
        the `together` around it."""
        if connection := self._batch.connection:
            with _savepoint(connection):
                yield Transaction(connection, locked=True)
            return
        with self._writing.hold(), self.engine.begin() as connection:
            yield Transaction(connection, locked=self._writes_one_by_one)

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """A transaction that changes nothing and sees one moment."""
        if connection := self._batch.connection:
            with _savepoint(connection):
                yield Transaction(connection, locked=True)
            return
        options: dict[str, Any] = {"reads": True}
        if self.engine.dialect.name == "postgresql":
            options["isolation_level"] = "REPEATABLE READ"
        with self.engine.connect().execution_options(**options) as connection, connection.begin():
            yield Transaction(connection)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What this thread reads and writes inside is one transaction, with one commit at the end:
        what takes time is the disk. Each `write` inside is still all or nothing by itself."""
        with self._writing.hold(), self.engine.begin() as connection:
            # Before any savepoint, since locks taken after one are lost when it is rolled back.
            transaction = Transaction(connection, locked=self._writes_one_by_one)
            transaction.blocks.lock()
            transaction.events.lock()
            self._batch.connection = connection
            try:
                yield
            finally:
                self._batch.connection = None

    def close(self) -> None:
        self.engine.dispose()

    @property
    def _writes_one_by_one(self) -> bool:
        """SQLite locks the whole database from a transaction's first statement on."""
        return self.engine.dialect.name == "sqlite"


class _Batch(threading.local):
    connection: Connection | None = None  # of the `together` this thread is in


@contextmanager
def _savepoint(connection: Connection) -> Iterator[None]:
    inside: BaseException | None = None
    try:
        with connection.begin_nested():
            try:
                yield
            except BaseException as error:
                inside = error
                raise
    except SQLAlchemyError as error:
        if error is not inside:
            # The savepoint is gone, because the database ended the whole transaction by itself:
            # SQLite if the disk is full, PostgreSQL after an error. Nothing may follow in it, and
            # without this a commit of nothing would succeed.
            connection.invalidate()
        raise


class FairLock:
    """Threads get it in the order in which they asked. With a plain lock, or with the database's
    alone, a thread that commits without a pause keeps the others waiting for seconds."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()

    @contextmanager
    def hold(self) -> Iterator[None]:
        ticket = object()
        try:
            with self._changed:
                self._queue.append(ticket)
                self._changed.wait_for(lambda: self._queue[0] is ticket)
            yield
        finally:
            with self._changed:
                self._queue.remove(ticket)
                self._changed.notify_all()
