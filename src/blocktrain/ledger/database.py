"""Connections to the ledger's database: SQLite or PostgreSQL, by URL."""

import sqlite3
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import sqlalchemy as sql
from sqlalchemy import Connection

from blocktrain.errors import ConfigError

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
