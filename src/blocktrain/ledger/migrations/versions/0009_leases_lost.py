"""A lease that ran out is told of as lost; how many were given was counted and never read"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_column("blocks", "leases_given")
    op.execute("UPDATE events SET kind = 'lost' WHERE kind = 'expired'")


def downgrade() -> None:
    op.execute("UPDATE events SET kind = 'expired' WHERE kind = 'lost'")
    given = sa.Column("leases_given", sa.BigInteger(), nullable=False, server_default="0")
    op.add_column("blocks", given)
