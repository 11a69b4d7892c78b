"""Something that happens once, at a statement of a ledger: a test that ends without it fails."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import sqlalchemy as sql
from tests.support.once import once

from blocktrain.ledger import driver
from blocktrain.ledger.ledger import Ledger


@contextmanager
def before_statement(ledger: Ledger, beginning: str, act: Callable[[], None]) -> Iterator[None]:
    """Before the first statement that begins like this is sent, whoever sends it."""
    execute = driver.execute
    with once(f"before {beginning}", act) as meddle:

        def sent(connection: sql.Connection, cursor: Any, text: str, parameters: Any) -> None:
            if connection.engine is ledger.engine and text.startswith(beginning):
                meddle()
            execute(connection, cursor, text, parameters)

        def notice(connection: Any, cursor: Any, text: str, *rest: Any) -> None:
            if text.startswith(beginning):
                meddle()

        with patch.object(driver, "execute", sent), listening(ledger, "before", notice):
            yield


@contextmanager
def after_statement(ledger: Ledger, words: str, act: Callable[[], None]) -> Iterator[None]:
    """After the rows of the first statement that holds these words are here."""
    prepared = ledger._prepared  # the raw cursors' statements raise no event of SQLAlchemy
    ask = prepared.ask
    with once(f"after {words}", act) as meddle:

        def asked(connection: sql.Connection, statement: Any, **values: Any) -> Any:
            found = ask(connection, statement, **values)()
            if words in str(statement):
                meddle()
            return lambda: found

        def notice(connection: Any, cursor: Any, text: str, *rest: Any) -> None:
            if words in text:
                meddle()

        with patch.object(prepared, "ask", asked), listening(ledger, "after", notice):
            yield


@contextmanager
def listening(ledger: Ledger, when: str, notice: Callable[..., None]) -> Iterator[None]:
    event = f"{when}_cursor_execute"
    sql.event.listen(ledger.engine, event, notice)
    try:
        yield
    finally:
        sql.event.remove(ledger.engine, event, notice)
