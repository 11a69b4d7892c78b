"""The schema: of a new database, and of ledgers of other releases."""

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sql
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Connection

from blocktrain.errors import ConfigError
from blocktrain.ledger import schema
from blocktrain.ledger.ledger import Ledger

ROOT = Path(__file__).resolve().parents[3]
RELEASE = ROOT / "tests" / "fixtures" / "release-0.1" / "none" / "coordinator" / "ledger.db"

ADDED = {  # since release 0.1
    "runs": "requires_checks tokenizer control extended",
    "updates": "norms gain own_gain checked clip merged_as removed_in",
    "blocks": "rolled_back",
    "workers": "accepted refused refused_in_a_row excluded excluded_until replayed checks"
    " suspicion unexplained check_seconds train_seconds speed",
}


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
        assert len(expected) == 8
        tables = sql.inspect(connection).get_table_names()
    assert set(tables) == {*schema.metadata.tables, "alembic_version"}


def test_a_ledger_of_release_0_1_gets_the_schema_and_keeps_its_rows(old_release: Path):
    plain = sql.create_engine(f"sqlite:///{old_release}")
    with plain.connect() as connection:
        before = rows(connection)
    plain.dispose()
    with closing(Ledger(f"sqlite:///{old_release}")) as ledger:
        with ledger.engine.connect() as connection:
            assert differences(connection) == []
            assert partial_indexes(connection) == metadata_indexes("sqlite://")
            after = rows(connection)
        with ledger.read() as tx:
            assert tx.run() and tx.members.workers() and tx.events.after(0, 10)
            assert [tx.versions.get(state.index).version for state in tx.blocks.states()]
            assert {worker.accepted for worker in tx.members.workers()} == {0}
            assert not any(worker.excluded for worker in tx.members.workers())
    assert after.pop("checks") == after.pop("trained") == []
    assert sum(map(len, before.values())) > 30
    for table, old in before.items():
        assert len(after[table]) == len(old)
        for row, same in zip(old, after[table], strict=True):
            assert row.items() <= same.items()


def rows(connection: Connection) -> dict[str, list[dict[str, Any]]]:
    """Every row of every table, by table."""
    found = sql.MetaData()
    found.reflect(connection)
    return {
        table.name: [dict(row) for row in connection.execute(sql.select(table)).mappings()]
        for table in found.sorted_tables
        if table.name != "alembic_version"
    }


def test_a_migrated_ledger_has_the_same_schema_as_a_new_one(url: str):
    with closing(Ledger(url)) as ledger, ledger.engine.begin() as connection:
        operations = Operations(MigrationContext.configure(connection))
        operations.drop_table("checks")
        operations.drop_table("trained")
        for index in ("updates_merged", "updates_scored", "updates_removed"):
            operations.drop_index(index, "updates")
        for table, columns in ADDED.items():
            for column in columns.split():
                operations.drop_column(table, column)
        assert differences(connection) != []
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0010'")
    with closing(Ledger(url)) as ledger, ledger.engine.connect() as connection:
        assert differences(connection) == []
        assert len(partial_indexes(connection)) == 8


@pytest.mark.parametrize("number", ["0009", "9999"])
def test_a_ledger_of_another_schema_is_told_from_one_that_is_broken(url: str, number: str):
    with closing(Ledger(url)) as ledger, ledger.engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE alembic_version SET version_num = '{number}'")
    with pytest.raises(ConfigError, match="was written by"):
        Ledger(url)
