"""Transactions that are committed together: what takes time is the disk.

A thread that has several writers' work before it does it inside `together`: each writer's
statements run in a savepoint, all or nothing by itself, and one commit puts all of them on disk.
Outside of it every writer commits by itself. Threads take turns in the order in which they come:
left to the database, one that is always busy would keep the others out.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from blocktrain.ledger import driver


class SharedCommits:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._turns = Turns()
        self._here = threading.local()

    @property
    def open_connection(self) -> Connection | None:
        """Of the `together` that this thread is in."""
        connection: Connection | None = getattr(self._here, "connection", None)
        return connection

    @contextmanager
    def together(self) -> Iterator[Connection]:
        with self._transaction() as connection:
            driver.tell(connection, "SAVEPOINT together")
            self._here.connection = connection
            try:
                yield connection
            finally:
                self._here.connection = None
            # Fails where the database has ended the transaction by itself (a full disk, a failed
            # read): a commit would then do nothing without a word.
            driver.tell(connection, "RELEASE SAVEPOINT together")

    @contextmanager
    def writer(self) -> Iterator[Connection]:
        """A connection inside a transaction. On disk afterwards, or after `together`."""
        if connection := self.open_connection:
            with _savepoint(connection):
                yield connection
            return
        with self._transaction() as connection:
            yield connection

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        """Committed only when all of it was answered."""
        with (
            self._turns.next(),
            self._engine.begin() as connection,
            driver.pipelined(connection),
        ):
            yield connection


class Turns:
    """A lock that is handed on in the order in which it was asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Event] = deque()

    @contextmanager
    def next(self) -> Iterator[None]:
        self._take()
        try:
            yield
        finally:
            self._hand_on()

    def _take(self) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Event()
            self._waiting.append(mine)
        try:
            mine.wait()
        except BaseException:  # Ctrl-C in the main thread
            self._leave(mine)
            raise

    def _leave(self, mine: threading.Event) -> None:
        with self._lock:
            if mine in self._waiting:
                self._waiting.remove(mine)
                return
        self._hand_on()  # it was handed to us meanwhile

    def _hand_on(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._taken = False


@contextmanager
def _savepoint(connection: Connection) -> Iterator[None]:
    """As `begin_nested`, at a small part of its price: these are never inside each other."""
    driver.tell(connection, "SAVEPOINT writer")
    try:
        yield
        driver.tell(connection, "RELEASE SAVEPOINT writer")
        driver.wait(connection)  # what went wrong in this writer is no other's
    except BaseException:
        with suppress(SQLAlchemyError):
            driver.wait(connection)  # for what was sent after the error: none of it was done
        try:
            driver.tell(connection, "ROLLBACK TO SAVEPOINT writer")
            driver.wait(connection)
        except SQLAlchemyError:
            connection.invalidate()  # nobody goes on in a transaction that is over
        raise
