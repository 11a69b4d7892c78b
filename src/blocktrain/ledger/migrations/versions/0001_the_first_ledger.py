"""The first ledger"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "blocks",
        sa.Column("block", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("merged_batches", sa.BigInteger(), nullable=False),
        sa.Column("next_batch", sa.BigInteger(), nullable=False),
        sa.Column("total_batches", sa.BigInteger(), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("leases_given", sa.BigInteger(), nullable=False),
        sa.Column("leases_met", sa.BigInteger(), nullable=False),
        sa.Column("leases_missed", sa.BigInteger(), nullable=False),
        sa.Column("merging_until", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("block"),
    )
    op.create_table(
        "events",
        sa.Column(
            "number",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("worker", sa.String(length=64), nullable=True),
        sa.Column("block", sa.Integer(), nullable=True),
        sa.Column("detail", sa.String(length=500), nullable=False),
        sa.PrimaryKeyConstraint("number"),
    )
    op.create_table(
        "invites",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("secret_hash", sa.String(length=64), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("uses_left", sa.Integer(), nullable=False),
        sa.Column("expires", sa.Double(), nullable=False),
        sa.Column("revoked", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("secret_hash"),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("corpus", sa.Text(), nullable=False),
        sa.Column("token_secret", sa.LargeBinary(), nullable=False),
        sa.Column("authority_certificate", sa.Text(), nullable=False),
        sa.Column("authority_key", sa.Text(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("finished", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "scores",
        sa.Column(
            "number",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("block", sa.Integer(), nullable=True),
        sa.Column("versions", sa.Text(), nullable=False),
        sa.Column("split", sa.String(length=8), nullable=False),
        sa.Column("windows", sa.String(length=64), nullable=False),
        sa.Column("ce", sa.Double(), nullable=False),
        sa.Column("worker", sa.String(length=64), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("number"),
    )
    op.create_table(
        "workers",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("public_key", sa.String(length=128), nullable=False),
        sa.Column("name", sa.String(length=80), nullable=False),
        sa.Column("device", sa.String(length=80), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("joined", sa.Double(), nullable=False),
        sa.Column("seen", sa.Double(), nullable=False),
        sa.Column("banned", sa.Boolean(), nullable=False),
        sa.Column("batches_merged", sa.BigInteger(), nullable=False),
        sa.Column("updates_merged", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("public_key"),
    )
    op.create_table(
        "gaps",
        sa.Column("block", sa.Integer(), nullable=False),
        sa.Column("first_batch", sa.BigInteger(), nullable=False),
        sa.Column("steps", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["block"],
            ["blocks.block"],
        ),
        sa.PrimaryKeyConstraint("block", "first_batch"),
    )
    op.create_table(
        "leases",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("worker", sa.String(length=64), nullable=False),
        sa.Column("block", sa.Integer(), nullable=False),
        sa.Column("base_version", sa.Integer(), nullable=False),
        sa.Column("first_batch", sa.BigInteger(), nullable=False),
        sa.Column("steps", sa.Integer(), nullable=False),
        sa.Column("schedule_start", sa.BigInteger(), nullable=False),
        sa.Column("schedule_stride", sa.Integer(), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("deadline", sa.Double(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["block"],
            ["blocks.block"],
        ),
        sa.ForeignKeyConstraint(
            ["worker"],
            ["workers.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("leases_by_block", "leases", ["block", "state"], unique=False)
    op.create_index("leases_by_deadline", "leases", ["state", "deadline"], unique=False)
    op.create_index("leases_by_worker", "leases", ["worker", "state"], unique=False)
    op.create_table(
        "versions",
        sa.Column("block", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("weights", sa.String(length=64), nullable=False),
        sa.Column("weights_size", sa.BigInteger(), nullable=False),
        sa.Column("velocity", sa.String(length=64), nullable=True),
        sa.Column("velocity_size", sa.BigInteger(), nullable=True),
        sa.Column("merged_batches", sa.BigInteger(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["block"],
            ["blocks.block"],
        ),
        sa.PrimaryKeyConstraint("block", "version"),
    )
    op.create_table(
        "updates",
        sa.Column("lease", sa.String(length=64), nullable=False),
        sa.Column("worker", sa.String(length=64), nullable=False),
        sa.Column("block", sa.Integer(), nullable=False),
        sa.Column("base_version", sa.Integer(), nullable=False),
        sa.Column("steps", sa.Integer(), nullable=False),
        sa.Column("offer", sa.Text(), nullable=False),
        sa.Column("signature", sa.String(length=128), nullable=False),
        sa.Column("blob", sa.String(length=64), nullable=True),
        sa.Column("blob_size", sa.BigInteger(), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.String(length=500), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("committed", sa.Double(), nullable=True),
        sa.Column("merged_into", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(
            ["lease"],
            ["leases.id"],
        ),
        sa.PrimaryKeyConstraint("lease"),
    )
    op.create_index("updates_by_block", "updates", ["block", "state"], unique=False)
    op.create_index("updates_by_worker", "updates", ["worker", "state"], unique=False)
