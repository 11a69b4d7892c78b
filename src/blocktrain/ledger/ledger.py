"""The database of a run: where it is, and how what is read or written of it stays whole.

SQLite by default, PostgreSQL by URL, through the same statements. Every change is one transaction,
on disk when it returns; claims take the block's row first (`BEGIN IMMEDIATE` / `FOR UPDATE`), so
that any number of coordinators may share one ledger. Knows no clock: times are handed in.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from alembic.util import CommandError
from sqlalchemy.exc import DatabaseError

from blocktrain.errors import ConfigError, UnreachableError
from blocktrain.ledger import driver, statements
from blocktrain.ledger.database import open_engine, shown
from blocktrain.ledger.migrations import upgrade
from blocktrain.ledger.prepared import PreparedStatements
from blocktrain.ledger.records import lock_events
from blocktrain.ledger.session import StatementSession
from blocktrain.ledger.shared_commits import SharedCommits
from blocktrain.ledger.standing import LedgerSnapshot
from blocktrain.ledger.transaction import Transaction


class Ledger:
    def __init__(self, url: str) -> None:
        self.url = url
        self.engine = open_engine(url)
        self._commits = SharedCommits(self.engine)
        self._prepared = PreparedStatements(self.engine.dialect)
        self._here = threading.local()
        try:
            upgrade(self.engine)
        except DatabaseError as error:
            self.engine.dispose()
            raise UnreachableError(f"cannot open the ledger {shown(url)}: {error.orig}") from None
        except CommandError:  # it has been through migrations that are not here
            self.engine.dispose()
            raise ConfigError(
                f"the ledger {shown(url)} is of a newer blocktrain; update this one to open it"
            ) from None

    @contextmanager
    def write(self) -> Iterator[Transaction]:
        """All of what happens inside, or nothing; on disk afterwards, or after `together`."""
        alone = self._writers_are_alone or self._commits.open_connection is not None
        standing = self._standing
        try:
            with self._commits.writer() as connection:
                yield Transaction(StatementSession(connection, self._prepared, alone), standing)
        except BaseException:
            standing.forget()  # what it was told has not happened
            raise

    @contextmanager
    def together(self) -> Iterator[None]:
        """What this thread writes inside is put on disk by one commit at the end. All locks are
        taken at once, before any writer: what one of them took would be lost with it."""
        with self._commits.together() as connection:
            if not self._writers_are_alone:
                self._prepared.tell(connection, statements.LOCK_BLOCKS)
                lock_events(connection)
                driver.wait(connection)
            self._here.standing = LedgerSnapshot()
            try:
                yield
            finally:
                del self._here.standing

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """What is seen inside is of one moment."""
        if connection := self._commits.open_connection:
            yield Transaction(StatementSession(connection, self._prepared), self._standing)
            return
        options: dict[str, Any] = {"read": True}
        if self.engine.dialect.name == "postgresql":
            options["isolation_level"] = "REPEATABLE READ"
        with (
            self.engine.connect().execution_options(**options) as connection,
            connection.begin(),
            driver.pipelined(connection),
        ):
            yield Transaction(StatementSession(connection, self._prepared), LedgerSnapshot())

    def close(self) -> None:
        self.engine.dispose()

    @property
    def _standing(self) -> LedgerSnapshot:
        """Of the `together` that this thread is in: nobody else changes it meanwhile."""
        return getattr(self._here, "standing", None) or LedgerSnapshot()

    @property
    def _writers_are_alone(self) -> bool:
        """SQLite lets one in at a time, from the first statement on."""
        return self.engine.dialect.name == "sqlite"
