"""Who trains what next, and when updates become a version: pure decisions, no clock, no files.

Blocks that lag and that few train go first; a worker stays with its block while that is useful,
because its optimizer state is warm there. Blocks never wait for each other, but for those of a
cascade whose `lead` keeps them behind the one they build on. Simulation runs the same code.
"""

import math
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Any, TypeVar

from blocktrain.codec import registry
from blocktrain.codec.registry import Codec
from blocktrain.config import SwarmConfig, TrainConfig
from blocktrain.swarm.state import BlockView, LeaseView, UpdateView

STAY = 0.25  # of a block: how much more there may be to do elsewhere before a worker moves
PATIENCE = 0.25  # of a lease's time that a worker spends on its own transfers without moving
FILLING = 0.1  # of a lease's time: what is left until others end is filled if it is more
MOST_MERGED = 256  # updates in one merge, which keeps their files open
QUORUM_LEASES = 2.0  # of a lease's time that the first update waits for a quorum
SLOWEST_LEASES = 10.0  # of a lease's time: what a worker may claim that training or transfers take
LONGEST_LEASES = 30.0  # times the deadline of a usual lease: after that none is extended
TRANSFER_ROOM = 10.0  # how many times faster than from hand-out to commit a worker may be
MILLIONTH = 1e-6  # of a step a second; whole ones, because sums of them stay exact
MERGE_WAIT = 0.3  # seconds; the worker's own update is about to become a version
IDLE_WAIT = 5.0

Block = TypeVar("Block", bound=BlockView[Any])
Update = TypeVar("Update", bound=UpdateView)
Others = Mapping[int | None, int]  # how many were last given each block; None: none yet


class UpdateRefusal(StrEnum):
    TOO_STALE = "too many versions behind"
    HANDED_OUT_AGAIN = "its text was handed out again"


def choose_block(
    blocks: Sequence[Block],
    worker: str,
    held: int | None,
    allowed: Collection[int] | None,
    *,
    patient: bool = True,
    trained: Hashable = None,
    soon: float = math.inf,
    lead: float = 0.0,
    others: Others = MappingProxyType({}),
) -> Block | None:
    """The block to hand out, or None where there is nothing this worker could do now.

    It is the one with the most to do for each who would train it. What several train at once has to
    be averaged, which costs quality: so workers spread, and leave no block for all of them to share
    at the end. A worker stays with its own until there is clearly more to do elsewhere.

    While its own update becomes a version, a worker goes on from the end of the lease it has
    `trained`, where it may. Else a `patient` one waits: for what others who train the block have
    learned meanwhile, and because another block would have to be fetched, prepared and trained with
    an optimizer that knows nothing of it.

    With a `lead` a block is open while it keeps that far behind the one before. Few are open at
    first, so workers go where fewest are; who shares its block with no more others than it would
    elsewhere stays to its end.
    """
    open_to = [
        block
        for block in (far_enough_behind(blocks, lead, held) if lead else blocks)
        if block.to_hand_out and (allowed is None or block.index in allowed)
    ]

    def is_free(block: Block) -> bool:
        """Better to go on from what it has just made than from the version before."""
        return not own_update_comes(block, worker, trained) or (
            block.index == held and may_continue(block, worker, trained, patient=patient, soon=soon)
        )

    own = next((block for block in open_to if block.index == held), None)
    own_is_free = own is not None and is_free(own)
    if own is not None and patient and not own_is_free:
        return None
    # Who trains a block holds something of it, or was given it last: between a version and their
    # next leases, those who made it hold nothing.
    crowds = {block.index: max(len(block.workers), others.get(block.index, 0)) for block in open_to}
    if own is not None:
        holding = len(own.workers) - (worker in own.workers)
        crowds[own.index] = max(holding, others.get(own.index, 0))

    def rank(block: Block) -> tuple[float, float, int]:
        crowd = crowds[block.index]
        if lead:
            return crowd, _share(block) + lead * block.index, block.index
        return -block.to_hand_out / block.total_batches / (crowd + 1), crowd, block.index

    def keeps(own: Block) -> bool:
        crowd = crowds[own.index]
        if lead:
            return crowd == min(crowds.values())
        to_do_each = [
            block.to_hand_out / block.total_batches / (crowds[block.index] + 1)
            for block in filter(is_free, open_to)
        ]
        return max(to_do_each) * (crowd + 1) <= own.to_hand_out / own.total_batches + STAY

    if own is not None and own_is_free and keeps(own):
        return own
    return min(filter(is_free, open_to), key=rank, default=None)


