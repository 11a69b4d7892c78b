"""Checks of updates by validators, and the reputation of workers."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"

SCORED = sa.text("gain IS NOT NULL")
MERGED = sa.text("state = 'merged'")
DUE = sa.text("state = 'hidden' OR state = 'waiting' OR state = 'assigned'")


def upgrade() -> None:
    op.add_column("runs", _flag("requires_checks"))
    op.add_column("updates", sa.Column("norms", sa.Text()))
    for name in ("gain", "own_gain", "clip"):
        op.add_column("updates", sa.Column(name, sa.Double()))
    op.add_column("updates", _flag("checked"))
    op.create_index(
        "updates_scored",
        "updates",
        ["committed"],
        sqlite_where=SCORED,
        postgresql_where=SCORED,
    )
    op.create_index(
        "updates_merged",
        "updates",
        ["block", "merged_into"],
        sqlite_where=MERGED,
        postgresql_where=MERGED,
    )
    for name in ("accepted", "refused", "refused_in_a_row", "replayed", "checks"):
        op.add_column("workers", _count(name, sa.BigInteger()))
    for name in ("suspicion", "check_seconds", "train_seconds"):
        op.add_column("workers", _count(name, sa.Double()))
    op.add_column("workers", _flag("excluded"))
    for name in ("excluded_until", "speed"):
        op.add_column("workers", sa.Column(name, sa.Double()))
    op.create_table(
        "trained",
        sa.Column("worker", sa.String(64), sa.ForeignKey("workers.id"), primary_key=True),
        sa.Column("block", sa.Integer(), sa.ForeignKey("blocks.block"), primary_key=True),
        sa.Column("steps", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "checks",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("lease", sa.String(64), sa.ForeignKey("leases.id"), nullable=False),
        sa.Column("method", sa.String(16), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("segment", sa.Integer()),
        sa.Column("validator", sa.String(64)),
        sa.Column("version", sa.Integer()),
        sa.Column("deadline", sa.Double()),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("seconds", sa.Double()),
        sa.Column("result", sa.Text()),
    )
    op.create_index(
        "checks_due", "checks", ["state", "created"], sqlite_where=DUE, postgresql_where=DUE
    )
    op.create_index("checks_by_lease", "checks", ["lease"])


def _count(name: str, kind: sa.BigInteger | sa.Double[float]) -> sa.Column[float]:
    return sa.Column(name, kind, nullable=False, server_default="0")


def _flag(name: str) -> sa.Column[bool]:
    return sa.Column(name, sa.Boolean(), nullable=False, server_default=sa.false())
