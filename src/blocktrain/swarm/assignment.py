"""Which block a worker trains next.

Pure decisions: no clock, no files. Blocks never wait for each other, except that in a cascade a
block stays at least the run's `lead` behind the block it builds on.
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from blocktrain.config import SwarmConfig
from blocktrain.swarm.lease_terms import earliest_useful_end
from blocktrain.swarm.state import BlockView

STAY_MARGIN = 0.25  # of a block: how much more work another block must offer before a worker moves
MOST_TRANSFER_SHARE = 0.25  # of a lease: a worker with longer transfers moves rather than waits
MERGE_WAIT = 0.3  # seconds until a worker asks again whose own update is about to be merged
IDLE_WAIT = 5.0  # the same for a worker that has nothing to do at all

Block = TypeVar("Block", bound=BlockView[Any])
WorkersByBlock = Mapping[int | None, int]  # by the block they were last given; None: none yet
NO_OTHERS: WorkersByBlock = MappingProxyType({})


class WorkRequest(NamedTuple):
    """What a worker that asks for a lease says about itself, cut down to what can be trusted."""

    worker: str
    loaded_block: int | None = None  # its weights and optimizer state are in the worker's memory
    allowed_blocks: Collection[int] | None = None  # None: all
    trained_lease: str | None = None  # the last one it trained; its update may not be merged yet
    steps_per_second: float | None = None  # None: unknown
    transfer_seconds: float = 0.0  # to download and upload what one lease needs


def choose_block(
    swarm: SwarmConfig,
    blocks: Sequence[Block],
    request: WorkRequest,
    now: float,
    *,
    lead: float = 0.0,
    others: WorkersByBlock = NO_OTHERS,
) -> Block | None:
    """The block to give a worker, or None if it should ask again later.

    Workers spread over the blocks, because averaging updates that were trained side by side costs
    quality. A worker whose own update is about to be merged waits for the new version: it contains
    what others learned, and on another block the optimizer would start cold.
    """
    candidates = [
        block
        for block in (blocks_behind_lead(blocks, lead, request.loaded_block) if lead else blocks)
        if block.to_hand_out
        and (request.allowed_blocks is None or block.index in request.allowed_blocks)
    ]
    own = next((block for block in candidates if block.index == request.loaded_block), None)
    if own is not None and not _is_ready(swarm, own, request, now):
        if waits_for_own_update(swarm, request.transfer_seconds):
            return None
        own = None
    crowds = {block.index: _other_workers(block, request, others) for block in candidates}
    ready = [block for block in candidates if _is_ready(swarm, block, request, now)]
    return choose_with_lead(ready, own, crowds, lead) if lead else choose_spread(ready, own, crowds)


def choose_spread(
    blocks: Sequence[Block], own: Block | None, crowds: Mapping[int, int]
) -> Block | None:
    """The block with the most work left for each worker on it, so that no block is left for
    everybody to share at the end. A worker leaves its `own` block only if another has clearly more
    work, since its optimizer state is warm there. `crowds`: other workers by block."""

    def work_each(block: Block) -> float:
        return block.to_hand_out / block.total_batches / (crowds[block.index] + 1)

    if own is not None:
        most = max(map(work_each, blocks)) * (crowds[own.index] + 1)
        if most <= own.to_hand_out / own.total_batches + STAY_MARGIN:
            return own
    return min(
        blocks,
        key=lambda block: (-work_each(block), crowds[block.index], block.index),
        default=None,
    )


def choose_with_lead(
    blocks: Sequence[Block], own: Block | None, crowds: Mapping[int, int], lead: float
) -> Block | None:
    """The block of a cascade with the fewest workers: few are open at first, so work left says
    little. A worker stays with its `own` block to the end if no other has fewer workers."""
    if own is not None and crowds[own.index] == min(crowds.values()):
        return own

    def rank(block: Block) -> tuple[int, float, int]:
        progress = block.under_way / block.total_batches
        return crowds[block.index], progress + lead * block.index, block.index

    return min(blocks, key=rank, default=None)


def blocks_behind_lead(
    blocks: Sequence[Block], lead: float, loaded_block: int | None
) -> list[Block]:
    """The blocks of a cascade that may be trained: the block before is ahead by the lead, or done.

    Of the worker's own block only merged batches count as done. Otherwise two equally fast workers
    would swap blocks whenever the first one's update arrived a little later.
    """
    by_index = {block.index: block for block in blocks}

    def is_open(block: Block) -> bool:
        before = by_index.get(block.index - 1)
        if before is None or before.merged_batches == before.total_batches:
            return True
        done = block.merged_batches if block.index == loaded_block else block.under_way
        behind = before.merged_batches / before.total_batches - done / block.total_batches
        return behind >= lead

    return [block for block in blocks if is_open(block)]


def may_continue(
    swarm: SwarmConfig, block: BlockView[Any], request: WorkRequest, now: float
) -> bool:
    """Whether a worker may train on from the end of a lease whose update is not merged yet.

    Only if that update is all the newest version lacks of the worker's own training; otherwise it
    would drift away from the others. If others share the block and all of them end soon, it waits
    for the merge instead: else leases might as well be twice as long.
    """
    lease, worker = request.trained_lease, request.worker
    if lease is None or set(block.unmerged(worker)) != {lease}:
        return False
    if len(block.workers) == 1 and worker in block.workers:
        return True
    return not waits_for_own_update(
        swarm, request.transfer_seconds
    ) or block.busy_until > earliest_useful_end(swarm, now, request.transfer_seconds)


def own_update_is_pending(block: BlockView[Any], worker: str, trained_lease: str | None) -> bool:
    """Whether the block's next version will contain this worker's own training: an update of the
    current version, or of the lease it trained last (which may be late or continue another)."""
    return worker in block.finishing or (
        trained_lease is not None and trained_lease in block.unmerged(worker)
    )


def waits_for_own_update(swarm: SwarmConfig, transfer_seconds: float) -> bool:
    """Whether a worker's update arrives so quickly that waiting for it beats changing blocks."""
    return transfer_seconds <= MOST_TRANSFER_SHARE * swarm.lease_seconds


def place_in_schedule(
    block: BlockView[Any], worker: str, *, continuing: bool = False
) -> tuple[int, int]:
    """(start, stride): the step of the learning rate schedule that a lease begins at, and by how
    much one training step moves it. Assumes that all workers of the block train equally fast."""
    stride = len(block.workers) + (worker not in block.workers)
    ahead = sum(block.unmerged(worker).values()) if continuing else 0
    return block.merged_batches + ahead * stride, stride


def wait_seconds(blocks: Sequence[BlockView[Any]], worker: str) -> float:
    """How long a worker without a lease waits before it asks again."""
    return MERGE_WAIT if any(worker in block.workers for block in blocks) else IDLE_WAIT


def _is_ready(swarm: SwarmConfig, block: BlockView[Any], request: WorkRequest, now: float) -> bool:
    """Whether a worker can start on a block now, rather than after its own update is merged."""
    return not own_update_is_pending(block, request.worker, request.trained_lease) or (
        block.index == request.loaded_block and may_continue(swarm, block, request, now)
    )


def _other_workers(block: BlockView[Any], request: WorkRequest, others: WorkersByBlock) -> int:
    """Workers that hold a lease or a pending update of the block, or were given it last: between a
    new version and their next leases, the workers that made the version hold nothing."""
    is_own = block.index == request.loaded_block and request.worker in block.workers
    return max(len(block.workers) - is_own, others.get(block.index, 0))
