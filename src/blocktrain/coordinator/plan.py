"""Who trains what next, and when updates become a version: pure decisions, no clock, no files.

Blocks that lag go first; a worker stays with its block while that is useful, because its
optimizer state is warm there. Blocks never wait for each other. Simulation runs the same code.
"""

from collections.abc import Collection, Sequence

from blocktrain.config import SwarmConfig
from blocktrain.core.swarm import BlockState, PendingUpdate

STAY = 0.5  # of the run: how far ahead of the slowest block a worker's own may be before it moves


def choose_block(
    blocks: Sequence[BlockState],
    worker: str,
    held: int | None,
    allowed: Collection[int] | None,
) -> BlockState | None:
    """The block to hand out, or None where there is nothing this worker could do now."""
    open_to = [
        block
        for block in blocks
        if block.to_hand_out
        and (allowed is None or block.index in allowed)
        and worker not in block.finishing  # better to go on from what it has just made
    ]
    if not open_to:
        return None
    slowest = min(open_to, key=lambda block: (_share(block), len(block.workers), block.index))
    for block in open_to:
        if block.index == held and _share(block) <= _share(slowest) + STAY:
            return block
    return slowest


def _share(block: BlockState) -> float:
    return block.under_way / block.total_batches


def lease_steps(swarm: SwarmConfig, steps_per_second: float | None, left: int) -> int:
    """As many steps as the worker does in the time of a lease; a few where its speed is unknown."""
    fitting = swarm.first_steps
    if steps_per_second is not None:
        fitting = int(swarm.lease_seconds * steps_per_second)
    return max(1, min(fitting, swarm.most_steps, left))


def lease_seconds(swarm: SwarmConfig, steps: int, steps_per_second: float | None) -> float:
    """Time until the deadline: expected time with room to spare, within bounds."""
    expected = steps / steps_per_second if steps_per_second else swarm.lease_seconds
    roomy = min(swarm.deadline_factor * expected, swarm.longest_deadline)
    return max(swarm.shortest_deadline, roomy)


def due_updates(block: BlockState, swarm: SwarmConfig, now: float) -> tuple[PendingUpdate, ...]:
    """The updates to merge now; none where it is better to wait.

    Enough is min(quorum, workers on the block). Then those still training get the grace window;
    where nobody is, there is nothing to wait for.
    """
    if not block.pending:
        return ()
    enough = min(swarm.quorum, len(block.workers))
    if block.open_leases == 0:
        return block.pending
    arrivals = sorted(update.committed for update in block.pending)
    if len(arrivals) < enough:
        return ()
    return block.pending if now >= arrivals[enough - 1] + swarm.grace_seconds else ()


def weight(swarm: SwarmConfig, version: int, base_version: int) -> float:
    """The share of what an update learned that is taken: 1 when fresh, less for every version it
    is behind, 0 where it is refused."""
    behind = version - base_version
    return swarm.late_discount**behind if behind <= swarm.most_stale else 0.0
