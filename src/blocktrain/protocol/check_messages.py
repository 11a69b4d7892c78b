"""Messages about checks of updates: a check, handed out to a validator, and its result."""

from operator import not_
from typing import Annotated, Literal

from pydantic import Field

from blocktrain.protocol.messages import (
    Blob,
    BlockIndex,
    Count,
    Downloads,
    Finished,
    Hash,
    Identifier,
    Message,
    Name,
    Positive,
    Predecessor,
    Reason,
    Wait,
)

MOST_CHECKED_WINDOWS = 4096


class CheckRequest(Message):
    """Request a check. `blocks`: those that the validator has memory for; null: any. `held_block`:
    the block in its memory. `run_steps`: as in a `LeaseRequest`."""

    blocks: tuple[BlockIndex, ...] | None = None
    held_block: BlockIndex | None = None
    run_steps: Positive | None = Field(default=None, exclude_if=not_)


class LeasedText(Message):
    """What a lease was trained on; the fields are those of `Lease`."""

    first_batch: Count
    steps: Positive
    schedule_start: Count
    schedule_stride: Positive
    predecessors: tuple[Predecessor, ...] = ()


class ScoreCheck(Message):
    """Measure the loss of `current`, and of `current` plus an update, on text of the block's lease
    and on hidden text: `windows` windows each, drawn by `seed`.

    The update is added as a merge adds it alone. `base`: only without a codec, and only if the
    update's base is not `current`. `share`: the fraction of its change that counts.
    """

    method: Literal["score"] = "score"
    current: Blob
    update: Blob
    base: Blob | None = None
    share: float = Field(default=1.0, gt=0, le=1)
    seed: Count
    windows: Annotated[int, Field(ge=1, le=MOST_CHECKED_WINDOWS)]


class TrainingState(Message):
    """A block and its optimizer at one moment."""

    weights: Blob
    moments: Blob


class StartLink(Message):
    """The first weights of a lease must be its `base` plus `added`: the residual of earlier
    updates, or what the lease that it continues has learned. All are weights files; null: nothing
    to add."""

    base: Blob
    added: Blob | None = None


class EncodingLink(Message):
    """What was encoded must be the change from `start` to `end`, the first and the last weights of
    the lease, plus `residual`. `learned` and `left_out` name it and the new residual."""

    update: Blob
    start: Blob
    end: Blob
    residual: Blob | None = None
    learned: Hash
    left_out: Hash


class ReplayCheck(Message):
    """Train the steps `first_step` to `first_step + steps - 1` of a lease (from 0) again, from
    `start`, and compare the result with `end`. `device`: of the worker, as it joined.

    `opening` comes with the first segment of a lease, `closing` with every one, if the run has a
    codec; without one, names alone show that both are right.
    """

    method: Literal["replay"] = "replay"
    first_step: Count
    steps: Positive
    start: TrainingState
    end: TrainingState
    device: Name
    opening: StartLink | None = None
    closing: EncodingLink | None = None


class Check(Message):
    """Work for a validator. It does not name the worker. `version`: of the block, now."""

    kind: Literal["check"] = "check"
    check: Identifier
    block: BlockIndex
    version: Count
    text: LeasedText
    task: ScoreCheck | ReplayCheck = Field(discriminator="method")
    seconds_left: float


class CheckAnswer(Message):
    answer: Check | Wait | Finished = Field(discriminator="kind")


class Losses(Message):
    """A block's loss before and after an update, in nats per token; null: not finite. `error`: the
    standard error of their difference, over the windows; null: unknown."""

    before: float | None
    after: float | None
    error: float | None = Field(default=None, ge=0)


class ScoreResult(Message):
    method: Literal["score"] = "score"
    hidden: Losses
    own: Losses


class ReplayResult(Message):
    """How far the worker's state is from the retrained one. `cosine` and `distance` compare the
    changes of the weights, `moments_distance` the optimizers; distances are relative to the
    retrained size. All are null if a number is not finite. `fault`: which link does not hold, bit
    for bit; empty if all do."""

    method: Literal["replay"] = "replay"
    identical: bool
    cosine: float | None
    distance: float | None
    moments_distance: float | None
    fault: Reason = ""


class Unable(Message):
    """The validator could not carry out the check; another one may."""

    method: Literal["none"] = "none"
    reason: Reason


class CheckResult(Message):
    """`seconds`: how long the check took. `device`: the validator's."""

    result: ScoreResult | ReplayResult | Unable = Field(discriminator="method")
    seconds: float = Field(ge=0, lt=1e9)
    device: Name
    downloads: Downloads = ()
