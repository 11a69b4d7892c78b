"""What a rebuild needs to know of a merged update, and when a block was rolled back."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"

REMOVED = sa.text("removed_in IS NOT NULL")


def upgrade() -> None:
    op.add_column("updates", sa.Column("merged_as", sa.Text()))
    op.add_column("updates", sa.Column("removed_in", sa.Integer()))
    op.add_column(
        "blocks", sa.Column("rolled_back", sa.Double(), nullable=False, server_default="0")
    )
    op.create_index(
        "updates_removed",
        "updates",
        ["block"],
        sqlite_where=REMOVED,
        postgresql_where=REMOVED,
    )
