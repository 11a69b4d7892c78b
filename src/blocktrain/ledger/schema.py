"""The ledger's tables, for SQLite and PostgreSQL alike. Times are seconds since 1970."""

from collections.abc import Collection
from typing import Literal

from sqlalchemy import (
    BigInteger,
    BindParameter,
    Boolean,
    Column,
    ColumnElement,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    bindparam,
    literal_column,
    or_,
    text,
)

metadata = MetaData()

LeaseStatus = Literal["open", "sending", "submitted", "returned", "expired"]
UpdateStatus = Literal["offered", "pending", "merged", "refused"]

# Finished leases and updates only grow in number, so the indexes hold the others alone.
HELD: tuple[LeaseStatus, ...] = ("open", "sending")  # a worker holds the lease
LIVE: tuple[UpdateStatus, ...] = ("offered", "pending")  # the update's chunks are still needed

# Parameters of statements. None has the name of a column, which a statement may set as well.
the_block: BindParameter[int] = bindparam("the_block")
the_lease: BindParameter[str] = bindparam("the_lease")
the_worker: BindParameter[str] = bindparam("the_worker")


def in_state(table: Table, *states: str) -> ColumnElement[bool]:
    """A condition with the states as literals: with parameters no plan uses the partial indexes."""
    return or_(*(table.c.state == literal_column(f"'{state}'") for state in states))


def _index_of(name: str, states: Collection[str], *columns: str) -> Index:
    """An index of the rows in these states."""
    rows = text(" OR ".join(f"state = '{state}'" for state in states))
    return Index(name, *columns, sqlite_where=rows, postgresql_where=rows)


# One row: a ledger holds one run.
runs = Table(
    "runs",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("config", Text, nullable=False),
    Column("corpus", Text, nullable=False),  # JSON: split -> blob and digest
    Column("token_secret", LargeBinary, nullable=False),
    Column("authority_certificate", Text, nullable=False),
    Column("authority_key", Text, nullable=False),
    Column("created", Double, nullable=False),
    Column("finished", Double),
)

