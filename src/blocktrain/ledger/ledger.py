"""A run's database: opened by URL, read and written in transactions.

Each change is one transaction and is on disk when it returns. Transactions that hand out work lock
the blocks first (`BEGIN IMMEDIATE` in SQLite, `FOR UPDATE` in PostgreSQL), so that several
coordinators may share a ledger. The ledger has no clock: times are passed in.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from alembic.util import CommandError
from sqlalchemy import Connection
from sqlalchemy.exc import DatabaseError, SQLAlchemyError

from blocktrain.errors import ConfigError, UnreachableError
from blocktrain.ledger.database import open_engine, without_password
from blocktrain.ledger.migrations import create_or_upgrade
from blocktrain.ledger.transaction import Transaction


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