def far_enough_behind(blocks: Sequence[Block], lead: float, held: int | None) -> list[Block]:
    """Blocks that the one before is ahead of by its lead, or will never be further ahead of.

    What a worker has under way itself does not close its own block to it: else two that are
    equally fast would change blocks whenever the first one's update came a moment later.
    """
    by_index = {block.index: block for block in blocks}

    def is_open(block: Block) -> bool:
        before = by_index.get(block.index - 1)
        if before is None or before.merged_batches == before.total_batches:
            return True
        done = block.merged_batches if block.index == held else block.under_way
        behind = before.merged_batches / before.total_batches - done / block.total_batches
        return behind >= lead

    return [block for block in blocks if is_open(block)]


def own_update_comes(block: BlockView[Any], worker: str, trained: Hashable) -> bool:
    """Whether a worker had better go on from what its own update becomes: one of the current
    version, or that of the lease it has `trained`, which may be late or continue another."""
    return worker in block.finishing or (trained is not None and trained in block.unmerged(worker))


def may_continue(
    block: BlockView[Any],
    worker: str,
    trained: Hashable,
    *,
    patient: bool = True,
    soon: float = math.inf,
) -> bool:
    """Whether a worker may train on from the end of a lease whose update is on its way: only where
    that is all that the newest version lacks of what it has done, so that nobody gets further than
    that from what the others learn. Who shares its block rather waits for what all have made of it,
    where that is `soon`: from its own end alone, leases might as well be twice as long. While
    others are still to train for longer it goes on until they end, as if its lease had been as
    long as theirs."""
    if trained is None or set(block.unmerged(worker)) != {trained}:
        return False
    is_alone = len(block.workers) == 1 and worker in block.workers  # of what may be thousands
    return not patient or is_alone or block.busy_until > soon


def place_in_schedule(
    block: BlockView[Any], worker: str, *, continuing: bool = False
) -> tuple[int, int]:
    """(start, stride): the schedule's step of a lease's first step, and how many steps of it one
    step is. All who train a block are taken to go equally far."""
    stride = len(block.workers) + (worker not in block.workers)
    ahead = sum(block.unmerged(worker).values()) if continuing else 0
    return block.merged_batches + ahead * stride, stride


def is_patient(swarm: SwarmConfig, transfer_seconds: float) -> bool:
    """Whether a worker's update is through so soon that waiting for it is better than moving."""
    return transfer_seconds <= PATIENCE * swarm.lease_seconds


def _share(block: BlockView[Any]) -> float:
    return block.under_way / block.total_batches


def wait_seconds(blocks: Sequence[BlockView[Any]], worker: str) -> float:
    """When a worker for whom there is nothing now should ask again."""
    return MERGE_WAIT if any(worker in block.workers for block in blocks) else IDLE_WAIT


def soon(swarm: SwarmConfig, now: float, transfer_seconds: float) -> float:
    """Until when others' ends are too near for a worker to train something and send it by then."""
    return now + transfer_seconds + FILLING * swarm.lease_seconds


def seconds_left(
    swarm: SwarmConfig,
    blocks: Sequence[BlockView[Any]],
    now: float,
    steps_per_second: float | None,
    others: Mapping[int | None, int],
) -> float:
    """Until the run's text is trained, if a worker and all `others` who are there end together:
    these by the block they train, in millionths of a step a second, and None for those who wait.
    Infinite where the worker's speed is unknown, and where it is longer than leases are."""
    if steps_per_second is None:
        return math.inf
    together = steps_per_second + MILLIONTH * sum(others.values())
    steps = float(sum([block.to_hand_out for block in blocks]))
    if steps > together * swarm.lease_seconds:
        return math.inf
    for block in blocks:
        seconds = max(0.0, block.busy_until - now)
        steps += MILLIONTH * others.get(block.index, 0) * seconds
    return steps / together


def trusted_speed(
    swarm: SwarmConfig, claimed: float | None, measured: float | None
) -> float | None:
    """A worker's speed as far as it may be believed. `measured`: steps of a lease that it has
    completed for each second from hand-out to commit, which transfers are part of. Before that it
    gets no more than a first lease."""
    if claimed is None:
        return None
    if measured is None:
        return min(claimed, swarm.first_steps / swarm.lease_seconds)
    return min(claimed, TRANSFER_ROOM * measured)


def trusted_transfer(swarm: SwarmConfig, claimed: float) -> float:
    """The same of its transfers: what a claim lengthens a deadline by has a bound."""
    return min(claimed, SLOWEST_LEASES * swarm.lease_seconds)


