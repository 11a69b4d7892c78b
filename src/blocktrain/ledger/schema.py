"""The ledger's tables, for SQLite and PostgreSQL, and their rows as typed values.

A table with a row class has a column for each field; fields that may be None are nullable. Times
are seconds since 1970.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

from sqlalchemy import (
    BigInteger,
    BindParameter,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    DefaultClause,
    Double,
    Executable,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    bindparam,
    false,
    literal_column,
    or_,
    text,
)

from blocktrain.protocol.messages import Blob, Role
from blocktrain.protocol.page_messages import Control
from blocktrain.protocol.status_messages import Moved

metadata = MetaData()

LeaseStatus = Literal["open", "sending", "submitted", "returned", "expired"]
UpdateStatus = Literal["offered", "pending", "merged", "refused"]
CheckMethod = Literal["score", "replay"]
CheckStatus = Literal["hidden", "waiting", "assigned", "done"]

# Partial indexes contain only these states, since finished leases and updates grow in number.
ACTIVE: tuple[LeaseStatus, ...] = ("open", "sending")  # a worker holds the lease
LIVE: tuple[UpdateStatus, ...] = ("offered", "pending")  # the update's chunks are still needed
DUE: tuple[CheckStatus, ...] = ("hidden", "waiting", "assigned")  # the check has no result yet

# Parameters of statements. Their names differ from columns', which statements may set as well.
the_block: BindParameter[int] = bindparam("the_block")
the_lease: BindParameter[str] = bindparam("the_lease")
the_worker: BindParameter[str] = bindparam("the_worker")
the_check: BindParameter[str] = bindparam("the_check")


def in_state(table: Table, *states: str) -> ColumnElement[bool]:
    """A condition with states as literals: with parameters, no plan would use a partial index."""
    return or_(*(table.c.state == literal_column(f"'{state}'") for state in states))


def _index_of(name: str, states: Collection[str], *columns: str) -> Index:
    """An index of the rows in these states."""
    rows = text(" OR ".join(f"state = '{state}'" for state in states))
    return Index(name, *columns, sqlite_where=rows, postgresql_where=rows)


# Column types that Python's types do not distinguish.
Id = Annotated[str, String(64)]
Long = Annotated[int, BigInteger()]
Number = Annotated[int, BigInteger().with_variant(Integer, "sqlite")]  # assigned by the database
# Columns that a migration adds have their default in the database, where it fills older rows.
Added = Annotated[int, BigInteger(), DefaultClause("0")]
AddedReal = Annotated[float, Double(), DefaultClause("0")]
AddedFlag = Annotated[bool, Boolean(), DefaultClause(false())]
TYPES = {str: Text, int: Integer, float: Double, bool: Boolean, bytes: LargeBinary}


def _table(row: type, name: str, key: str, *constraints: Index | UniqueConstraint) -> Table:
    """A table for a row class, with the column `key` as its primary key."""
    columns = []
    for field, hint in get_type_hints(row, include_extras=True).items():
        nullable = type(None) in get_args(hint)
        python_type = get_args(hint)[0] if nullable else hint
        details = get_args(python_type)[1:] or (TYPES[python_type],)
        columns.append(
            Column(
                field,
                *details,
                primary_key=field == key,
                nullable=nullable,
                autoincrement=field == key == "number",  # the program assigns other keys
            )
        )
    return Table(name, metadata, *columns, *constraints)


@dataclass(frozen=True, kw_only=True)
class RunRow:
    id: Id
    config: str
    corpus: str  # JSON: split -> blob, digest and, unless tokens are bytes, bytes of text
    tokenizer: str | None = None  # JSON: file name -> blob; null: tokens are bytes
    token_secret: bytes
    authority_certificate: str
    authority_key: str
    created: float
    finished: float | None = None
    requires_checks: AddedFlag = False  # updates are merged only once validators have checked them
    control: Annotated[Control, String(16), DefaultClause("running")] = "running"
    extended: float | None = None  # when it was last extended


@dataclass(frozen=True, kw_only=True)
class BlockRow:
    block: int
    version: int = 0
    merged_batches: Long = 0
    next_batch: Long = 0  # the first batch that was never leased
    total_batches: Long
    fence: Long = 0
    leases_met: Long = 0
    leases_missed: Long = 0
    merging_until: float = 0.0  # when a coordinator's claim on the next merge ends
    rolled_back: AddedReal = 0.0  # when its last automatic rollback began


@dataclass(frozen=True, kw_only=True)
class WorkerRow:
    id: Id
    public_key: Annotated[str, String(128)]
    name: Annotated[str, String(80)]
    device: Annotated[str, String(80)]
    role: Annotated[Role, String(16)]
    joined: float
    seen: float
    banned: bool = False
    batches_merged: Long = 0
    updates_merged: Long = 0
    invite: Id | None = None  # the invite that it used; null in ledgers older than the column
    accepted: Added = 0  # updates that passed their checks
    refused: Added = 0  # updates that failed a check
    refused_in_a_row: Added = 0
    excluded: AddedFlag = False  # gets no leases and no checks any more
    excluded_until: float | None = None  # gets no leases before this time
    suspicion: AddedReal = 0.0  # evidence that it is dishonest: a log likelihood ratio, 0 or more
    unexplained: AddedReal = 0.0  # evidence that it hides how it trained; only replays lower it
    replayed: Added = 0  # checks by replay that agreed with its updates
    speed: float | None = None  # steps per second of its fastest update that passed its checks
    checks: Added = 0  # checks that it has done as a validator
    check_seconds: AddedReal = 0.0  # time it has spent on checks
    train_seconds: AddedReal = 0.0  # time its settled leases have lasted


@dataclass(frozen=True, kw_only=True)
class InviteRow:
    id: Id
    secret_hash: Id
    role: Annotated[Role, String(16)]
    uses_left: int
    expires: float
    revoked: bool = False


@dataclass(frozen=True, kw_only=True)
class LeaseRow:
    """A lease. States: open -> sending -> submitted; open, sending -> returned | expired; expired
    -> returned."""

    id: Id
    worker: Annotated[str, String(64), ForeignKey("workers.id")]
    block: Annotated[int, Integer, ForeignKey("blocks.block")]
    base_version: int
    first_batch: Long
    steps: int
    schedule_start: Long
    schedule_stride: int
    continues: Id | None = None  # the lease whose end it starts from
    fence: Long
    deadline: float
    expected: float | None = None  # when its update is expected, at its worker's speed
    state: Annotated[LeaseStatus, String(16)] = "open"
    created: float


@dataclass(frozen=True, kw_only=True)
class UpdateRow:
    """An update. States: offered -> pending | refused; pending -> merged | refused; merged ->
    refused, if it is removed from its block again."""

    lease: Annotated[str, String(64), ForeignKey("leases.id")]
    worker: Id
    block: int
    base_version: int
    steps: int
    offer: str  # JSON of the signed claim
    signature: Annotated[str, String(128)]
    state: Annotated[UpdateStatus, String(16)] = "offered"
    reason: Annotated[str, String(500)] = ""
    weight: float = 0.0
    loss: float | None = None
    committed: float | None = None
    merged_into: int | None = None
    downloads: str | None = None  # JSON: downloads that the worker reported
    continues: Id | None = None  # as in its lease; a copy for requests that read all updates
    norms: str | None = None  # JSON of a Move (swarm/bounds.py); as merged, once it is
    gain: float | None = None  # nats per token by which it lowers the loss on hidden text
    own_gain: float | None = None  # the same on the text of its lease
    checked: AddedFlag = False  # its checks are done, and it counts
    clip: float | None = None  # the smallest factor by which a tensor of its change was scaled
    merged_as: str | None = None  # JSON of how it was merged (coordinator/merger.py)
    removed_in: int | None = None  # the first version from which it was removed again


@dataclass(frozen=True, kw_only=True)
class CheckRow:
    """A check of an update by a validator. States: hidden -> waiting (the update's worker has sent
    the files that a replay needs) -> assigned -> done; assigned -> waiting, if its validator does
    not answer in time."""

    id: Id
    lease: Annotated[str, String(64), ForeignKey("leases.id")]
    method: Annotated[CheckMethod, String(16)]
    state: Annotated[CheckStatus, String(16)] = "waiting"
    segment: int | None = None  # of the lease, to replay
    validator: Id | None = None
    version: int | None = None  # of the block, that a score compares the update with
    deadline: float | None = None  # of the validator, or of the worker that sends files
    created: float
    seconds: float | None = None  # that the validator has spent
    result: str | None = None  # JSON


@dataclass(frozen=True, kw_only=True)
class ScoreRow:
    number: Number
    block: int | None  # null: the assembled model
    versions: str  # JSON
    split: Annotated[str, String(8)]
    windows: Id
    ce: float
    worker: Id
    time: float


runs = _table(RunRow, "runs", "id")  # one row: a ledger has one run
blocks = _table(BlockRow, "blocks", "block")
workers = _table(WorkerRow, "workers", "id", UniqueConstraint("public_key"))
invites = _table(InviteRow, "invites", "id", UniqueConstraint("secret_hash"))
leases = _table(
    LeaseRow,
    "leases",
    "id",
    _index_of("leases_by_worker", ACTIVE, "worker", "state"),
    _index_of("leases_by_deadline", ACTIVE, "state", "deadline"),
    _index_of("leases_expired", ("expired",), "worker", "deadline"),
)
SCORED, REMOVED = text("gain IS NOT NULL"), text("removed_in IS NOT NULL")
updates = _table(
    UpdateRow,
    "updates",
    "lease",
    _index_of("updates_by_state", LIVE, "state", "worker"),
    _index_of("updates_merged", ("merged",), "block", "merged_into"),
    Index("updates_scored", "committed", sqlite_where=SCORED, postgresql_where=SCORED),
    Index("updates_removed", "block", sqlite_where=REMOVED, postgresql_where=REMOVED),
)
checks = _table(
    CheckRow,
    "checks",
    "id",
    _index_of("checks_due", DUE, "state", "created"),
    Index("checks_by_lease", "lease"),
)
scores = _table(ScoreRow, "scores", "number")

versions = Table(
    "versions",
    metadata,
    Column("block", Integer, ForeignKey("blocks.block"), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("weights", String(64), nullable=False),
    Column("weights_size", BigInteger, nullable=False),
    Column("velocity", String(64)),
    Column("velocity_size", BigInteger),
    Column("owed", String(64)),  # the residual: what its delta left out
    Column("owed_size", BigInteger),
    Column("merged_batches", BigInteger, nullable=False),
    Column("created", Double, nullable=False),
)

# The delta from the version before to a version. It may outlive the version.
differences = Table(
    "differences",
    metadata,
    Column("block", Integer, ForeignKey("blocks.block"), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("name", String(64), nullable=False),
    Column("size", BigInteger, nullable=False),
)

# Blobs of deleted versions and deltas, kept for workers that are still downloading them.
retired = Table(
    "retired",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("since", Double, nullable=False),
    Column("until", Double, nullable=False),
)

# Returned ranges of batches, which are leased again before new ones.
gaps = Table(
    "gaps",
    metadata,
    Column("block", Integer, ForeignKey("blocks.block"), primary_key=True),
    Column("first_batch", BigInteger, primary_key=True),
    Column("steps", Integer, nullable=False),
)

# Bytes moved between a worker and the run, by block.
traffic = Table(
    "traffic",
    metadata,
    Column("worker", String(64), ForeignKey("workers.id"), primary_key=True),
    Column("block", Integer, ForeignKey("blocks.block"), primary_key=True),
    *(Column(count, BigInteger, nullable=False) for count in Moved.model_fields),
)

# Batches of a block that a worker has trained, of updates that passed their checks.
trained = Table(
    "trained",
    metadata,
    Column("worker", String(64), ForeignKey("workers.id"), primary_key=True),
    Column("block", Integer, ForeignKey("blocks.block"), primary_key=True),
    Column("steps", BigInteger, nullable=False),
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


@dataclass(frozen=True, kw_only=True)
class Version:
    """A row of `versions`, with names and sizes combined to blobs."""

    block: int
    version: int
    weights: Blob
    velocity: Blob | None = None
    residual: Blob | None = None  # what its delta left out
    merged_batches: int
    created: float


Row = TypeVar("Row")


class Statements:
    """Base class of the ledger's statements, by table."""

    def __init__(self, connection: Connection, *, locked: bool = False) -> None:
        """`locked`: the transaction began by taking the lock of these statements."""
        self.connection, self._locked = connection, locked

    def lock_by(self, statement: Executable) -> None:
        """Take this lock: until this transaction ends, no other can take it."""
        if not self._locked:
            self.connection.execute(statement)
            self._locked = True

    def rows(self, row: type[Row], statement: Executable, **parameters: Any) -> list[Row]:
        result = self.connection.execute(statement, parameters)
        return [row(**columns) for columns in result.mappings()]

    def first(self, row: type[Row], statement: Executable, **parameters: Any) -> Row | None:
        columns = self.connection.execute(statement, parameters).mappings().first()
        return row(**columns) if columns is not None else None

    def write(self, statement: Executable, **parameters: Any) -> int:
        """Execute a statement that writes. Returns the number of changed rows."""
        return self.connection.execute(statement, parameters).rowcount
