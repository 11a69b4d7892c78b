"""Which block a worker is given: examples, and properties that hold for every state."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.blocks import NOW, SWARM, block, merged, some_blocks, update

from blocktrain.config import SwarmConfig
from blocktrain.swarm.assignment import (
    IDLE_WAIT,
    MERGE_WAIT,
    NO_OTHERS,
    STAY_MARGIN,
    WorkersByBlock,
    WorkRequest,
    choose_block,
    may_continue,
    place_in_schedule,
    wait_seconds,
    waits_for_own_update,
)
from blocktrain.swarm.order import Order
from blocktrain.swarm.state import BlockState, PendingUpdate

LONG = SWARM.lease_seconds  # of transfers: too long to wait for one's own update


def choose(
    blocks: Sequence[BlockState],
    own: int | None = None,
    *,
    worker: str = "ann",
    allowed: Collection[int] | None = None,
    trained: str | None = None,
    transfer_seconds: float = 0.0,
    now: float = NOW,
    lead: float = 0.0,
    others: WorkersByBlock = NO_OTHERS,
) -> int | None:
    """The index of the block that a worker gets which has trained its `own`."""
    request = WorkRequest(worker, own, allowed, trained, transfer_seconds=transfer_seconds)
    block = choose_block(SWARM, blocks, request, now, order=Order(lead), others=others)
    return None if block is None else block.index


def continues(
    block: BlockState, lease: str | None, transfer_seconds: float = 0.0, now: float = NOW
) -> bool:
    request = WorkRequest("ann", 0, trained_lease=lease, transfer_seconds=transfer_seconds)
    return may_continue(SWARM, block, request, now)


def test_the_block_that_is_furthest_behind_goes_first():
    assert choose([merged(0, 50), merged(1, 20), merged(2, 30)]) == 1


def test_leased_and_pending_batches_count_as_done():
    """Otherwise all workers would get the same block."""
    leased = block(0, next_batch=40, leased_batches=40, open_leases=1, workers=frozenset({"bob"}))
    waiting = block(1, next_batch=30, pending=(update("bob", steps=30),))
    assert choose([leased, waiting]) == 1
    assert choose([leased, waiting, merged(2, 20)]) == 2


def test_among_equals_the_one_with_fewer_workers_then_the_first():
    shared = {"next_batch": 10, "leased_batches": 10}
    two = block(0, **shared, open_leases=2, workers=frozenset({"bob", "eve"}))
    one = block(1, **shared, open_leases=1, workers=frozenset({"bob"}))
    assert choose([two, one]) == 1
    assert choose([block(0), block(1)]) == 0


def test_blocks_of_different_length_are_compared_by_share():
    short = block(0, total_batches=10, merged_batches=4, next_batch=4)
    assert choose([short, merged(1, 30)]) == 1


@pytest.mark.parametrize(("ahead", "stays"), [(0, True), (25, True), (26, False), (60, False)])
def test_a_worker_stays_with_its_block_while_that_is_less_than_a_quarter_of_a_run_ahead(
    ahead: int, stays: bool
):
    blocks = [merged(0, 20), merged(1, 20 + ahead)]
    assert choose(blocks, own=1) == (1 if stays else 0)


def trained_by(state: BlockState, *names: str) -> BlockState:
    return replace(state, workers=frozenset(names))


def test_a_block_with_a_worker_is_left_to_that_worker():
    """Of two workers far ahead, one moves to the block behind; the other goes to an idle one."""
    lags, idle = trained_by(merged(0, 4), "bob"), merged(1, 50)
    assert choose([lags, idle, merged(2, 54)], own=2) == 2
    assert choose([lags, merged(1, 28), merged(2, 54)], own=2) == 1
    assert choose([trained_by(merged(0, 40), "ann", "bob"), idle, merged(2, 54)], own=0) == 1


def test_a_block_with_far_more_to_do_is_shared():
    assert choose([trained_by(merged(0, 0), "bob"), merged(1, 80)], own=1) == 0
    assert choose([trained_by(merged(0, 0), "bob", "eve"), merged(1, 60)], own=1) == 1


def test_among_many_one_more_or_less_moves_nobody():
    crowd = frozenset(f"worker {number}" for number in range(20))
    blocks = [
        replace(merged(0, 50), workers=crowd | {"ann"}),
        replace(merged(1, 50), workers=crowd - {"worker 0", "worker 1"}),
    ]
    assert choose(blocks, own=0) == 0


def test_a_worker_counts_at_the_block_it_was_last_given():
    """Between a version and the next leases of its workers, their block looks empty."""
    blocks = [merged(0, 50), merged(1, 50)]
    own = trained_by(blocks[0], "ann", "bob")
    assert choose([own, blocks[1]], own=0) == 1
    assert choose([own, blocks[1]], own=0, others={0: 1, 1: 1}) == 0
    assert choose(blocks, others={0: 1}) == 1


def test_a_worker_leaves_a_block_that_has_no_work():
    assert choose([merged(0, 0), merged(1, 100)], own=1) == 0


def test_only_blocks_that_the_worker_can_train():
    blocks = [merged(0, 0), merged(1, 50)]
    assert choose(blocks, allowed=(1,)) == 1
    assert choose(blocks, allowed=(7,)) is None
    assert choose(blocks, allowed=()) is None
    assert choose(blocks, own=0, allowed=(1,)) == 1


def test_returned_text_is_work():
    assert choose([block(0, next_batch=100, returned_batches=5)]) == 0
    assert choose([block(0, next_batch=100)]) is None


def test_a_worker_waits_for_its_own_update_rather_than_build_on_the_version_before():
    finishing = block(0, workers=frozenset({"ann"}), finishing=frozenset({"ann"}))
    assert choose([finishing], own=0) is None
    assert choose([finishing, merged(1, 50)], own=0) is None
    assert choose([finishing], worker="bob") == 0


def test_a_worker_waits_for_its_own_update_unless_that_takes_long():
    ahead = replace(merged(0, 60), finishing=frozenset({"ann"}))
    assert choose([ahead, merged(1, 0)], own=0) is None
    blocks = [replace(merged(0, 20), finishing=frozenset({"ann"})), merged(1, 20)]
    assert choose(blocks, own=0, transfer_seconds=LONG) == 1
    swarm = SwarmConfig(lease_seconds=20.0)
    assert waits_for_own_update(swarm, 5.0)
    assert not waits_for_own_update(swarm, 5.1)


def test_a_block_of_a_cascade_begins_when_the_one_before_has_its_lead():
    assert choose([merged(0, 49), merged(1, 0)], lead=0.5) == 0
    assert choose([merged(0, 60), merged(1, 0)], lead=0.5) == 1
    assert choose([merged(0, 60), merged(1, 11)], lead=0.5) == 0
    assert choose([merged(0, 100), merged(1, 99), merged(2, 0)], lead=0.5) == 2


def test_only_merged_batches_count_as_lead():
    on_its_way = block(0, next_batch=90, pending=(update("bob", steps=90),))
    assert choose([on_its_way, merged(1, 0)], lead=0.5) == 0
    assert choose([replace(on_its_way, next_batch=100), merged(1, 0)], lead=0.5) is None


def test_a_finished_block_needs_no_lead():
    assert choose([merged(0, 100), merged(1, 80)], lead=1.0) == 1


def test_workers_spread_over_the_blocks_that_are_open():
    """A worker that shares a block leaves for an idle one; a worker alone stays."""
    shared = replace(merged(0, 60), workers=frozenset({"ann", "bob"}))
    assert choose([shared, merged(1, 0)], own=0, lead=0.5) == 1
    taken = replace(merged(1, 0), workers=frozenset({"bob"}))
    assert choose([merged(0, 60), taken], lead=0.5) == 0
    assert choose([shared, taken], own=0, lead=0.5) == 0


@pytest.mark.parametrize("lead", [0.1, 0.25, 0.5])
def test_a_worker_alone_on_its_block_stays_to_the_end(lead: float):
    """Also while its own update is being merged, however far behind an idle block is."""
    for done in (60, 99):
        assert choose([merged(0, done), merged(1, 0)], own=0, lead=lead) == 0
    finishing = replace(merged(0, 80), finishing=frozenset({"ann"}), workers=frozenset({"ann"}))
    assert choose([finishing, merged(1, 0)], own=0, lead=lead) is None
    assert choose([merged(0, 100), merged(1, 0)], own=0, lead=lead) == 1


def test_a_workers_pending_update_does_not_close_its_own_block():
    """Two equally fast workers keep their blocks, whichever update arrives first."""
    before = replace(merged(0, 60), workers=frozenset({"bob"}))
    own = block(1, merged_batches=0, next_batch=20, pending=(update(steps=20),))
    assert choose([before, replace(own, workers=frozenset({"ann"}))], own=1, lead=0.5) == 1
    assert choose([before, replace(own, workers=frozenset({"eve"}))], own=None, lead=0.5) == 0


@settings(deadline=None)
@given(some_blocks, st.floats(0.0, 1.0))
def test_a_lead_never_leaves_a_run_without_work(blocks: tuple[BlockState, ...], lead: float):
    """The first unfinished block is always open."""
    first = next((b for b in blocks if b.merged_batches < b.total_batches), None)
    if first is not None and first.to_hand_out and "ann" not in first.finishing:
        assert choose(blocks, transfer_seconds=LONG, lead=lead) is not None


def work_each(state: BlockState, own: int | None) -> float:
    """For each worker if this one trains the block too; on its own block it is counted already."""
    crowd = len(state.workers - {"ann"} if state.index == own else state.workers) + 1
    return state.to_hand_out / state.total_batches / crowd


@settings(deadline=None)
@given(some_blocks, st.integers(0, 5) | st.none(), st.sets(st.integers(0, 5)) | st.none())
def test_whatever_is_chosen_can_be_trained_by_this_worker_now(
    blocks: tuple[BlockState, ...], own: int | None, allowed: set[int] | None
):
    candidates = [
        state
        for state in blocks
        if state.to_hand_out > 0
        and "ann" not in state.finishing
        and (allowed is None or state.index in allowed)
    ]
    chosen = choose(blocks, own, allowed=allowed, transfer_seconds=LONG)
    assert (chosen is None) == (not candidates)
    if chosen is not None:
        block = blocks[chosen]
        assert block in candidates
        missed = max(work_each(state, own) for state in candidates) - work_each(block, own)
        assert missed * len(block.workers | {"ann"}) <= (STAY_MARGIN + 1e-9 if chosen == own else 0)
    if choose(blocks, own, allowed=allowed) != chosen:
        assert any(state.index == own and "ann" in state.finishing for state in blocks)


@settings(deadline=None)
@given(some_blocks, st.integers(0, 5) | st.none(), st.randoms())
def test_the_choice_does_not_depend_on_the_order_of_the_blocks(
    blocks: tuple[BlockState, ...], own: int | None, draws: Any
):
    mixed = list(blocks)
    draws.shuffle(mixed)
    for lead in (0.0, 0.3):
        assert choose(mixed, own, lead=lead) == choose(blocks, own, lead=lead)


def test_a_worker_with_an_update_on_its_way_asks_again_sooner():
    blocks = [block(0), block(1, workers=frozenset({"ann"}))]
    assert wait_seconds(blocks, "ann") == MERGE_WAIT
    assert wait_seconds(blocks, "bob") == IDLE_WAIT


def shared_block(**changes: Any) -> BlockState:
    fields = {
        "index": 0, "version": 3, "merged_batches": 30, "next_batch": 60, "total_batches": 100,
        "returned_batches": 0, "leased_batches": 0, "open_leases": 0, "finishing": frozenset(),
        "workers": frozenset({"ann", "bob"}), "pending": (), **changes,
    }  # fmt: skip
    return BlockState(**fields)


def test_a_lease_may_be_continued_if_its_update_is_the_only_one_not_merged():
    alone = {"workers": frozenset({"ann"})}
    sent = shared_block(sending=(("ann", "one", 10),), **alone)
    assert continues(sent, "one")
    assert not continues(sent, "two")
    assert not continues(sent, None)
    update = PendingUpdate("one", "ann", 3, 10, 5.0)
    assert continues(shared_block(pending=(update,), **alone), "one")
    assert not continues(shared_block(**alone), "one")  # it is merged already
    both = shared_block(sending=(("ann", "two", 10),), pending=(update,), **alone)
    assert not continues(both, "two")


def test_workers_that_share_a_block_wait_for_the_merge():
    sent = shared_block(sending=(("ann", "one", 10), ("bob", "two", 10)))
    assert not continues(sent, "one")
    assert continues(sent, "one", transfer_seconds=LONG)  # waiting would take too long
    assert not continues(sent, "two", transfer_seconds=LONG)
    assert choose([sent], own=0, trained="one", transfer_seconds=LONG) == 0
    busy = shared_block(sending=sent.sending, finishing=frozenset({"ann", "bob"}))
    assert choose([busy], own=0, trained="one") is None


def test_workers_that_share_a_block_train_on_if_others_take_longer():
    sent = shared_block(
        sending=(("ann", "one", 10),), finishing=frozenset({"ann"}), busy_until=500.0
    )
    for now, goes_on in ((496.0, True), (497.0, False), (498.0, False)):
        assert continues(sent, "one", now=now) == goes_on
        assert choose([sent], own=0, trained="one", now=now) == (0 if goes_on else None)
    ahead = shared_block(sending=(("ann", "one", 10), ("ann", "two", 10)), busy_until=500.0)
    assert not continues(ahead, "two", now=0.0)  # two updates are not merged


def test_a_worker_waits_for_its_own_late_update_too():
    """Even a late update, or one that continues another."""
    late = shared_block(sending=(("ann", "one", 10),))
    assert choose([late], own=0, trained="one") is None
    assert choose([late], own=0) == 0  # as without a codec


def test_the_schedule_assumes_that_all_workers_are_equally_far():
    sent = shared_block(sending=(("ann", "one", 10),))
    assert place_in_schedule(sent, "ann", continuing=True) == (50, 2)
    assert place_in_schedule(sent, "ann") == (30, 2)
    assert place_in_schedule(sent, "eve") == (30, 3)
