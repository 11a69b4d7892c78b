"""When a lease's update is expected, so that others can end with it"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("leases", sa.Column("expected", sa.Double(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("leases") as leases:
        leases.drop_column("expected")
