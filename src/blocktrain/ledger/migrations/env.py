"""Alembic's entry point: it runs on the connection `upgrade` hands over."""

from alembic import context

from blocktrain.ledger.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transaction_per_migration=False,
)
context.run_migrations()
