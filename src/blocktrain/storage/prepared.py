"""Statements compiled once and run by the driver itself.

SQLAlchemy takes 45 us for a statement that SQLite runs in 6, most of it spent on finding out again
what it has found out before. For the statements of every request that is done once here. The
connection must be inside a transaction: nothing is begun here.
"""

from collections import namedtuple
from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, Executable
from sqlalchemy.engine.interfaces import DBAPICursor, DBAPIModule, Dialect
from sqlalchemy.exc import DBAPIError

Found = Any  # a row: its columns are attributes


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

    def rows(self, connection: Connection, statement: Executable, **values: Any) -> list[Found]:
        cursor = self._execute(connection, statement, values)
        try:
            found = cursor.fetchall()  # where SQLite does most of its reading
        except self._dialect.loaded_dbapi.Error as error:
            raise self._translated(error, connection, cursor, str(statement), values) from error
        if id(statement) not in self._rows:
            names = [column[0] for column in cursor.description]
            self._rows[id(statement)] = namedtuple("Found", names)
        row = self._rows[id(statement)]
        return [row(*values) for values in found]

    def change(self, connection: Connection, statement: Executable, **values: Any) -> int:
        """Run it; how many rows it changed."""
        return int(self._execute(connection, statement, values).rowcount)

    def _execute(
        self, connection: Connection, statement: Executable, values: dict[str, Any]
    ) -> DBAPICursor:
        key = id(statement), frozenset(values)
        if key not in self._prepared:
            self._prepared[key] = self._compiled(statement, list(values))
        prepared = self._prepared[key]
        cursor = connection.connection.cursor()
        try:
            cursor.execute(prepared.text, prepared.parameters(values))
        except self._dialect.loaded_dbapi.Error as error:
            raise self._translated(error, connection, cursor, prepared.text, values) from error
        return cursor

    def _translated(
        self,
        error: DBAPIModule.Error,
        connection: Connection,
        cursor: DBAPICursor,
        text: str,
        values: dict[str, Any],
    ) -> BaseException:
        """The same as SQLAlchemy's error."""
        if self._dialect.is_disconnect(error, connection.connection, cursor):
            connection.invalidate(error)
        return DBAPIError.instance(text, values, error, self._dialect.loaded_dbapi.Error)

    def _compiled(self, statement: Any, names: list[str]) -> _Prepared:
        compiled = statement.compile(
            dialect=self._dialect,
            column_keys=names if statement.is_insert else None,
        )
        order = compiled.positiontup if compiled.positional else None
        return _Prepared(str(compiled), dict(compiled.params), order)