def training_seconds(
    swarm: SwarmConfig,
    block: BlockView[Any],
    now: float,
    transfer_seconds: float,
    left: float = math.inf,
) -> float:
    """The time of a lease: until its update would come in together with the last of those who
    train the block already, so that nobody waits for another. Where they end too soon for that,
    or nobody trains it, as long as leases are in this run, which is also the most. Of a run that
    has only so much time `left`, no more than that: who took more would train while others have
    nothing to do. But never so short that transfers are most of it."""
    longest = min(swarm.lease_seconds, max(left, FILLING * swarm.lease_seconds, transfer_seconds))
    if block.busy_until <= soon(swarm, now, transfer_seconds):
        return longest
    return min(block.busy_until - now - transfer_seconds, longest)


def lease_steps(
    swarm: SwarmConfig, seconds: float, steps_per_second: float | None, left: int
) -> int:
    """As many steps as the worker does in the time of a lease; a few where its speed is unknown."""
    fitting = swarm.first_steps
    if steps_per_second is not None:
        fitting = round(seconds * steps_per_second)
    return max(1, min(fitting, swarm.most_steps, left))


def expected_at(
    block: BlockView[Any],
    now: float,
    steps: int,
    steps_per_second: float | None,
    transfer_seconds: float,
) -> float | None:
    """When a lease's update will be there, as far as can be told from how the last one went. One
    that was only rounded beyond the end of the others counts as theirs: among many, each rounded
    beyond the one before, the end would move on and on."""
    if steps_per_second is None:
        return None
    at = now + transfer_seconds + steps / steps_per_second
    is_rounded = at - 0.5 / steps_per_second <= block.busy_until
    return min(at, block.busy_until) if is_rounded else at


def expected_now(swarm: SwarmConfig, lease: LeaseView, steps_done: int, now: float) -> float | None:
    """The same by how a lease goes; as before, where it goes about as was thought."""
    before = lease.expected
    if steps_done == 0:
        return before
    at = lease.created + (now - lease.created) * lease.steps / steps_done
    is_near = before is not None and abs(at - before) < FILLING * swarm.lease_seconds
    return before if is_near else at


def lease_seconds(
    swarm: SwarmConfig, steps: int, steps_per_second: float | None, transfer_seconds: float = 0.0
) -> float:
    """Time until the deadline: expected time with room to spare, within bounds. A slow line is no
    reason to lose what was trained."""
    training = steps / steps_per_second if steps_per_second else swarm.lease_seconds
    training = min(training, SLOWEST_LEASES * swarm.lease_seconds)
    roomy = swarm.deadline_factor * (training + trusted_transfer(swarm, transfer_seconds))
    return max(swarm.shortest_deadline, min(roomy, swarm.longest_deadline))


def longest_seconds(swarm: SwarmConfig) -> float:
    """The most a lease lasts, whatever its worker says."""
    usual = swarm.deadline_factor * swarm.lease_seconds
    return max(swarm.shortest_deadline, min(swarm.longest_deadline, LONGEST_LEASES * usual))


def deadline_after_steps(
    swarm: SwarmConfig, lease: LeaseView, steps_done: int, before: float, now: float
) -> float:
    """The deadline once a worker has reported more steps than `before`, a time: the next steps may
    take several times as long as these, if at its pace the lease still comes to its end."""
    done = min(steps_done, lease.steps)
    left = (now - lease.created) * (lease.steps - done) / done
    if now + left > lease.created + longest_seconds(swarm):
        return lease.deadline
    return _extended(swarm, lease, swarm.deadline_factor * (now - before), now)


def deadline_after_chunk(swarm: SwarmConfig, lease: LeaseView, before: float, now: float) -> float:
    """The deadline once a chunk of a lease's update has come in: the next one may take several
    times as long as this, which came after `before`."""
    return _extended(swarm, lease, swarm.deadline_factor * (now - before), now)


def _extended(swarm: SwarmConfig, lease: LeaseView, seconds: float, now: float) -> float:
    """The deadline with at least half of these seconds left; moved seldom, and by enough."""
    wanted = max(swarm.shortest_deadline, seconds)
    if lease.deadline - now >= 0.5 * wanted:
        return lease.deadline
    return max(lease.deadline, min(now + wanted, lease.created + longest_seconds(swarm)))


def silent_at(swarm: SwarmConfig, heard: float) -> float:
    """When leases of a worker that was last heard of then expire, before any deadline."""
    return heard + swarm.heartbeat_timeout