blocks = Table(
    "blocks",
    metadata,
    Column("block", Integer, primary_key=True, autoincrement=False),
    Column("version", Integer, nullable=False),
    Column("merged_batches", BigInteger, nullable=False),
    Column("next_batch", BigInteger, nullable=False),  # the first that was never handed out
    Column("total_batches", BigInteger, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("leases_met", BigInteger, nullable=False),
    Column("leases_missed", BigInteger, nullable=False),
    Column("merging_until", Double, nullable=False),  # until then a coordinator says it is merging
)

versions = Table(
    "versions",
    metadata,
    Column("block", Integer, ForeignKey("blocks.block"), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("weights", String(64), nullable=False),
    Column("weights_size", BigInteger, nullable=False),
    Column("velocity", String(64)),
    Column("velocity_size", BigInteger),
    Column("owed", String(64)),  # the residual: what its compression left out
    Column("owed_size", BigInteger),
    Column("merged_batches", BigInteger, nullable=False),
    Column("created", Double, nullable=False),
)

# The delta that leads to a version from the one before; it may outlive the version.
differences = Table(
    "differences",
    metadata,
    Column("block", Integer, ForeignKey("blocks.block"), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("name", String(64), nullable=False),
    Column("size", BigInteger, nullable=False),
)

# Blobs of forgotten versions and deltas, kept for workers that still fetch them.
retired = Table(
    "retired",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("since", Double, nullable=False),
    Column("until", Double, nullable=False),
)

workers = Table(
    "workers",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("public_key", String(128), nullable=False, unique=True),
    Column("name", String(80), nullable=False),
    Column("device", String(80), nullable=False),
    Column("role", String(16), nullable=False),
    Column("joined", Double, nullable=False),
    Column("seen", Double, nullable=False),
    Column("banned", Boolean, nullable=False),
    Column("batches_merged", BigInteger, nullable=False),
    Column("updates_merged", BigInteger, nullable=False),
    Column(
        "invite", String(64)
    ),  # that it joined with; null if it joined before this column was added
)

invites = Table(
    "invites",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("secret_hash", String(64), nullable=False, unique=True),
    Column("role", String(16), nullable=False),
    Column("uses_left", Integer, nullable=False),
    Column("expires", Double, nullable=False),
    Column("revoked", Boolean, nullable=False),
)

# open -> sending -> submitted; until then also -> returned | expired;  expired -> returned
leases = Table(
    "leases",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("worker", String(64), ForeignKey("workers.id"), nullable=False),
    Column("block", Integer, ForeignKey("blocks.block"), nullable=False),
    Column("base_version", Integer, nullable=False),
    Column("first_batch", BigInteger, nullable=False),
    Column("steps", Integer, nullable=False),
    Column("schedule_start", BigInteger, nullable=False),
    Column("schedule_stride", Integer, nullable=False),
    Column("continues", String(64)),  # the lease from whose end it is trained on
    Column("fence", BigInteger, nullable=False),
    Column("deadline", Double, nullable=False),
    Column("expected", Double),  # when its update is expected, by its worker's speed
    Column("state", String(16), nullable=False),
    Column("created", Double, nullable=False),
    _index_of("leases_by_worker", HELD, "worker", "state"),
    _index_of("leases_by_deadline", HELD, "state", "deadline"),
    _index_of("leases_expired", ("expired",), "worker", "deadline"),
)

# Returned ranges of batches: handed out again before new ones.
gaps = Table(
    "gaps",
    metadata,
    Column("block", Integer, ForeignKey("blocks.block"), primary_key=True),
    Column("first_batch", BigInteger, primary_key=True),
    Column("steps", Integer, nullable=False),
)

# offered -> pending | refused;  pending -> merged
updates = Table(
    "updates",
    metadata,
    Column("lease", String(64), ForeignKey("leases.id"), primary_key=True),
    Column("worker", String(64), nullable=False),
    Column("block", Integer, nullable=False),
    Column("base_version", Integer, nullable=False),
    Column("steps", Integer, nullable=False),
    Column("offer", Text, nullable=False),  # JSON of the signed claim
    Column("signature", String(128), nullable=False),
    Column("state", String(16), nullable=False),
    Column("reason", String(500), nullable=False),
    Column("weight", Double, nullable=False),
    Column("loss", Double),
    Column("committed", Double),
    Column("merged_into", Integer),
    Column("downloads", Text),  # JSON: what the worker reported to have downloaded
    Column("continues", String(64)),  # as in its lease, for requests that read all updates
    _index_of("updates_by_state", LIVE, "state", "worker"),
)

# Bytes moved between a worker and the run, by block: `protocol.messages.Moved`.
traffic = Table(
    "traffic",
    metadata,
    Column("worker", String(64), ForeignKey("workers.id"), primary_key=True),
    Column("block", Integer, ForeignKey("blocks.block"), primary_key=True),
    Column("up", BigInteger, nullable=False),
    Column("up_raw", BigInteger, nullable=False),
    Column("down_whole", BigInteger, nullable=False),
    Column("down_differences", BigInteger, nullable=False),
    Column("down_raw", BigInteger, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column(
        "number", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True
    ),
    Column("time", Double, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("worker", String(64)),
    Column("block", Integer),
    Column("detail", String(500), nullable=False),
)

scores = Table(
    "scores",
    metadata,
    Column(
        "number", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True
    ),
    Column("block", Integer),  # null: the assembled model
    Column("versions", Text, nullable=False),  # JSON
    Column("split", String(8), nullable=False),
    Column("windows", String(64), nullable=False),
    Column("ce", Double, nullable=False),
    Column("worker", String(64), nullable=False),
    Column("time", Double, nullable=False),
)
