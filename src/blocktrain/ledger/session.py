"""Statements inside of one transaction: asked ahead, prepared, or as they come. Knows no table."""

from typing import Any

from sqlalchemy import Connection, CursorResult, Executable

from blocktrain.ledger.prepared import Answer, Found, PreparedStatements


class StatementSession:
    def __init__(
        self, connection: Connection, prepared: PreparedStatements, alone: bool = False
    ) -> None:
        """`alone`: all locks are held already."""
        self.connection = connection
        self.alone = alone
        self._prepared = prepared
        self._asked: dict[tuple[Any, ...], Answer] = {}

    def ask(self, statement: Executable, **values: Any) -> None:
        """Ahead of `rows`: nothing that it reads may be changed in between."""
        asked = (id(statement), *values.items())
        if asked not in self._asked:
            self._asked[asked] = self._prepared.ask(self.connection, statement, **values)

    def first(self, statement: Executable, **values: Any) -> Found | None:
        rows = self.rows(statement, **values)
        return rows[0] if rows else None

    def rows(self, statement: Executable, **values: Any) -> list[Found]:
        if answer := self._asked.pop((id(statement), *values.items()), None):
            return answer()
        return self._prepared.rows(self.connection, statement, **values)

    def tell(self, statement: Executable, **values: Any) -> None:
        self._prepared.tell(self.connection, statement, **values)

    def change(self, statement: Executable, **values: Any) -> bool:
        return bool(self._prepared.change(self.connection, statement, **values))

    def changed(self, statement: Any) -> bool:
        return bool(self.run(statement).rowcount)

    def run(self, statement: Any) -> CursorResult[*tuple[Any, ...]]:
        return self.connection.execute(statement)
