"""The ledger's rows as typed values. Each field has the name of its column in `schema`."""

from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection, Executable

from blocktrain.ledger.schema import LeaseStatus, UpdateStatus
from blocktrain.protocol.messages import Blob, Role

Row = TypeVar("Row")


@dataclass(frozen=True, kw_only=True)
class RunRow:
    id: str
    config: str
    corpus: str
    token_secret: bytes
    authority_certificate: str
    authority_key: str
    created: float
    finished: float | None = None


@dataclass(frozen=True, kw_only=True)
class BlockRow:
    block: int
    version: int = 0
    merged_batches: int = 0
    next_batch: int = 0
    total_batches: int
    fence: int = 0
    leases_met: int = 0
    leases_missed: int = 0
    merging_until: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LeaseRow:
    id: str
    worker: str
    block: int
    base_version: int
    first_batch: int
    steps: int
    schedule_start: int
    schedule_stride: int
    continues: str | None = None
    fence: int
    deadline: float
    expected: float | None = None
    state: LeaseStatus = "open"
    created: float


@dataclass(frozen=True, kw_only=True)
class UpdateRow:
    lease: str
    worker: str
    block: int
    base_version: int
    steps: int
    offer: str
    signature: str
    state: UpdateStatus = "offered"
    reason: str = ""
    weight: float = 0.0
    loss: float | None = None
    committed: float | None = None
    merged_into: int | None = None
    downloads: str | None = None
    continues: str | None = None


@dataclass(frozen=True, kw_only=True)
class Version:
    """A row of `versions`, its names and sizes joined to blobs."""

    block: int
    version: int
    weights: Blob
    velocity: Blob | None = None
    residual: Blob | None = None  # what the compression of its delta left out
    merged_batches: int
    created: float


@dataclass(frozen=True, kw_only=True)
class WorkerRow:
    id: str
    public_key: str
    name: str
    device: str
    role: Role
    joined: float
    seen: float
    banned: bool = False
    batches_merged: int = 0
    updates_merged: int = 0
    invite: str | None = None


@dataclass(frozen=True, kw_only=True)
class InviteRow:
    id: str
    secret_hash: str
    role: Role
    uses_left: int
    expires: float
    revoked: bool = False


@dataclass(frozen=True, kw_only=True)
class ScoreRow:
    number: int
    block: int | None
    versions: str
    split: str
    windows: str
    ce: float
    worker: str
    time: float


class Statements:
    """Base of the classes that hold the ledger's statements, by table."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def rows(self, row: type[Row], statement: Executable, **parameters: Any) -> list[Row]:
        result = self.connection.execute(statement, parameters)
        return [row(**columns) for columns in result.mappings()]

    def first(self, row: type[Row], statement: Executable, **parameters: Any) -> Row | None:
        columns = self.connection.execute(statement, parameters).mappings().first()
        return row(**columns) if columns is not None else None

    def write(self, statement: Executable, **parameters: Any) -> int:
        """The number of rows that were changed."""
        return self.connection.execute(statement, parameters).rowcount
