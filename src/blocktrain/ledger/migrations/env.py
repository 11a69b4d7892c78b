"""Alembic runs this file, on the connection that `create_or_upgrade` passes on."""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"], transaction_per_migration=False
)
context.run_migrations()
