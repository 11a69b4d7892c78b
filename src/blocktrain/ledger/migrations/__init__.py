"""The ledger's tables: created in a new database, brought up to date in an older one."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Engine, func, select

from blocktrain.ledger.schema import metadata

FOLDER = Path(__file__).resolve().parent
LOCK = 726564  # the number names the lock in PostgreSQL and has no other meaning


def create_or_upgrade(engine: Engine) -> None:
    """Several coordinators may open a ledger at the same time: one does it, the others wait."""
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(select(func.pg_advisory_xact_lock(LOCK)))
        config = Config()
        config.set_main_option("script_location", str(FOLDER).replace("%", "%%"))
        config.attributes["connection"] = connection
        if MigrationContext.configure(connection).get_current_revision() is None:
            metadata.create_all(connection, checkfirst=False)
            command.stamp(config, "head")
        else:
            command.upgrade(config, "head")
