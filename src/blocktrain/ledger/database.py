"""Opening the ledger's database: SQLite or PostgreSQL, by URL."""

import sqlite3
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import sqlalchemy as sql
from sqlalchemy import Connection

from blocktrain.errors import ConfigError
from blocktrain.ledger import driver

PSYCOPG = "postgresql+psycopg"
BUSY_MILLISECONDS = 30_000
CACHE_KILOBYTES = 16_000  # of each connection


def open_engine(url: str) -> sql.Engine:
    try:
        parsed = sql.make_url(url)
    except sql.exc.ArgumentError:
        raise ConfigError(f"{shown(url)} is not a database URL") from None
    if parsed.drivername == "sqlite":
        if parsed.database:
            _make_private(Path(parsed.database))
        return _sqlite_engine(parsed)
    if parsed.drivername not in ("postgresql", "postgres", PSYCOPG):
        raise ConfigError(f"{shown(url)} is neither SQLite nor PostgreSQL")
    parsed = parsed.set(drivername=PSYCOPG)
    try:
        engine = sql.create_engine(parsed, pool_pre_ping=True, pool_size=16)
    except ImportError:
        raise ConfigError("PostgreSQL needs psycopg: pip install 'blocktrain[postgres]'") from None

    @sql.event.listens_for(engine, "connect")
    def prepare(connection: Any, record: Any) -> None:
        # Plans are kept: one that was made while a table was small would go on reading all of it.
        # Before version 18 such a table seems dear enough to compile for where there is no index.
        connection.execute("SET enable_seqscan = off; SET jit = off")
        connection.commit()

    @sql.event.listens_for(engine, "after_cursor_execute")
    def wait(connection: Connection, *rest: Any) -> None:
        driver.wait(connection)  # SQLAlchemy looks at the answer of all it runs itself

    return engine


def _sqlite_engine(url: sql.URL) -> sql.Engine:
    engine = sql.create_engine(url, pool_size=16)

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
        # A writer takes the lock at once: two that both begin by reading could not both go on.
        reads = connection.get_execution_options().get("read")
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine


def _make_private(path: Path) -> None:
    """The run's secrets are in it. What SQLite puts beside it gets the same permissions."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(OSError):  # SQLite will say what is wrong with it
        path.touch(mode=0o600)


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Here SQLite does not wait: of two that open a new file at once, one is turned away."""
    deadline = time.monotonic() + BUSY_MILLISECONDS / 1000
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def shown(url: str) -> str:
    """Without the password."""
    try:
        return sql.make_url(url).render_as_string(hide_password=True)
    except sql.exc.ArgumentError:
        return "given"
