"""Which invite a worker joined with, so that all of them can be banned together"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("workers", sa.Column("invite", sa.String(64), nullable=True))


def downgrade() -> None:
    op.drop_column("workers", "invite")
