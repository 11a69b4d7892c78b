"""What workers have hidden from replays."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    column: sa.Column[float] = sa.Column(
        "unexplained", sa.Double(), nullable=False, server_default="0"
    )
    op.add_column("workers", column)
