"""The ledger: its database (SQLite or PostgreSQL, by URL) and its transactions.

A transaction gives access to the tables, and publishes versions, which changes most of them. Tables
are created in a new database and migrated in an older one.
"""

import sqlite3
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import sqlalchemy as sql
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.util import CommandError
from sqlalchemy import Connection, insert, select, update
from sqlalchemy.exc import DatabaseError, SQLAlchemyError

from blocktrain.errors import ConfigError, UnreachableError
from blocktrain.ledger.check_tables import CheckTable
from blocktrain.ledger.history_tables import HistoryTable
from blocktrain.ledger.lease_tables import BlockTable, LeaseTable
from blocktrain.ledger.member_tables import EventTable, MemberTable
from blocktrain.ledger.schema import (
    BlockRow,
    RunRow,
    Statements,
    UpdateRow,
    Version,
    blocks,
    metadata,
    runs,
)
from blocktrain.ledger.update_tables import UpdateTable, VersionTable
from blocktrain.protocol.messages import Blob
from blocktrain.swarm.state import PendingUpdate

PSYCOPG = "postgresql+psycopg"
CONNECTIONS = 16
BUSY_MILLISECONDS = 30_000
CACHE_KILOBYTES = 16_000  # per connection
MIGRATIONS = Path(__file__).resolve().parent / "migrations"
UPGRADE_LOCK = 726564  # id of the advisory lock in PostgreSQL; arbitrary


def open_engine(url: str) -> sql.Engine:
    try:
        parsed = sql.make_url(url)
    except sql.exc.ArgumentError:
        raise ConfigError(
            f"{without_password(url)} is not a database URL; use sqlite:///FILE or postgresql://..."
        ) from None
    if parsed.drivername == "sqlite":
        return _sqlite_engine(parsed)
    if parsed.drivername in ("postgresql", "postgres", PSYCOPG):
        return _postgresql_engine(parsed.set(drivername=PSYCOPG))
    raise ConfigError(
        f"{without_password(url)} is neither SQLite nor PostgreSQL; use sqlite:///FILE or"
        " postgresql://..."
    )


def without_password(url: str) -> str:
    """A database URL for messages; only "the address" if it is not a URL."""
    try:
        return sql.make_url(url).render_as_string(hide_password=True)
    except sql.exc.ArgumentError:
        return "the address"


def _postgresql_engine(url: sql.URL) -> sql.Engine:
    try:
        engine = sql.create_engine(url, pool_pre_ping=True, pool_size=CONNECTIONS)
    except ImportError:
        raise ConfigError("PostgreSQL needs psycopg: pip install 'blocktrain[postgres]'") from None

    @sql.event.listens_for(engine, "connect")
    def prepare(connection: Any, record: Any) -> None:
        # Plans are cached: one made for a small table would keep scanning it after it has grown.
        # Before PostgreSQL 18 the high cost of such a plan would also start the JIT compiler.
        connection.execute("SET enable_seqscan = off; SET jit = off")
        connection.commit()

    return engine


