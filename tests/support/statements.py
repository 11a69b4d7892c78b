"""Something that happens once, at a statement of a ledger: a test that ends without it fails."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sql
from tests.support.once import once

from blocktrain.ledger.ledger import Ledger


@contextmanager
def before_statement(ledger: Ledger, beginning: str, act: Callable[[], None]) -> Iterator[None]:
    """Before the first statement that begins like this is sent, from whichever thread."""
    with (
        once(f"before {beginning}", act) as meddle,
        listening(ledger, "before", lambda text: text.startswith(beginning), meddle),
    ):
        yield


@contextmanager
def after_statement(ledger: Ledger, words: str, act: Callable[[], None]) -> Iterator[None]:
    """After the first statement that holds these words was run."""
    with (
        once(f"after {words}", act) as meddle,
        listening(ledger, "after", lambda text: words in text, meddle),
    ):
        yield


@contextmanager
def listening(
    ledger: Ledger, when: str, is_meant: Callable[[str], bool], act: Callable[[], None]
) -> Iterator[None]:
    def notice(connection: Any, cursor: Any, text: str, *rest: Any) -> None:
        if is_meant(text):
            act()

    event = f"{when}_cursor_execute"
    sql.event.listen(ledger.engine, event, notice)
    try:
        yield
    finally:
        sql.event.remove(ledger.engine, event, notice)
