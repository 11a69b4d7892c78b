"""What a waiting update continues is in its own row: every claim asks for it"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("updates", sa.Column("continues", sa.String(length=64), nullable=True))
    op.execute(
        "UPDATE updates SET continues ="
        " (SELECT leases.continues FROM leases WHERE leases.id = updates.lease)"
        " WHERE state IN ('offered', 'pending')"  # of the others nobody asks
    )


def downgrade() -> None:
    with op.batch_alter_table("updates") as updates:
        updates.drop_column("continues")
