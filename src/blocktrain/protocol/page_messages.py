"""Messages of the run page and its operator. What anybody may read names no worker's id, no address
and no secret: workers have a `number` instead."""

from typing import Literal

from pydantic import Field

from blocktrain.protocol.messages import (
    BlockIndex,
    Codec,
    Count,
    Identifier,
    Message,
    Name,
    Positive,
    Reason,
    Role,
    StoredName,
    Total,
)
from blocktrain.protocol.status_messages import Checking, Moved, Trust, WorkerState

Control = Literal["running", "paused", "draining"]
LossSource = Literal["scores", "checks", "workers"]
Points = tuple[tuple[float, float], ...]  # time and value, oldest first


class Trend(Message):
    """By how much a value has changed, and in how many seconds."""

    change: float
    seconds: float


class Measure(Message):
    """The newest loss of a block or a model, in nats. `source`: scores of an evaluator (per byte),
    checks on hidden text, or the training loss that workers report (both per token)."""

    value: float
    source: LossSource
    time: float
    trend: Trend | None


class BlockOverview(Message):
    """A block now. `staleness`: mean of how many versions its last updates were behind. `lead`: the
    share of the run's steps by which it is behind the block that it builds on."""

    index: BlockIndex
    version: Count
    progress: float
    loss: Measure | None
    tokens_per_second: float
    replicas: Count
    pending_updates: Count
    staleness: float | None
    lead: float | None
    participation: float | None
    moved: Moved


class Overview(Message):
    """A run now. Times are seconds since 1970 by the coordinator's clock."""

    run: Identifier
    title: Name | None
    public: bool
    kind: str
    codec: Codec
    parameters: Total
    state: Literal["running", "paused", "draining", "drained", "finished"]
    time: float
    started: float
    finished: float | None
    progress: float
    seconds_left: float | None  # null: unknown, because nothing was merged lately
    tokens_trained: Total
    tokens_total: Total
    tokens_per_second: float
    bytes_per_token: float
    wanted_lead: float
    score: Measure | None  # of the assembled model
    score_note: Reason
    reference: float | None
    workers: dict[WorkerState, Total]
    present: Total  # workers that train, check or score, or would
    waiting: Total  # those that train and have nothing to do
    blocks: tuple[BlockOverview, ...]
    moved: Moved
    checking: Checking | None
    last_event: Count


class Curve(Message):
    source: LossSource
    points: Points


class BlockCurve(Curve):
    block: BlockIndex


class Charts(Message):
    """How a run has developed."""

    time: float
    scores: Points
    losses: tuple[BlockCurve, ...]
    tokens: Points  # per second, by the time from which this is a mean


class Contributor(Message):
    """A worker. `worker`, `device` and `trust` are for the operator only."""

    number: Positive
    name: StoredName
    role: Role
    state: WorkerState
    block: BlockIndex | None
    tokens: Total  # in merged updates
    updates: Total
    tokens_per_second: float
    joined: float
    seen: float
    standing: Literal["newcomer", "trusted", "suspected", "excluded", "banned", "unchecked"]
    moved_up: Total
    moved_down: Total
    worker: Identifier | None = Field(default=None, exclude_if=lambda value: value is None)
    device: StoredName | None = Field(default=None, exclude_if=lambda value: value is None)
    trust: Trust | None = Field(default=None, exclude_if=lambda value: value is None)


class Contributors(Message):
    time: float
    workers: tuple[Contributor, ...]


class ContributionCurve(Message):
    """What a worker has contributed over time: tokens in merged updates by time, summed up."""

    number: Positive
    points: Points


class PageEvent(Message):
    """An event, with the name and number of its worker."""

    number: Positive
    time: float
    kind: str
    worker: Positive | None
    name: str
    block: BlockIndex | None
    detail: Reason


class PageEvents(Message):
    """Events that match a filter, newest first. `searched_to`: the oldest number that was looked
    at; there may be older ones unless it is 1."""

    events: tuple[PageEvent, ...]
    searched_to: Positive


# For the operator


class ControlRequest(Message):
    control: Control


class ControlAnswer(Message):
    control: Control
    ended_leases: Count


class BanRequest(Message):
    worker: Identifier


class UnmergeRequest(Message):
    worker: Identifier
    reason: Reason = ""


class UnmergeAnswer(Message):
    """How many updates were removed, and from which blocks."""

    updates: Count
    blocks: tuple[BlockIndex, ...]


class InviteRequest(Message):
    role: Role
    uses: int = Field(ge=1, le=1_000_000)
    days: float = Field(gt=0, le=3650)


class NewInvite(Message):
    """A new invite, the command that joins with it, and its QR code as SVG."""

    id: Identifier
    invite: str
    command: str
    qr: str


class InviteSummary(Message):
    id: Identifier
    role: Role
    uses_left: Count
    seconds_left: float
    revoked: bool


class Invites(Message):
    invites: tuple[InviteSummary, ...]


class Health(Message):
    status: Literal["ok"] = "ok"
    run: Identifier
    state: Literal["running", "finished"]
