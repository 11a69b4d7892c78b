"""Whether the operator has paused a run."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    column = sa.Column("control", sa.String(16), nullable=False, server_default="running")
    op.add_column("runs", column)
