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
    op.drop_column("leases", "expected")  # a copy of the table would leave updates without theirs
