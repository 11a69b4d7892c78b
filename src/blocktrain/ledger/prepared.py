"""Statements compiled once and run by the driver itself.

SQLAlchemy takes 45 us for a statement that SQLite runs in 6, most of it spent on finding out again
what it has found out before. For the statements of every request that is done once here. The
connection must be inside a transaction: nothing is begun here.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, Executable
from sqlalchemy.engine.interfaces import DBAPICursor, Dialect

from blocktrain.ledger import driver

Found = Any  # a row: its columns are attributes
Answer = Callable[[], list[Found]]  # waits for the rows


class _Prepared(NamedTuple):
    text: str
    defaults: dict[str, Any]
    order: Sequence[str] | None  # where the driver takes parameters by position

    def parameters(self, values: dict[str, Any]) -> Any:
        given = {**self.defaults, **values}
        return given if self.order is None else [given[name] for name in self.order]


class PreparedStatements:
    """For one database. May be used from several threads at once."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._prepared: dict[tuple[int, frozenset[str]], _Prepared] = {}
        self._rows: dict[int, type] = {}

    def ask(self, connection: Connection, statement: Executable, **values: Any) -> Answer:
        """Run it; its rows may be fetched later, and are those of now."""
        cursor = driver.send(connection, *self._text(statement, values))

        def answer() -> list[Found]:
            with driver.translated(connection):
                found = cursor.fetchall()  # where SQLite does most of its reading
            row = self._row(statement, cursor)
            return [row(*values) for values in found]

        return answer

    def rows(self, connection: Connection, statement: Executable, **values: Any) -> list[Found]:
        return self.ask(connection, statement, **values)()

    def change(self, connection: Connection, statement: Executable, **values: Any) -> int:
        """Run it; how many rows it changed."""
        cursor = driver.send(connection, *self._text(statement, values))
        driver.wait(connection)
        return int(cursor.rowcount)

    def tell(self, connection: Connection, statement: Executable, **values: Any) -> None:
        """Run it; that it failed may be noticed only with a later one."""
        driver.tell(connection, *self._text(statement, values))

    def _text(self, statement: Executable, values: dict[str, Any]) -> tuple[str, Any]:
        """With its parameters, as the driver takes them."""
        key = id(statement), frozenset(values)
        if key not in self._prepared:
            self._prepared[key] = self._compiled(statement, list(values))
        prepared = self._prepared[key]
        return prepared.text, prepared.parameters(values)

    def _row(self, statement: Executable, cursor: DBAPICursor) -> type:
        if id(statement) not in self._rows:
            names = [column[0] for column in cursor.description]
            self._rows[id(statement)] = namedtuple("Found", names)
        return self._rows[id(statement)]

    def _compiled(self, statement: Any, names: list[str]) -> _Prepared:
        compiled = statement.compile(
            dialect=self._dialect,
            column_keys=names if statement.is_insert else None,
        )
        order = compiled.positiontup if compiled.positional else None
        return _Prepared(str(compiled), dict(compiled.params), order)
