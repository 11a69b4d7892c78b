"""Alembic runs this file, with the connection from `create_or_upgrade`."""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"], transaction_per_migration=False
)
context.run_migrations()
