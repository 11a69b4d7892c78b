"""Versions may follow each other by differences; bytes moved are counted by worker and block"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

COUNTS = ("up", "up_raw", "down_whole", "down_differences", "down_raw")


def upgrade() -> None:
    op.add_column("versions", sa.Column("owed", sa.String(length=64), nullable=True))
    op.add_column("versions", sa.Column("owed_size", sa.BigInteger(), nullable=True))
    op.add_column("updates", sa.Column("downloads", sa.Text(), nullable=True))
    op.create_table(
        "differences",
        sa.Column("block", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["block"], ["blocks.block"]),
        sa.PrimaryKeyConstraint("block", "version"),
    )
    op.create_table(
        "traffic",
        sa.Column("worker", sa.String(length=64), nullable=False),
        sa.Column("block", sa.Integer(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in COUNTS),
        sa.ForeignKeyConstraint(["worker"], ["workers.id"]),
        sa.ForeignKeyConstraint(["block"], ["blocks.block"]),
        sa.PrimaryKeyConstraint("worker", "block"),
    )


def downgrade() -> None:
    op.drop_table("traffic")
    op.drop_table("differences")
    with op.batch_alter_table("updates") as updates:
        updates.drop_column("downloads")
    with op.batch_alter_table("versions") as versions:
        versions.drop_column("owed_size")
        versions.drop_column("owed")
