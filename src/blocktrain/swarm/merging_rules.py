"""When updates are merged into a version, which of them count, and how much.

Pure decisions: no clock, no files.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

from blocktrain.codec import registry
from blocktrain.codec.registry import Codec
from blocktrain.config import SwarmConfig, TrainConfig
from blocktrain.swarm.state import BlockView, UpdateView

MOST_MERGED = 256  # updates in one merge, which keeps their files open
QUORUM_LEASES = 2.0  # lease times that the first update waits for a quorum

Update = TypeVar("Update", bound=UpdateView)


class UpdateRefusal(StrEnum):
    TOO_STALE = "too many versions behind"
    HANDED_OUT_AGAIN = "its text was handed out again"


class Verdict(NamedTuple):
    """Whether an update that has arrived counts."""

    weight: float
    refusal: UpdateRefusal | None


def judge_update(
    swarm: SwarmConfig,
    version: int,
    base_version: int,
    *,
    in_time: bool,
    reclaim: Callable[[], bool],
) -> Verdict:
    """Whether an update that was trained from `base_version` counts. If its lease had ended before
    it arrived, it counts only if its text can be reclaimed: no other worker has got it since."""
    weight = update_weight(swarm, version, base_version)
    if weight == 0.0:
        return Verdict(weight, UpdateRefusal.TOO_STALE)
    owns_text = in_time or reclaim()
    return Verdict(weight, None if owns_text else UpdateRefusal.HANDED_OUT_AGAIN)


def update_weight(swarm: SwarmConfig, version: int, base_version: int) -> float:
    """The factor by which an update is scaled: 1 if it is based on the current version, less for
    every version it is behind, 0 if it is refused."""
    behind = version - base_version
    return swarm.late_discount**behind if behind <= swarm.most_stale else 0.0


def effective_base(base_version: int, continued_into: int | None) -> int:
    """The version an update counts as trained from. If it continued another update, it has seen
    all of its worker's training up to the version which that one was merged into."""
    return base_version if continued_into is None else max(base_version, continued_into)


def due_updates(block: BlockView[Update], swarm: SwarmConfig, now: float) -> Sequence[Update]:
    """The updates to merge now: those that are pending, or none while it is better to wait."""
    return block.pending[:MOST_MERGED] if now >= due_at(block, swarm) else ()


def due_at(block: BlockView[UpdateView], swarm: SwarmConfig) -> float:
    """When the pending updates become due if nothing else happens; infinite: never.

    They are due at once if no lease of the block is open. Otherwise once min(quorum, workers) have
    sent an update of the current version and the grace period for the others is over. Late updates
    do not count towards the quorum: they arrive while others train, and would make those late too.
    After two lease times they are due in any case, so that a slow worker does not stop the rest.
    """
    if not block.pending:
        return math.inf
    if block.open_leases == 0:
        return -math.inf
    needed = min(swarm.quorum, len(block.workers))
    arrivals = block.fresh_since
    latest = block.waiting_since + QUORUM_LEASES * swarm.lease_seconds
    if len(arrivals) < needed:
        return latest
    return min(latest, arrivals[needed - 1] + swarm.grace_seconds)


def split_stale(
    swarm: SwarmConfig, version: int, updates: Sequence[Update]
) -> tuple[list[Update], list[Update]]:
    """(updates that still count, updates that fell too many versions behind while they waited)."""
    fresh: list[Update] = []
    stale: list[Update] = []
    for update in updates:
        counts = update_weight(swarm, version, update.base_version) > 0.0
        (fresh if counts else stale).append(update)
    return fresh, stale


def chain_factors(updates: Sequence[UpdateView]) -> dict[str, float]:
    """By lease, the factor of an update in the mean of these updates. Training of several workers
    side by side is averaged. Training of one worker in leases that continue each other adds up, as
    in one long lease."""
    first_leases: dict[str | None, str] = {}
    steps: Counter[str] = Counter()
    for update in sorted(updates, key=lambda update: update.committed):
        first = first_leases[update.lease] = first_leases.get(update.continues, update.lease)
        steps[first] += update.steps
    return {update.lease: steps[first_leases[update.lease]] / update.steps for update in updates}


def makes_last_version(block: BlockView[Any], updates: Sequence[UpdateView]) -> bool:
    """Whether these updates complete the block. No worker trains from its last version, so it is
    published exactly, without compression."""
    merged = block.merged_batches + sum(update.steps for update in updates)
    return merged == block.total_batches


def delta_codec(swarm: SwarmConfig, block: BlockView[Any], updates: int) -> Codec | None:
    """The codec of the delta to a version made of this many updates. Once all text is handed out,
    they are the final updates of their workers, which contain more."""
    return registry.delta_codec(swarm, updates, final=block.to_hand_out == 0)


def useful_deltas(sizes: Mapping[int, int], whole: int) -> set[int]:
    """The versions from which applying all later deltas takes fewer bytes than fetching the newest
    version whole. `sizes`: of each delta, by the version it leads to."""
    useful, total = set(), 0
    for version in sorted(sizes, reverse=True):
        total += sizes[version]
        if total >= whole:
            break
        useful.add(version)
    return useful


def largest_move(train: TrainConfig, swarm: SwarmConfig, steps: int, size: float = 0.0) -> float:
    """The largest root mean square distance by which this many steps can move weights of root mean
    square `size`. With a codec, an update may also contain residuals of the updates before it."""
    counted = steps if swarm.codec == "none" else max(steps, swarm.most_steps)
    return counted * train.lr * (_largest_adam_step(train) + train.weight_decay * size)


def _largest_adam_step(train: TrainConfig) -> float:
    """The most AdamW can move a number in one step, in learning rates, for any gradients
    (Cauchy-Schwarz on its two moments): 1.2 by default. Steps of Muon are shorter."""
    ratio = min(train.beta1**2 / max(train.beta2, 1e-12), 1.0 - 1e-12)
    return max(1.0, (1.0 - train.beta1) / math.sqrt((1.0 - train.beta2) * (1.0 - ratio)))
