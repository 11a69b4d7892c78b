"""When updates are merged into a version, which of them count, and by how much.

Pure decisions: no clock, no files.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

from blocktrain import codec
from blocktrain.codec import Codec
from blocktrain.config import SwarmConfig
from blocktrain.numerics.merge import MergeRule
from blocktrain.swarm.state import BlockView, UpdateView

QUORUM_LEASES = 2.0  # longest wait of the first update for a quorum, in lease times

Update = TypeVar("Update", bound=UpdateView)


class UpdateRefusal(StrEnum):
    TOO_STALE = "too many versions behind"
    HANDED_OUT_AGAIN = "its batches were handed out again"


class Verdict(NamedTuple):
    """Whether an update counts, and by how much."""

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
    """Whether an update that was trained from `base_version` counts. If its lease ended before it
    arrived, it counts only if its batches can be reclaimed because no other lease has them."""
    weight = update_weight(swarm, version, base_version)
    if weight == 0.0:
        return Verdict(weight, UpdateRefusal.TOO_STALE)
    owns_batches = in_time or reclaim()
    return Verdict(weight, None if owns_batches else UpdateRefusal.HANDED_OUT_AGAIN)


def update_weight(swarm: SwarmConfig, version: int, base_version: int) -> float:
    """The factor of an update: 1 if its base is the current version, less for each version it is
    behind, 0 if it is too far behind."""
    behind = version - base_version
    return swarm.late_discount**behind if behind <= swarm.most_stale else 0.0


def effective_base(base_version: int, continued_into: int | None) -> int:
    """The version that an update counts as trained from. If the update continues another one, that
    is at least the version that the other one was merged into."""
    return base_version if continued_into is None else max(base_version, continued_into)


def due_updates(block: BlockView[Update], swarm: SwarmConfig, now: float) -> Sequence[Update]:
    """The updates to merge now: all pending ones, or none while it is better to wait."""
    return block.pending if now >= due_at(block, swarm) else ()


def due_at(block: BlockView[UpdateView], swarm: SwarmConfig) -> float:
    """When the pending updates become due if nothing else happens; infinite: never.

    They are due at once if no lease of the block is open. Otherwise they are due when min(quorum,
    workers) workers have sent an update of the current version and the grace period is over. Late
    updates do not count towards the quorum: they arrive while others train, and merging them then
    would make the others late too. Two lease times after the first update, the updates are due in
    any case, so that a slow worker does not stop the rest.
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
    """Split updates into those that still count and those that fell too many versions behind while
    they waited."""
    fresh: list[Update] = []
    stale: list[Update] = []
    for update in updates:
        counts = update_weight(swarm, version, update.base_version) > 0.0
        (fresh if counts else stale).append(update)
    return fresh, stale


def chain_factors(updates: Sequence[UpdateView]) -> dict[str, float]:
    """Each update's factor in the mean of these updates, by lease. Updates of different workers are
    averaged. Updates of one worker's leases that continue each other add up, like one long lease.
    """
    first_leases: dict[str | None, str] = {}
    steps: Counter[str] = Counter()
    for update in sorted(updates, key=lambda update: update.committed):
        first = first_leases[update.lease] = first_leases.get(update.continues, update.lease)
        steps[first] += update.steps
    return {update.lease: steps[first_leases[update.lease]] / update.steps for update in updates}


def makes_last_version(block: BlockView[Any], updates: Sequence[UpdateView]) -> bool:
    """Whether these updates complete the block. The last version is published without compression,
    since no worker trains from it."""
    merged = block.merged_batches + sum(update.steps for update in updates)
    return merged == block.total_batches


def delta_codec(swarm: SwarmConfig, block: BlockView[Any], updates: int) -> Codec | None:
    """The codec of the delta to a version of this many updates. Once all batches are leased, these
    are their workers' final updates, which contain more."""
    return codec.delta_codec(swarm, updates, final=block.to_hand_out == 0)


def useful_deltas(sizes: Mapping[int, int], whole: int) -> set[int]:
    """The versions whose deltas are still useful: a delta together with all later ones must be
    smaller than the whole newest version. `sizes`: the deltas' sizes, by the version that each
    leads to."""
    useful, total = set(), 0
    for version in sorted(sizes, reverse=True):
        total += sizes[version]
        if total >= whole:
            break
        useful.add(version)
    return useful


def merge_rule(swarm: SwarmConfig) -> MergeRule:
    """The rule by which updates of a run become a version."""
    return MergeRule(swarm.outer_rate, swarm.outer_momentum)
