"""The ledger's schema, brought up to date when it is opened."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine

FOLDER = Path(__file__).resolve().parent


def upgrade(engine: Engine) -> None:
    """To the newest version; several coordinators may open a ledger at the same time."""
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            # Held until the transaction ends; the number names this lock and means nothing.
            connection.exec_driver_sql("SELECT pg_advisory_xact_lock(726564)")
        config = Config()
        config.set_main_option("script_location", str(FOLDER).replace("%", "%%"))
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
