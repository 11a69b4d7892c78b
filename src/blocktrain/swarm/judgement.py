"""What the checks of an update say about it: whether it counts, and whether its worker is honest.

Pure decisions: no clock, no files. A validator scores an update: it measures the *gain*, by how
much the update lowers the block's loss (nats per token), on hidden text and on the text of the
update's lease. Two questions follow:

- Does it harm? Its gain on hidden text is far below what is usual for the block. The usual gain may
  be negative: updates that are trained side by side often improve the block only in their mean.
- Was it trained on its text? Training fits the text of the lease more than hidden text. The
  difference of the two gains, its *fit*, is about proportional to the learning rate. It is near 0
  for unchanged or random weights, for a copy, and for training on other text.
"""

import math
from collections.abc import Callable, Collection, Sequence
from statistics import median
from typing import Generic, Literal, NamedTuple, TypeVar

T = TypeVar("T")
Kind = Literal["", "harmful", "unfit"]

RECENT = 16  # updates of a block that define what is usual
FEWEST = 4  # with fewer, nothing is known
MAD_TO_SIGMA = 1.4826  # median absolute deviation of a normal distribution

HARM = 4.0  # deviations below the usual gain from which an update harms
# Bounds of a deviation, as shares of the block's loss. The lower one is for the rounding of losses;
# the upper one applies at first, while the usual gain falls fast.
LEAST_SPREAD, MOST_SPREAD = 0.001, 0.02

# The share of the usual fit that an honest update certainly exceeds, and the deviation among them.
LEAST_FIT, FIT_SPREAD = 0.7, 0.25
CERTAINLY_UNFIT = 0.35  # share of the usual fit below which an update is refused
CERTAIN = 3.0  # standard errors
MOST_EVIDENCE = 2.0  # from one score, either way
AGREEMENT, LOSS_AGREEMENT = 0.25, 0.002  # shares of the gain and of the loss, see `agree`


class Measured(NamedTuple):
    """A validator's score of an update. `error`: standard error of the gain."""

    loss: float  # on hidden text, before the update
    gain: float
    error: float
    own_gain: float  # on the text of its lease
    own_error: float

    @property
    def fit(self) -> float:
        return self.own_gain - self.gain

    @property
    def fit_error(self) -> float:
        return math.hypot(self.error, self.own_error)


class Scored(NamedTuple):
    """An earlier update. `rate`: the mean learning rate of its steps."""

    worker: str
    block: int
    steps: int
    rate: float
    gain: float
    own_gain: float
    counts: bool

    @property
    def relative_fit(self) -> float:
        return (self.own_gain - self.gain) / self.rate


class Judgement(NamedTuple):
    """`fault`: why an update should not count; empty if it should. `evidence` that its worker is
    dishonest: a log likelihood ratio, negative if the update looks honest."""

    kind: Kind
    fault: str
    evidence: float


def judge(
    score: Measured, steps: int, rate: float, worker: str, block: int, history: Sequence[Scored]
) -> Judgement:
    """Judge an update by its score and the newest updates of its run, newest first."""
    if not (math.isfinite(score.gain) and math.isfinite(score.own_gain)):
        return Judgement("harmful", "it makes the loss infinite", MOST_EVIDENCE)
    least = least_gain(score, steps, [u for u in history if u.block == block and u.counts])
    if score.gain < least:
        return Judgement(
            "harmful",
            f"it raises the loss on hidden text by {-score.gain:.3g} nats per token; the most that"
            f" is usual for this block is {-least:.3g}",
            MOST_EVIDENCE,
        )
    usual = usual_fit(worker, block, history)
    if usual is None:
        return Judgement("", "", 0.0)
    expected = usual * rate
    if score.fit + CERTAIN * score.fit_error < CERTAINLY_UNFIT * expected:
        return Judgement(
            "unfit",
            f"it was not trained on the text of its lease: there it lowers the loss by"
            f" {score.fit:.3g} nats per token more than on hidden text; {expected:.3g} is usual",
            MOST_EVIDENCE,
        )
    return Judgement("", "", fit_evidence(score.fit, score.fit_error, expected))


def least_gain(score: Measured, steps: int, usual: Sequence[Scored]) -> float:
    """The lowest gain of an update that does not harm. `usual`: updates of the block that count,
    newest first."""
    recent = [update.gain / update.steps for update in usual[:RECENT]]
    spread, middle = MOST_SPREAD * score.loss, 0.0
    if len(recent) >= FEWEST:
        middle = median(recent)
        deviation = MAD_TO_SIGMA * median(abs(gain - middle) for gain in recent)
        spread = max(LEAST_SPREAD * score.loss, min(deviation * steps, spread))
    return min(0.0, middle * steps) - HARM * (spread + score.error)


def usual_fit(worker: str, block: int, history: Sequence[Scored]) -> float | None:
    """The usual fit per learning rate, from updates of other workers; None if it is unknown. The
    worker's own would let a dishonest worker define what is usual."""
    others = [u for u in history if u.worker != worker and u.counts and u.rate > 0]
    same_block = [u.relative_fit for u in others if u.block == block][:RECENT]
    fits = same_block if len(same_block) >= FEWEST else [u.relative_fit for u in others][:RECENT]
    if len(fits) < FEWEST:
        return None
    usual = median(fits)
    return usual if usual > 0 else None


def fit_evidence(fit: float, error: float, expected: float) -> float:
    """The log likelihood ratio of "not trained on its text" (a fit of 0) to "trained on it"."""
    honest = LEAST_FIT * expected
    variance = error**2 + (FIT_SPREAD * expected) ** 2
    ratio = honest * (honest - 2 * fit) / (2 * variance) if variance else 0.0
    return max(-MOST_EVIDENCE, min(MOST_EVIDENCE, ratio))


def agree(one: Measured, other: Measured) -> bool:
    """Whether two validators' scores of the same update on the same text agree, up to the rounding
    of different processors."""
    if not (math.isfinite(one.gain) and math.isfinite(other.gain)):
        return math.isfinite(one.gain) == math.isfinite(other.gain)
    room = LOSS_AGREEMENT * max(abs(one.loss), abs(other.loss))
    return abs(one.loss - other.loss) <= room and all(
        abs(a - b) <= room + AGREEMENT * max(abs(a), abs(b))
        for a, b in ((one.gain, other.gain), (one.own_gain, other.own_gain))
    )


class Consensus(NamedTuple, Generic[T]):
    """What validators have found together: of two that agree, and of three the majority."""

    value: T
    confirmed: Collection[str] = ()
    overruled: Collection[str] = ()


def consensus(
    opinions: Sequence[tuple[str, T]], agree: Callable[[T, T], bool]
) -> Consensus[T] | None:
    """The consensus of validators, by name; None if no two of several agree. A single opinion is
    believed."""
    if len(opinions) == 1:
        return Consensus(opinions[0][1])
    for name, value in opinions:
        confirmed = {other for other, theirs in opinions if agree(value, theirs)}
        if len(confirmed) > 1 and name in confirmed:
            return Consensus(value, confirmed, {other for other, _ in opinions} - confirmed)
    return None


def base_is_at_fault(recent: Sequence[tuple[str, bool]]) -> bool:
    """Whether the updates of most workers look harmful, so that nobody is to blame: the learning
    rate or the newest version is. `recent`: worker and whether it counted, of a block's newest
    updates, newest first, of established workers only, since others could be one person."""
    last: dict[str, bool] = {}
    for worker, counted in recent[:RECENT]:
        last.setdefault(worker, counted)
    harmful = sum(not counted for counted in last.values())
    return harmful >= 2 and 2 * harmful > len(last)
