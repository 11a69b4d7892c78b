"""The schema of the first release. Numbers up to 0009 were used before it"""

from alembic import op
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKeyConstraint,
    Integer,
    LargeBinary,
    PrimaryKeyConstraint,
    String,
    Text,
    UniqueConstraint,
    text,
)

revision = "0010"
down_revision = None
branch_labels = None
depends_on = None

NUMBER = BigInteger().with_variant(Integer(), "sqlite")
HELD = "state = 'open' OR state = 'sending'"
LIVE = "state = 'offered' OR state = 'pending'"


def upgrade() -> None:
    op.create_table(
        "runs",
        Column("id", String(64), nullable=False),
        Column("config", Text(), nullable=False),
        Column("corpus", Text(), nullable=False),
        Column("token_secret", LargeBinary(), nullable=False),
        Column("authority_certificate", Text(), nullable=False),
        Column("authority_key", Text(), nullable=False),
        Column("created", Double(), nullable=False),
        Column("finished", Double()),
        PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "blocks",
        Column("block", Integer(), autoincrement=False, nullable=False),
        Column("version", Integer(), nullable=False),
        Column("merged_batches", BigInteger(), nullable=False),
        Column("next_batch", BigInteger(), nullable=False),
        Column("total_batches", BigInteger(), nullable=False),
        Column("fence", BigInteger(), nullable=False),
        Column("leases_met", BigInteger(), nullable=False),
        Column("leases_missed", BigInteger(), nullable=False),
        Column("merging_until", Double(), nullable=False),
        PrimaryKeyConstraint("block"),
    )
    op.create_table(
        "versions",
        Column("block", Integer(), nullable=False),
        Column("version", Integer(), nullable=False),
        Column("weights", String(64), nullable=False),
        Column("weights_size", BigInteger(), nullable=False),
        Column("velocity", String(64)),
        Column("velocity_size", BigInteger()),
        Column("owed", String(64)),
        Column("owed_size", BigInteger()),
        Column("merged_batches", BigInteger(), nullable=False),
        Column("created", Double(), nullable=False),
        ForeignKeyConstraint(["block"], ["blocks.block"]),
        PrimaryKeyConstraint("block", "version"),
    )
    op.create_table(
        "differences",
        Column("block", Integer(), nullable=False),
        Column("version", Integer(), nullable=False),
        Column("name", String(64), nullable=False),
        Column("size", BigInteger(), nullable=False),
        ForeignKeyConstraint(["block"], ["blocks.block"]),
        PrimaryKeyConstraint("block", "version"),
    )
    op.create_table(
        "retired",
        Column("name", String(64), nullable=False),
        Column("since", Double(), nullable=False),
        Column("until", Double(), nullable=False),
        PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "workers",
        Column("id", String(64), nullable=False),
        Column("public_key", String(128), nullable=False),
        Column("name", String(80), nullable=False),
        Column("device", String(80), nullable=False),
        Column("role", String(16), nullable=False),
        Column("joined", Double(), nullable=False),
        Column("seen", Double(), nullable=False),
        Column("banned", Boolean(), nullable=False),
        Column("batches_merged", BigInteger(), nullable=False),
        Column("updates_merged", BigInteger(), nullable=False),
        Column("invite", String(64)),
        PrimaryKeyConstraint("id"),
        UniqueConstraint("public_key"),
    )
    op.create_table(
        "invites",
        Column("id", String(64), nullable=False),
        Column("secret_hash", String(64), nullable=False),
        Column("role", String(16), nullable=False),
        Column("uses_left", Integer(), nullable=False),
        Column("expires", Double(), nullable=False),
        Column("revoked", Boolean(), nullable=False),
        PrimaryKeyConstraint("id"),
        UniqueConstraint("secret_hash"),
    )
    op.create_table(
        "leases",
        Column("id", String(64), nullable=False),
        Column("worker", String(64), nullable=False),
        Column("block", Integer(), nullable=False),
        Column("base_version", Integer(), nullable=False),
        Column("first_batch", BigInteger(), nullable=False),
        Column("steps", Integer(), nullable=False),
        Column("schedule_start", BigInteger(), nullable=False),
        Column("schedule_stride", Integer(), nullable=False),
        Column("continues", String(64)),
        Column("fence", BigInteger(), nullable=False),
        Column("deadline", Double(), nullable=False),
        Column("expected", Double()),
        Column("state", String(16), nullable=False),
        Column("created", Double(), nullable=False),
        ForeignKeyConstraint(["worker"], ["workers.id"]),
        ForeignKeyConstraint(["block"], ["blocks.block"]),
        PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "gaps",
        Column("block", Integer(), nullable=False),
        Column("first_batch", BigInteger(), nullable=False),
        Column("steps", Integer(), nullable=False),
        ForeignKeyConstraint(["block"], ["blocks.block"]),
        PrimaryKeyConstraint("block", "first_batch"),
    )
    op.create_table(
        "updates",
        Column("lease", String(64), nullable=False),
        Column("worker", String(64), nullable=False),
        Column("block", Integer(), nullable=False),
        Column("base_version", Integer(), nullable=False),
        Column("steps", Integer(), nullable=False),
        Column("offer", Text(), nullable=False),
        Column("signature", String(128), nullable=False),
        Column("state", String(16), nullable=False),
        Column("reason", String(500), nullable=False),
        Column("weight", Double(), nullable=False),
        Column("loss", Double()),
        Column("committed", Double()),
        Column("merged_into", Integer()),
        Column("downloads", Text()),
        Column("continues", String(64)),
        ForeignKeyConstraint(["lease"], ["leases.id"]),
        PrimaryKeyConstraint("lease"),
    )
    op.create_table(
        "traffic",
        Column("worker", String(64), nullable=False),
        Column("block", Integer(), nullable=False),
        Column("up", BigInteger(), nullable=False),
        Column("up_raw", BigInteger(), nullable=False),
        Column("down_whole", BigInteger(), nullable=False),
        Column("down_differences", BigInteger(), nullable=False),
        Column("down_raw", BigInteger(), nullable=False),
        ForeignKeyConstraint(["worker"], ["workers.id"]),
        ForeignKeyConstraint(["block"], ["blocks.block"]),
        PrimaryKeyConstraint("worker", "block"),
    )
    op.create_table(
        "events",
        Column("number", NUMBER, autoincrement=True, nullable=False),
        Column("time", Double(), nullable=False),
        Column("kind", String(16), nullable=False),
        Column("worker", String(64)),
        Column("block", Integer()),
        Column("detail", String(500), nullable=False),
        PrimaryKeyConstraint("number"),
    )
    op.create_table(
        "scores",
        Column("number", NUMBER, autoincrement=True, nullable=False),
        Column("block", Integer()),
        Column("versions", Text(), nullable=False),
        Column("split", String(8), nullable=False),
        Column("windows", String(64), nullable=False),
        Column("ce", Double(), nullable=False),
        Column("worker", String(64), nullable=False),
        Column("time", Double(), nullable=False),
        PrimaryKeyConstraint("number"),
    )
    _index("leases_by_worker", "leases", ["worker", "state"], HELD)
    _index("leases_by_deadline", "leases", ["state", "deadline"], HELD)
    _index("leases_expired", "leases", ["worker", "deadline"], "state = 'expired'")
    _index("updates_by_state", "updates", ["state", "worker"], LIVE)


def _index(name: str, table: str, columns: list[str], rows: str) -> None:
    op.create_index(name, table, columns, sqlite_where=text(rows), postgresql_where=text(rows))
