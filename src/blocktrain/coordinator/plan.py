"""Who trains what next, and when updates become a version: pure decisions, no clock, no files.

Blocks that lag go first; a worker stays with its block while that is useful, because its
optimizer state is warm there. Blocks never wait for each other. Simulation runs the same code.
"""

import math
from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Any, TypeVar

from blocktrain.config import SwarmConfig
from blocktrain.core.swarm import BlockView, Waiting

STAY = 0.5  # of the run: how far ahead of the slowest block a worker's own may be before it moves
PATIENCE = 0.25  # of a lease's time that a worker spends on its own transfers without moving
MERGE_WAIT = 0.3  # seconds; the worker's own update is about to become a version
IDLE_WAIT = 5.0

Block = TypeVar("Block", bound=BlockView[Any])
Update = TypeVar("Update", bound=Waiting)


class Refusal(StrEnum):
    TOO_STALE = "too many versions behind"
    HANDED_OUT_AGAIN = "its text was handed out again"


def choose_block(
    blocks: Sequence[Block],
    worker: str,
    held: int | None,
    allowed: Collection[int] | None,
    *,
    patient: bool = True,
) -> Block | None:
    """The block to hand out, or None where there is nothing this worker could do now.

    While its own update becomes a version, a `patient` worker waits: another block would have to be
    fetched, prepared and trained with an optimizer that knows nothing of it.
    """
    open_to = [
        block
        for block in blocks
        if block.to_hand_out and (allowed is None or block.index in allowed)
    ]
    # Better to go on from what it has just made than from the version before.
    free = [block for block in open_to if worker not in block.finishing]
    if not free:
        return None
    slowest = min(free, key=lambda block: (_share(block), len(block.workers), block.index))
    for block in open_to:
        if block.index == held and _share(block) <= _share(slowest) + STAY:
            if worker not in block.finishing:
                return block
            if patient:
                return None
    return slowest


def is_patient(swarm: SwarmConfig, transfer_seconds: float) -> bool:
    """Whether a worker's update is through so soon that waiting for it is better than moving."""
    return transfer_seconds <= PATIENCE * swarm.lease_seconds


def _share(block: BlockView[Any]) -> float:
    return block.under_way / block.total_batches


def wait_seconds(blocks: Sequence[BlockView[Any]], worker: str) -> float:
    """When a worker for whom there is nothing now should ask again."""
    return MERGE_WAIT if any(worker in block.workers for block in blocks) else IDLE_WAIT


def lease_steps(swarm: SwarmConfig, steps_per_second: float | None, left: int) -> int:
    """As many steps as the worker does in the time of a lease; a few where its speed is unknown."""
    fitting = swarm.first_steps
    if steps_per_second is not None:
        fitting = int(swarm.lease_seconds * steps_per_second)
    return max(1, min(fitting, swarm.most_steps, left))


def lease_seconds(
    swarm: SwarmConfig, steps: int, steps_per_second: float | None, transfer_seconds: float = 0.0
) -> float:
    """Time until the deadline: expected time with room to spare, within bounds. A slow line is no
    reason to lose what was trained."""
    training = steps / steps_per_second if steps_per_second else swarm.lease_seconds
    roomy = min(swarm.deadline_factor * (training + transfer_seconds), swarm.longest_deadline)
    return max(swarm.shortest_deadline, roomy)


def due_updates(block: BlockView[Update], swarm: SwarmConfig, now: float) -> Sequence[Update]:
    """The updates to merge now; none where it is better to wait."""
    return block.pending if now >= due_at(block, swarm) else ()


def due_at(block: BlockView[Waiting], swarm: SwarmConfig) -> float:
    """From when on the updates that wait are due, if nothing else happens; infinity: never.

    Enough is min(quorum, workers on the block). Late updates are not counted: they come while the
    others train, and would make those late in turn. Then those still training get the grace window;
    where nobody is, there is nothing to wait for.
    """
    if not block.pending:
        return math.inf
    if block.open_leases == 0:
        return -math.inf
    enough = min(swarm.quorum, len(block.workers))
    arrivals = sorted(u.committed for u in block.pending if u.base_version == block.version)
    if len(arrivals) < enough:
        return math.inf
    return arrivals[enough - 1] + swarm.grace_seconds


def weight(swarm: SwarmConfig, version: int, base_version: int) -> float:
    """The share of what an update learned that is taken: 1 when fresh, less for every version it
    is behind, 0 where it is refused."""
    behind = version - base_version
    return swarm.late_discount**behind if behind <= swarm.most_stale else 0.0


def without_stale(
    swarm: SwarmConfig, version: int, due: Sequence[Update]
) -> tuple[list[Update], list[Update]]:
    """(updates that still count, updates that fell too far behind while they waited)."""
    fresh = [update for update in due if weight(swarm, version, update.base_version) > 0.0]
    stale = [update for update in due if weight(swarm, version, update.base_version) == 0.0]
    return fresh, stale


def refusal(
    swarm: SwarmConfig, version: int, base_version: int, *, text_is_its_own: bool
) -> Refusal | None:
    """Why an update that has just arrived does not count; None where it does. Its text is its own
    where its lease was held to the end, or nobody has had the text since."""
    if weight(swarm, version, base_version) == 0.0:
        return Refusal.TOO_STALE
    return None if text_is_its_own else Refusal.HANDED_OUT_AGAIN
