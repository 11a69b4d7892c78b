"""Statements handed to the database's driver itself, and when its answers are waited for.

PostgreSQL is asked by pipeline: what is sent inside `pipelined` waits for no answer, so that many
statements are one round trip. Whoever needs an answer fetches it or waits; an error comes up
there, of whichever statement was sent before. SQLite answers at once. Knows no statement's meaning.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.engine.interfaces import DBAPICursor
from sqlalchemy.exc import DBAPIError

_PIPELINE = "pipeline"  # where a connection keeps its own
_TELLER = "teller"  # and the cursor of what is only told


@contextmanager
def pipelined(connection: Connection) -> Iterator[None]:
    """All that was sent inside is answered at the end."""
    if connection.dialect.name != "postgresql":
        yield
        return
    driver: Any = connection.connection.driver_connection
    kept = connection.info
    with translated(connection), driver.pipeline() as pipeline:
        kept[_PIPELINE] = pipeline
        try:
            yield
        finally:
            kept.pop(_PIPELINE, None)


def send(connection: Connection, text: str, parameters: Any = ()) -> DBAPICursor:
    """Inside a transaction: nothing is begun here."""
    cursor = connection.connection.cursor()
    execute(connection, cursor, text, parameters)
    return cursor


def tell(connection: Connection, text: str, parameters: Any = ()) -> None:
    """The same where nobody looks at the answer: all of these share a cursor, for making one takes
    a fifth of the time."""
    kept = connection.info
    if _TELLER not in kept:
        kept[_TELLER] = connection.connection.cursor()
    execute(connection, kept[_TELLER], text, parameters)


def execute(connection: Connection, cursor: DBAPICursor, text: str, parameters: Any) -> None:
    with translated(connection, text, parameters):
        cursor.execute(text, parameters)


def wait(connection: Connection) -> None:
    """Until all that was sent is answered."""
    if pipeline := connection.info.get(_PIPELINE):
        with translated(connection):
            pipeline.sync()


@contextmanager
def translated(connection: Connection, text: str = "", parameters: Any = ()) -> Iterator[None]:
    """The driver's errors become SQLAlchemy's, as if it had run the statement."""
    errors = connection.dialect.loaded_dbapi.Error
    try:
        yield
    except errors as error:
        lost = not connection.invalidated and connection.dialect.is_disconnect(
            error, connection.connection, None
        )
        if lost:
            connection.invalidate(error)
        raise DBAPIError.instance(text, parameters, error, errors) from error
