"""Waiting updates are found by their state, however many have gone before; what they are made of
is in their offer alone"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_index("leases_by_block", table_name="leases")
    op.drop_index("updates_by_block", table_name="updates")
    with op.batch_alter_table("updates") as updates:
        updates.drop_column("blob")
        updates.drop_column("blob_size")
        updates.create_index("updates_by_state", ["state"])


def downgrade() -> None:
    with op.batch_alter_table("updates") as updates:
        updates.drop_index("updates_by_state")
        updates.add_column(sa.Column("blob", sa.String(length=64), nullable=True))
        updates.add_column(sa.Column("blob_size", sa.BigInteger(), nullable=True))
        updates.create_index("updates_by_block", ["block", "state"])
    op.create_index("leases_by_block", "leases", ["block", "state"])
