"""Messages about the state of a run: scores, events, and the status of blocks and workers."""

from operator import not_
from typing import Literal

from pydantic import Field

from blocktrain.protocol.messages import (
    Blob,
    BlockIndex,
    Codec,
    Count,
    Downloads,
    Identifier,
    Message,
    Positive,
    Reason,
    Role,
    Split,
    StoredName,
    Total,
)

MOST_CE = 1e6  # in nats per byte; a model that scores worse has diverged
WorkerState = Literal[
    "training", "checking", "waiting", "paused", "away", "lost", "excluded", "banned"
]

EventKind = Literal[
    "joined", "leased", "returned", "uploaded", "merged", "late", "refused", "lost", "scored",
    "banned", "finished", "checked", "clipped", "excluded", "unmerged", "paused", "resumed",
    "draining", "extended", "invited", "revoked",
]  # fmt: skip


class Score(Message):
    """A cross entropy of one block, or of the assembled model if `block` is null."""

    block: BlockIndex | None
    versions: tuple[Count, ...] = Field(max_length=4096)
    split: Split
    windows: Identifier
    ce: float = Field(ge=0, le=MOST_CE)
    downloads: Downloads = ()


class Moved(Message):
    """Bytes of updates (up) and of versions (down, whole or as deltas). `up_raw` and `down_raw`:
    what the same updates and versions would take as whole fp32 blocks."""

    up: Total = 0
    up_raw: Total = 0
    down_whole: Total = 0
    down_differences: Total = 0
    down_raw: Total = 0


class BlockStatus(Message):
    """The state of one block."""

    index: BlockIndex
    version: Count
    weights: Blob
    ce: float | None
    ce_note: Reason = ""
    bytes_trained: Count
    progress: float  # share of the run's batches that are merged
    replicas: Count  # workers with a lease or an unmerged update of the block
    # Share of leases met in time; returned leases do not count; None: none has ended yet.
    participation: float | None
    pending_updates: Count
    removed_updates: Count = Field(default=0, exclude_if=not_)  # merged, and removed again
    moved: Moved
    steps_lost: Total = Field(default=0, exclude_if=not_)  # with expired leases


class Trust(Message):
    """What the checks of a worker's updates have found. `replayed`: replays that agreed with it.
    At a suspicion of 10 a worker is excluded. `newcomer`: its updates count less than others."""

    accepted: Total
    refused: Total
    replayed: Total
    suspicion: float
    newcomer: bool


class WorkerStatus(Message):
    """The state of one worker. `trust` is left out if the run has no checks; `lease_steps` and
    `seconds_left` if the worker has no lease."""

    worker: Identifier
    name: StoredName
    role: Role
    device: StoredName
    block: BlockIndex | None
    state: WorkerState
    bytes_trained: Count
    updates: Count
    seconds_since_seen: float
    moved: Moved
    trust: Trust | None = Field(default=None, exclude_if=not_)
    lease_steps: Count | None = Field(default=None, exclude_if=not_)
    seconds_left: float | None = Field(default=None, exclude_if=lambda seconds: seconds is None)


class Checking(Message):
    """The checks of a run. `share`: their time, relative to that of the training they have checked;
    null: none yet. `waiting`: updates that are not checked yet. `scored`: the versions of all
    blocks in the newest score of the assembled model; empty: none yet."""

    share: float | None
    validators: Total
    waiting: Total
    note: Reason = ""
    scored: tuple[Count, ...] = ()


class Status(Message):
    """The state of a run. `checking` is left out if the run has no checks."""

    run: Identifier
    state: Literal["running", "finished"]
    ce: float | None  # of the assembled model
    ce_note: Reason = ""
    codec: Codec
    blocks: tuple[BlockStatus, ...]
    workers: tuple[WorkerStatus, ...]
    seconds: float
    checking: Checking | None = Field(default=None, exclude_if=not_)


class Event(Message):
    """Something that happened in the run."""

    number: Positive
    time: float
    kind: EventKind
    worker: Identifier | None = None
    block: BlockIndex | None = None
    detail: Reason = ""
