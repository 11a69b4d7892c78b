"""The schema: of a new database, in typed rows, and of ledgers of other releases."""

import dataclasses
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sql
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, Table

from blocktrain.errors import ConfigError
from blocktrain.ledger import rows, schema
from blocktrain.ledger.ledger import Ledger

ROOT = Path(__file__).resolve().parents[3]
RELEASE = ROOT / "tests" / "fixtures" / "release-0.1" / "none" / "coordinator" / "ledger.db"

ROWS: list[tuple[type, Table]] = [
    (rows.RunRow, schema.runs),
    (rows.BlockRow, schema.blocks),
    (rows.LeaseRow, schema.leases),
    (rows.UpdateRow, schema.updates),
    (rows.WorkerRow, schema.workers),
    (rows.InviteRow, schema.invites),
    (rows.ScoreRow, schema.scores),
]


def differences(connection: Connection) -> list[object]:
    """Between the database and the schema that the statements are written for."""
    options = {"compare_type": True, "compare_server_default": True}
    return compare_metadata(MigrationContext.configure(connection, opts=options), schema.metadata)


def partial_indexes(connection: Connection) -> dict[str, str]:
    """By name, the rows that each index holds; `compare_metadata` does not look at them."""
    if connection.dialect.name == "postgresql":
        query = "SELECT indexname, indexdef FROM pg_indexes"
    else:
        query = "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"
    indexes = connection.exec_driver_sql(query).all()
    return {name: text.split("WHERE")[1].strip() for name, text in indexes if "WHERE" in text}


def metadata_indexes(url: str) -> dict[str, str]:
    engine = sql.create_engine(url)
    with engine.begin() as connection:
        schema.metadata.create_all(connection)
        found = partial_indexes(connection)
        schema.metadata.drop_all(connection)
    engine.dispose()
    return found


@pytest.fixture
def old_release(tmp_path: Path) -> Path:
    """A ledger that release 0.1 wrote, through ten migrations."""
    copy = tmp_path / "ledger.db"
    shutil.copy(RELEASE, copy)
    return copy


def test_a_new_database_has_exactly_the_schema(url: str):
    expected = metadata_indexes(url.replace("postgresql://", "postgresql+psycopg://"))
    with closing(Ledger(url)) as ledger, ledger.engine.connect() as connection:
        assert differences(connection) == []
        assert partial_indexes(connection) == expected
        assert len(expected) == 4
        tables = sql.inspect(connection).get_table_names()
    assert set(tables) == {*schema.metadata.tables, "alembic_version"}


def test_a_ledger_of_release_0_1_is_opened_without_any_change(old_release: Path):
    def statements(connection: Connection) -> list[str]:
        query = "SELECT sql FROM sqlite_master ORDER BY name"
        return list(connection.exec_driver_sql(query).scalars())

    plain = sql.create_engine(f"sqlite:///{old_release}")
    with plain.connect() as connection:
        before = statements(connection)
    plain.dispose()
    with closing(Ledger(f"sqlite:///{old_release}")) as ledger:
        with ledger.engine.connect() as connection:
            assert statements(connection) == before
            assert differences(connection) == []
            assert partial_indexes(connection) == metadata_indexes("sqlite://")
        with ledger.read() as tx:
            assert tx.run() and tx.members.workers() and tx.events.after(0, 10)
            assert [tx.versions.get(state.index).version for state in tx.blocks.states()]


@pytest.mark.parametrize("number", ["0009", "9999"])
def test_a_ledger_of_another_schema_is_told_from_one_that_is_broken(url: str, number: str):
    with closing(Ledger(url)) as ledger, ledger.engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE alembic_version SET version_num = '{number}'")
    with pytest.raises(ConfigError, match="was written by"):
        Ledger(url)


@pytest.mark.parametrize(("row", "table"), ROWS, ids=lambda each: getattr(each, "name", ""))
def test_a_row_has_the_columns_of_its_table(row: type, table: Table):
    fields = dataclasses.fields(row)
    assert [field.name for field in fields] == table.c.keys()
    nullable = {field.name for field in fields if "None" in str(field.type)}
    assert nullable == {column.name for column in table.c if column.nullable}