def due_updates(block: BlockView[Update], swarm: SwarmConfig, now: float) -> Sequence[Update]:
    """The updates to merge now; none if it is better to wait."""
    return block.pending[:MOST_MERGED] if now >= due_at(block, swarm) else ()


def due_at(block: BlockView[UpdateView], swarm: SwarmConfig) -> float:
    """From when on the updates that wait are due, if nothing else happens; infinity: never.

    Enough is updates of min(quorum, workers on the block) workers. Late ones are not counted: they
    come while the others train, and would make those late in turn. Then those still training get
    the grace window; where nobody is, there is nothing to wait for. One that is far slower than the
    others must not hold up those who wait for what their own updates become.
    """
    if not block.pending:
        return math.inf
    if block.open_leases == 0:
        return -math.inf
    enough = min(swarm.quorum, len(block.workers))
    fresh = block.fresh_since
    at_last = block.waiting_since + QUORUM_LEASES * swarm.lease_seconds
    if len(fresh) < enough:
        return at_last
    return min(at_last, fresh[enough - 1] + swarm.grace_seconds)


def base_of(base_version: int, continued_into: int | None) -> int:
    """The version an update counts as trained from: one that continued another has seen all of its
    worker's own work that this one was merged into."""
    return base_version if continued_into is None else max(base_version, continued_into)


def chain_factors(updates: Sequence[UpdateView]) -> dict[Hashable, float]:
    """By lease, how many times what was learned in it counts in the mean of these updates. What
    several workers learned side by side is averaged; but what one learned in leases that continue
    each other adds up, as if it had been one lease."""
    first: dict[Hashable, Hashable] = {}
    steps: Counter[Hashable] = Counter()
    for update in sorted(updates, key=lambda update: update.committed):
        chain = first[update.lease] = first.get(update.continues, update.lease)
        steps[chain] += update.steps
    return {update.lease: steps[first[update.lease]] / update.steps for update in updates}


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
) -> UpdateRefusal | None:
    """Why an update that has just arrived does not count; None where it does. Its text is its own
    where its lease was held to the end, or nobody has had the text since."""
    if weight(swarm, version, base_version) == 0.0:
        return UpdateRefusal.TOO_STALE
    return None if text_is_its_own else UpdateRefusal.HANDED_OUT_AGAIN


def delta_codec(swarm: SwarmConfig, block: BlockView[Any], updates: int) -> Codec | None:
    """For the delta to a version made of this many updates. Once all text is handed out, updates
    are the final ones of their workers."""
    return registry.delta_codec(swarm, updates, final=block.to_hand_out == 0)


def most_moved(train: TrainConfig, swarm: SwarmConfig, steps: int, size: float = 0.0) -> float:
    """The root mean square by which this many steps can have moved weights of this `size`. With a
    codec an update may also tell what those before it left out."""
    counted = steps if swarm.codec == "none" else max(steps, swarm.most_steps)
    return counted * train.lr * (_adam_reach(train) + train.weight_decay * size)


def _adam_reach(train: TrainConfig) -> float:
    """The most AdamW can move a number in one step, in learning rates, whatever the gradients were
    (Cauchy-Schwarz on its two moments): 1.2 by default. Muon's steps are shorter."""
    ratio = min(train.beta1**2 / max(train.beta2, 1e-12), 1.0 - 1e-12)
    return max(1.0, (1.0 - train.beta1) / math.sqrt((1.0 - train.beta2) * (1.0 - ratio)))


def is_final(block: BlockView[Any], updates: Sequence[UpdateView]) -> bool:
    """Whether these updates make a block's last version. Nobody trains from it, so that it may
    come down whole, and nothing is left out of it."""
    merged = block.merged_batches + sum(update.steps for update in updates)
    return merged == block.total_batches


def useful_differences(sizes: Mapping[int, int], whole: int) -> set[int]:
    """Of the differences that lead to versions, those from which on it takes fewer bytes to follow
    them all than to fetch the newest version whole."""
    useful, together = set(), 0
    for version in sorted(sizes, reverse=True):
        together += sizes[version]
        if together >= whole:
            break
        useful.add(version)
    return useful


LONGEST_INTERVAL = 10.0
SHORTEST_INTERVAL = 0.2
SHARE_OF_LEASE = 0.25


def report_interval(seconds_left: float) -> float:
    """Seconds between two signs of life, so that a lost lease is noticed within a part of it."""
    return max(SHORTEST_INTERVAL, min(LONGEST_INTERVAL, SHARE_OF_LEASE * seconds_left))
