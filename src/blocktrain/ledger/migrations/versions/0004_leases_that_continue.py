"""A lease may continue another, whose update is still on its way"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("leases", sa.Column("continues", sa.String(length=64), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("leases") as leases:
        leases.drop_column("continues")
