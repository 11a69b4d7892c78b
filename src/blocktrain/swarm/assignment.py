"""Which block a worker trains next.

Pure decisions: no clock, no files. Blocks never wait for each other, except that in a cascade a
block stays at least the run's `lead` behind the block it builds on, and in turns (swarm/order.py)
only one block trains at a time.
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from blocktrain.config import SwarmConfig
from blocktrain.swarm.lease_terms import earliest_useful_end
from blocktrain.swarm.order import Order
from blocktrain.swarm.state import BlockView

STAY_MARGIN = 0.25  # a worker moves only to a block with this much more work (share of a block)
MOST_TRANSFER_SHARE = 0.25  # of a lease time; with longer transfers a worker moves, not waits
MERGE_WAIT = 0.3  # seconds until the next request of a worker whose update is about to be merged
IDLE_WAIT = 5.0  # the same for a worker without any work
MOST_SENDING = 1  # updates that a worker may still be sending when it asks for the next lease

Block = TypeVar("Block", bound=BlockView[Any])
WorkersByBlock = Mapping[int | None, int]  # by the block of their last lease; None: none yet
AT_ONCE = Order()
NO_OTHERS: WorkersByBlock = MappingProxyType({})


class WorkRequest(NamedTuple):
    """A worker's request for a lease, with what it says about itself."""

    worker: str
    loaded_block: int | None = None  # block whose weights and optimizer state are in its memory
    allowed_blocks: Collection[int] | None = None  # None: all
    trained_lease: str | None = None  # the last lease it trained; the update may not be merged yet
    steps_per_second: float | None = None  # None: unknown
    transfer_seconds: float = 0.0  # to download and upload what one lease needs
    sending: int = 0  # updates that it is still sending, by the coordinator's count


def choose_block(
    swarm: SwarmConfig,
    blocks: Sequence[Block],
    request: WorkRequest,
    now: float,
    *,
    order: Order = AT_ONCE,
    others: WorkersByBlock = NO_OTHERS,
) -> Block | None:
    """The block that a worker gets, or None if it should ask again later.

    Workers spread over the blocks, because averaging updates that were trained side by side costs
    quality. A block's workers are those with a lease or a pending update of it, and those whose
    last lease was of it: between a version and their next lease they have neither. A worker whose
    update is about to be merged waits for the new version, which contains what others learned; on
    another block its optimizer would start cold.
    """
    candidates = [b for b in trainable_blocks(blocks, request, order) if order.available(b)]
    own = next((block for block in candidates if block.index == request.loaded_block), None)
    if (
        own is not None
        and own_update_is_pending(own, request.worker, request.trained_lease)
        and not may_continue(swarm, own, request, now)
    ):
        if waits_for_own_update(swarm, request.transfer_seconds):
            return None
        own = None
    crowds = {
        block.index: max(len(block.workers), others.get(block.index, 0)) for block in candidates
    }
    if own is not None:
        colleagues = len(own.workers) - (request.worker in own.workers)
        crowds[own.index] = max(colleagues, others.get(own.index, 0))
    ready = [
        block
        for block in candidates
        if block is own or not own_update_is_pending(block, request.worker, request.trained_lease)
    ]
    lead = order.lead
    return choose_with_lead(ready, own, crowds, lead) if lead else choose_spread(ready, own, crowds)


def trainable_blocks(blocks: Sequence[Block], request: WorkRequest, order: Order) -> list[Block]:
    """The blocks that a worker may train, as far as its request and the order allow. None while
    it is still sending earlier updates: otherwise it could collect leases that it never trains."""
    if request.sending > MOST_SENDING:
        return []
    allowed = request.allowed_blocks
    return [
        block
        for block in order.open_blocks(blocks, request.loaded_block)
        if allowed is None or block.index in allowed
    ]


def choose_spread(
    blocks: Sequence[Block], own: Block | None, crowds: Mapping[int, int]
) -> Block | None:
    """The block with the most work left per worker, so that blocks finish at about the same time. A
    worker leaves its `own` block, where its optimizer state is warm, only for one with clearly more
    work. `crowds`: numbers of other workers by block."""

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
    """The block of a cascade with the fewest workers; the work left says little, since few blocks
    are open at first. A worker stays on its `own` block unless another has fewer workers."""
    if own is not None and crowds[own.index] == min(crowds.values()):
        return own

    def rank(block: Block) -> tuple[int, float, int]:
        progress = block.under_way / block.total_batches
        return crowds[block.index], progress + lead * block.index, block.index

    return min(blocks, key=rank, default=None)


def may_continue(
    swarm: SwarmConfig, block: BlockView[Any], request: WorkRequest, now: float
) -> bool:
    """Whether a worker may continue from the end of a lease whose update is not merged yet.

    It may if the newest version lacks only that one update of the worker's own training; with more
    it would drift away from the others. If others train the block too and all end soon, it waits
    for the merge instead: continuing would only make its leases longer.
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
    """Whether the block's next version will contain an update of this worker: one from the current
    version, or of the lease it trained last (which may be late or continue another)."""
    return worker in block.finishing or (
        trained_lease is not None and trained_lease in block.unmerged(worker)
    )


def waits_for_own_update(swarm: SwarmConfig, transfer_seconds: float) -> bool:
    """Whether transfers are so short that waiting for the merge is better than changing blocks."""
    return transfer_seconds <= MOST_TRANSFER_SHARE * swarm.lease_seconds


def place_in_schedule(
    block: BlockView[Any], worker: str, *, continuing: bool = False
) -> tuple[int, int]:
    """(start, stride): where a lease begins in the learning-rate schedule, and how far one training
    step moves it. Assumes that all workers of the block train equally fast."""
    stride = len(block.workers) + (worker not in block.workers)
    ahead = sum(block.unmerged(worker).values()) if continuing else 0
    return block.merged_batches + ahead * stride, stride


def wait_seconds(blocks: Sequence[BlockView[Any]], worker: str) -> float:
    """How long a worker without a lease waits before it asks again."""
    return MERGE_WAIT if any(worker in block.workers for block in blocks) else IDLE_WAIT