def _sqlite_engine(url: sql.URL) -> sql.Engine:
    if url.database:
        _make_private(Path(url.database))
    engine = sql.create_engine(url, pool_size=CONNECTIONS)

    @sql.event.listens_for(engine, "connect")
    def prepare(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # `begin` starts transactions, not the driver
        connection.execute(f"PRAGMA busy_timeout={BUSY_MILLISECONDS}")
        _write_ahead(connection)
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute(f"PRAGMA cache_size=-{CACHE_KILOBYTES}")

    @sql.event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # Writers take the lock at once: of two that read first, one would fail when it writes.
        reads = connection.get_execution_options().get("reads")
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine


def _make_private(path: Path) -> None:
    """Make the database private, since it contains secrets. SQLite copies its mode to its other
    files."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(OSError):  # SQLite reports the error better
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


def create_or_upgrade(engine: sql.Engine) -> None:
    """Create or migrate the tables. If several coordinators open a ledger at the same time, one
    does this and the others wait."""
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(select(sql.func.pg_advisory_xact_lock(UPGRADE_LOCK)))
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
        config.attributes["connection"] = connection
        if MigrationContext.configure(connection).get_current_revision() is None:
            metadata.create_all(connection, checkfirst=False)
            command.stamp(config, "head")
        else:
            command.upgrade(config, "head")


class Transaction(Statements):
    def __init__(self, connection: Connection, *, locked: bool = False) -> None:
        """`locked`: the transaction already holds the locks of blocks and events."""
        super().__init__(connection)
        self.blocks = BlockTable(connection, locked=locked)
        self.leases = LeaseTable(connection)
        self.updates = UpdateTable(connection)
        self.checks = CheckTable(connection)
        self.history = HistoryTable(connection)
        self.versions = VersionTable(connection)
        self.members = MemberTable(connection)
        self.events = EventTable(connection, locked=locked)

    def run(self) -> RunRow | None:
        return self.first(RunRow, select(runs))

    def may_create_run(self) -> bool:
        """Prevent other transactions from creating a run until this one ends. Returns False if a
        run exists."""
        if self.connection.dialect.name == "postgresql":
            self.connection.execute(sql.text("LOCK TABLE runs IN SHARE ROW EXCLUSIVE MODE"))
        return self.run() is None

    def create_run(self, row: RunRow) -> None:
        self.write(insert(runs), **vars(row))

    def finish_run(self, now: float) -> bool:
        """Mark the run as finished. Returns False if it was marked before."""
        return bool(self.write(update(runs).where(runs.c.finished.is_(None)).values(finished=now)))

    def extend_run(self, config: str, steps: int, now: float) -> None:
        """Replace the settings, and open the blocks for batches up to this number."""
        self.blocks.lock()
        self.write(update(runs).values(config=config, extended=now, finished=None))
        self.write(update(blocks).values(total_batches=steps))

    def create_block(self, index: int, total_batches: int, weights: Blob, now: float) -> None:
        """Add a block and its version 0."""
        self.blocks.add(BlockRow(block=index, total_batches=total_batches))
        first = Version(block=index, version=0, weights=weights, merged_batches=0, created=now)
        self.versions.add(first)

    def publish(
        self,
        block: int,
        version: int,
        weights: Blob,
        velocity: Blob | None,
        merged: Sequence[PendingUpdate],
        now: float,
        *,
        delta: Blob | None = None,
        residual: Blob | None = None,
        merged_as: Mapping[str, str] = MappingProxyType({}),
    ) -> bool:
        """Publish the block's next version if the current one is still `version` and all merged
        updates are still pending; otherwise return False. `delta` leads from the current version to
        the next; `residual` is what the delta leaves out. `merged_as`: how each update was merged,
        by lease."""
        self.blocks.lock()
        names = {item.lease for item in merged}
        if not self.updates.are_pending(names):
            return False
        steps = sum(item.steps for item in merged)
        if not self._add_version(block, version, steps, weights, velocity, residual, now):
            return False
        if delta:
            self.versions.add_delta(block, version + 1, delta)
        self.updates.mark_merged(names, version + 1)
        for lease, how in merged_as.items():
            self.updates.record_merge(lease, how)
        self.updates.rebase_those_that_continue(names, version + 1)
        return True

    def publish_rebuilt(
        self,
        block: int,
        version: int,
        weights: Blob,
        velocity: Blob | None,
        residual: Blob | None,
        removed: Sequence[UpdateRow],
        reason: str,
        now: float,
    ) -> bool:
        """Publish a version without these merged updates if the current one is still `version`;
        otherwise return False. Their batches can be leased again, so a finished run goes on."""
        self.blocks.lock()
        steps = -sum(row.steps for row in removed)
        if not self._add_version(block, version, steps, weights, velocity, residual, now):
            return False
        self.updates.remove({row.lease for row in removed}, version + 1, reason)
        for row in removed:
            lease = self.leases.get(row.lease)
            assert lease is not None, "an update has a lease"
            self.blocks.give_back_range(block, lease.first_batch, lease.steps)
        self.write(update(runs).values(finished=None))
        return True

    def _add_version(
        self,
        block: int,
        version: int,
        steps: int,
        weights: Blob,
        velocity: Blob | None,
        residual: Blob | None,
        now: float,
    ) -> bool:
        """Add the version after `version`, with so many more merged batches, and make it current;
        False if another one is current."""
        swapped = self.write(
            update(blocks)
            .where(blocks.c.block == block, blocks.c.version == version)
            .values(
                version=version + 1,
                merged_batches=blocks.c.merged_batches + steps,
                merging_until=0.0,
            )
        )
        if not swapped:
            return False
        self.versions.add(
            Version(
                block=block,
                version=version + 1,
                weights=weights,
                velocity=velocity,
                residual=residual,
                merged_batches=self.blocks.get(block).merged_batches,
                created=now,
            )
        )
        return True


class Ledger:
    def __init__(self, url: str) -> None:
        self.url = url
        self.engine = open_engine(url)
        self._writing = FairLock()
        self._batch = _Batch()
        address = without_password(url)
        try:
            create_or_upgrade(self.engine)
        except DatabaseError as error:
            self.engine.dispose()
            raise UnreachableError(
                f"cannot open the ledger {address}: {error.orig}; check its address and permissions"
            ) from None
        except CommandError:
            self.engine.dispose()
            raise ConfigError(
                f"the ledger {address} was written by a newer blocktrain, or by one before 0.1;"
                " open it with that release"
            ) from None

    @contextmanager
    def write(self) -> Iterator[Transaction]:
        """A transaction, all or nothing. It is on disk when the `with` block ends, or when the
        `together` around it ends."""
        if connection := self._batch.connection:
            with _savepoint(connection):
                yield Transaction(connection, locked=True)
            return
        with self._writing.hold(), self.engine.begin() as connection:
            yield Transaction(connection, locked=self._writes_one_by_one)

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """A read-only transaction on a consistent snapshot."""
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
        """Join all reads and writes of this thread in one transaction with one commit, since
        syncing the disk takes most of the time. Each `write` inside is still all or nothing."""
        with self._writing.hold(), self.engine.begin() as connection:
            # Lock before any savepoint: its rollback would release locks that were taken after it.
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
        """Whether writers exclude each other anyway: SQLite locks the whole database."""
        return self.engine.dialect.name == "sqlite"


class _Batch(threading.local):
    connection: Connection | None = None  # of this thread's `together`, if it is in one


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
            # The savepoint is gone because the database ended the whole transaction: SQLite if the
            # disk is full, PostgreSQL after an error. Nothing may follow in this transaction;
            # without this line, a commit of nothing would succeed.
            connection.invalidate()
        raise


class FairLock:
    """A lock that threads get in the order of their requests. With a plain lock, or the database's
    own, a thread that commits without a pause blocks the others for seconds."""

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
