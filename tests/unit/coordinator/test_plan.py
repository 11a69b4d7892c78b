"""Decisions on made-up states: examples, and properties that hold for every state."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktrain.codec.sparse import Sparse
from blocktrain.config import SwarmConfig
from blocktrain.swarm.plan import (
    FILLING,
    IDLE_WAIT,
    MERGE_WAIT,
    MILLIONTH,
    QUORUM_LEASES,
    SLOWEST_LEASES,
    STAY,
    UpdateRefusal,
    choose_block,
    deadline_after_chunk,
    deadline_after_steps,
    delta_codec,
    due_at,
    due_updates,
    expected_at,
    expected_now,
    is_patient,
    lease_seconds,
    lease_steps,
    longest_seconds,
    refusal,
    seconds_left,
    soon,
    training_seconds,
    trusted_speed,
    useful_differences,
    wait_seconds,
    weight,
    without_stale,
)
from blocktrain.swarm.state import BlockState, PendingUpdate

NOW = 1000.0
SWARM = SwarmConfig(quorum=2, grace_seconds=5.0)
WORKERS = ("ann", "bob", "eve")


def block(index: int = 0, **changes: Any) -> BlockState:
    """A block of 100 batches that nobody has touched."""
    fresh = BlockState(
        index=index, version=0, merged_batches=0, next_batch=0, total_batches=100,
        returned_batches=0, leased_batches=0, open_leases=0, workers=frozenset(),
        finishing=frozenset(), pending=(),
    )  # fmt: skip
    return replace(fresh, **changes)


def merged(index: int, batches: int, **changes: Any) -> BlockState:
    return block(index, merged_batches=batches, next_batch=batches, **changes)


def update(worker: str = "ann", committed: float = NOW, steps: int = 10) -> PendingUpdate:
    return PendingUpdate(f"lease of {worker}", worker, 0, steps, committed)


def chosen(
    blocks: list[BlockState], held: int | None = None, allowed: tuple[int, ...] | None = None
) -> int | None:
    found = choose_block(blocks, "ann", held, allowed)
    return None if found is None else found.index


@st.composite
def states(draw: st.DrawFn, index: int = 0) -> BlockState:
    """Any state a block can be in."""
    total = draw(st.integers(1, 200))
    handed_out = draw(st.integers(0, total))
    cuts = sorted(draw(st.integers(0, handed_out)) for _ in range(3))
    done, leased, waiting = cuts[0], cuts[1] - cuts[0], cuts[2] - cuts[1]
    holders = draw(st.sets(st.sampled_from(WORKERS), min_size=1)) if leased else set()
    senders = draw(st.lists(st.sampled_from(WORKERS), min_size=1, max_size=3)) if waiting else []
    times = st.floats(NOW - 100, NOW)
    shares = [waiting // len(senders)] * len(senders) if senders else []
    pending = tuple(
        update(worker, draw(times), steps) for worker, steps in zip(senders, shares, strict=True)
    )
    workers = frozenset(holders) | frozenset(senders)
    finishing = draw(st.sets(st.sampled_from(sorted(workers)))) if workers else set()
    return BlockState(
        index=index,
        version=draw(st.integers(0, 5)),
        merged_batches=done,
        next_batch=handed_out,
        total_batches=total,
        returned_batches=handed_out - cuts[2],
        leased_batches=leased,
        open_leases=len(holders),
        workers=workers,
        finishing=frozenset(finishing),
        pending=pending,
    )


some_blocks = st.integers(1, 5).flatmap(
    lambda count: st.tuples(*(states(index) for index in range(count)))
)
swarms = st.builds(
    SwarmConfig,
    lease_seconds=st.floats(0.1, 1000),
    first_steps=st.integers(1, 500),
    most_steps=st.integers(1, 500),
    deadline_factor=st.floats(1, 10),
    shortest_deadline=st.floats(0.5, 500),
    quorum=st.integers(1, 4),
    grace_seconds=st.floats(0, 60),
    most_stale=st.integers(0, 5),
    late_discount=st.floats(0.01, 1),
)
speeds = st.none() | st.floats(1e-3, 1e5)


# Which block


def test_the_block_that_lags_goes_first():
    assert chosen([merged(0, 50), merged(1, 20), merged(2, 30)]) == 1


def test_what_is_in_somebodys_hands_counts_as_done():
    """Else everybody would be sent to the same block."""
    leased = block(0, next_batch=40, leased_batches=40, open_leases=1, workers=frozenset({"bob"}))
    waiting = block(1, next_batch=30, pending=(update("bob", steps=30),))
    assert chosen([leased, waiting]) == 1
    assert chosen([leased, waiting, merged(2, 20)]) == 2


def test_among_equals_the_one_with_fewer_workers_then_the_first():
    shared = {"next_batch": 10, "leased_batches": 10}
    two = block(0, **shared, open_leases=2, workers=frozenset({"bob", "eve"}))
    one = block(1, **shared, open_leases=1, workers=frozenset({"bob"}))
    assert chosen([two, one]) == 1
    assert chosen([block(0), block(1)]) == 0


def test_blocks_of_different_length_are_compared_by_share():
    short = block(0, total_batches=10, merged_batches=4, next_batch=4)
    assert chosen([short, merged(1, 30)]) == 1


@pytest.mark.parametrize(("ahead", "stays"), [(0, True), (25, True), (26, False), (60, False)])
def test_a_worker_stays_with_its_block_while_that_is_less_than_a_quarter_of_a_run_ahead(
    ahead: int, stays: bool
):
    blocks = [merged(0, 20), merged(1, 20 + ahead)]
    assert chosen(blocks, held=1) == (1 if stays else 0)


def trained_by(state: BlockState, *names: str) -> BlockState:
    return replace(state, workers=frozenset(names))


def test_a_block_that_somebody_trains_is_left_to_it():
    """Two who are both far ahead do not both go to the one that lags: the second goes where nobody
    is."""
    lags, idle = trained_by(merged(0, 4), "bob"), merged(1, 50)
    assert chosen([lags, idle, merged(2, 54)], held=2) == 2
    assert chosen([lags, merged(1, 28), merged(2, 54)], held=2) == 1
    assert chosen([trained_by(merged(0, 40), "ann", "bob"), idle, merged(2, 54)], held=0) == 1


def test_a_block_with_far_more_to_do_is_shared():
    assert chosen([trained_by(merged(0, 0), "bob"), merged(1, 80)], held=1) == 0
    assert chosen([trained_by(merged(0, 0), "bob", "eve"), merged(1, 60)], held=1) == 1


def test_among_many_one_more_or_less_moves_nobody():
    crowd = frozenset(f"worker {number}" for number in range(20))
    blocks = [
        replace(merged(0, 50), workers=crowd | {"ann"}),
        replace(merged(1, 50), workers=crowd - {"worker 0", "worker 1"}),
    ]
    assert chosen(blocks, held=0) == 0


def test_who_was_last_given_a_block_trains_it_though_it_holds_nothing_of_it_now():
    """Between a version and the next leases of those who made it, their block looks empty."""
    blocks = [merged(0, 50), merged(1, 50)]
    own = trained_by(blocks[0], "ann", "bob")
    assert choose_block([own, blocks[1]], "ann", 0, None) == blocks[1]
    assert choose_block([own, blocks[1]], "ann", 0, None, others={0: 1, 1: 1}) == own
    assert choose_block(blocks, "ann", None, None, others={0: 1}) == blocks[1]


def test_a_worker_leaves_a_block_that_has_no_work():
    assert chosen([merged(0, 0), merged(1, 100)], held=1) == 0


def test_only_blocks_that_the_worker_can_train():
    blocks = [merged(0, 0), merged(1, 50)]
    assert chosen(blocks, allowed=(1,)) == 1
    assert chosen(blocks, allowed=(7,)) is None
    assert chosen(blocks, allowed=()) is None
    assert chosen(blocks, held=0, allowed=(1,)) == 1


def test_a_returned_range_is_work():
    assert chosen([block(0, next_batch=100, returned_batches=5)]) == 0
    assert chosen([block(0, next_batch=100)]) is None


def test_a_worker_waits_for_its_own_update_rather_than_build_on_the_version_before():
    finishing = block(0, workers=frozenset({"ann"}), finishing=frozenset({"ann"}))
    assert chosen([finishing], held=0) is None
    assert chosen([finishing, merged(1, 50)], held=0) is None
    assert choose_block([finishing], "bob", None, None) == finishing


def test_a_worker_waits_for_its_own_update_unless_that_takes_long():
    ahead = replace(merged(0, 60), finishing=frozenset({"ann"}))
    assert chosen([ahead, merged(1, 0)], held=0) is None
    blocks = [replace(merged(0, 20), finishing=frozenset({"ann"})), merged(1, 20)]
    assert choose_block(blocks, "ann", 0, None, patient=False) == blocks[1]
    swarm = SwarmConfig(lease_seconds=20.0)
    assert is_patient(swarm, 5.0)
    assert not is_patient(swarm, 5.1)


def led(blocks: list[BlockState], held: int | None = None, lead: float = 0.5) -> int | None:
    found = choose_block(blocks, "ann", held, None, lead=lead)
    return None if found is None else found.index


def test_a_block_of_a_cascade_begins_when_the_one_before_has_its_lead():
    assert led([merged(0, 49), merged(1, 0)]) == 0
    assert led([merged(0, 60), merged(1, 0)]) == 1
    assert led([merged(0, 60), merged(1, 11)]) == 0
    assert led([merged(0, 100), merged(1, 99), merged(2, 0)]) == 2


def test_what_the_block_before_has_not_merged_is_no_lead():
    on_its_way = block(0, next_batch=90, pending=(update("bob", steps=90),))
    assert led([on_its_way, merged(1, 0)]) == 0
    assert led([replace(on_its_way, next_batch=100), merged(1, 0)]) is None


def test_nobody_keeps_behind_a_finished_block():
    assert led([merged(0, 100), merged(1, 80)], lead=1.0) == 1


def test_workers_spread_over_the_blocks_that_are_open():
    """Who shares a block leaves for one that nobody trains; who is alone stays."""
    shared = replace(merged(0, 60), workers=frozenset({"ann", "bob"}))
    assert led([shared, merged(1, 0)], held=0) == 1
    taken = replace(merged(1, 0), workers=frozenset({"bob"}))
    assert led([merged(0, 60), taken]) == 0
    assert led([shared, taken], held=0) == 0


@pytest.mark.parametrize("lead", [0.1, 0.25, 0.5])
def test_who_is_alone_on_its_block_stays_to_its_end(lead: float):
    """Also while its own update becomes a version, however far behind an empty block is."""
    for done in (60, 99):
        assert led([merged(0, done), merged(1, 0)], held=0, lead=lead) == 0
    finishing = replace(merged(0, 80), finishing=frozenset({"ann"}), workers=frozenset({"ann"}))
    assert led([finishing, merged(1, 0)], held=0, lead=lead) is None
    assert led([merged(0, 100), merged(1, 0)], held=0, lead=lead) == 1


def test_what_a_worker_has_under_way_does_not_close_its_own_block_to_it():
    """Two that are equally fast keep their blocks, whoever's update comes a moment later."""
    before = replace(merged(0, 60), workers=frozenset({"bob"}))
    own = block(1, merged_batches=0, next_batch=20, pending=(update(steps=20),))
    assert led([before, replace(own, workers=frozenset({"ann"}))], held=1) == 1
    assert led([before, replace(own, workers=frozenset({"eve"}))], held=None) == 0


@settings(deadline=None)
@given(some_blocks, st.floats(0.0, 1.0))
def test_a_lead_never_leaves_a_run_without_work(blocks: tuple[BlockState, ...], lead: float):
    """The first block that is not finished is always open: if it has text, somebody trains it."""
    first = next((b for b in blocks if b.merged_batches < b.total_batches), None)
    if first is not None and first.to_hand_out and "ann" not in first.finishing:
        assert choose_block(blocks, "ann", None, None, patient=False, lead=lead) is not None


def to_do_each(state: BlockState, held: int | None) -> float:
    """For each who would train a block: one more than do, but on its own this worker is counted."""
    crowd = len(state.workers - {"ann"} if state.index == held else state.workers) + 1
    return state.to_hand_out / state.total_batches / crowd


@settings(deadline=None)
@given(some_blocks, st.integers(0, 5) | st.none(), st.sets(st.integers(0, 5)) | st.none())
def test_whatever_is_chosen_can_be_trained_by_this_worker_now(
    blocks: tuple[BlockState, ...], held: int | None, allowed: set[int] | None
):
    choices = [
        state
        for state in blocks
        if state.to_hand_out > 0
        and "ann" not in state.finishing
        and (allowed is None or state.index in allowed)
    ]
    found = choose_block(blocks, "ann", held, allowed, patient=False)
    assert (found is None) == (not choices)
    if found is not None:
        assert found in choices
        short = max(to_do_each(state, held) for state in choices) - to_do_each(found, held)
        assert short * len(found.workers | {"ann"}) <= (STAY + 1e-9 if found.index == held else 0)
    if choose_block(blocks, "ann", held, allowed) != found:
        assert any(state.index == held and "ann" in state.finishing for state in blocks)


@settings(deadline=None)
@given(some_blocks, st.integers(0, 5) | st.none(), st.randoms())
def test_the_choice_does_not_depend_on_the_order_of_the_blocks(
    blocks: tuple[BlockState, ...], held: int | None, draws: Any
):
    mixed = list(blocks)
    draws.shuffle(mixed)
    for lead in (0.0, 0.3):
        assert choose_block(mixed, "ann", held, None, lead=lead) == choose_block(
            blocks, "ann", held, None, lead=lead
        )


def test_who_has_an_update_on_its_way_asks_again_sooner_than_who_has_nothing():
    blocks = [block(0), block(1, workers=frozenset({"ann"}))]
    assert wait_seconds(blocks, "ann") == MERGE_WAIT
    assert wait_seconds(blocks, "bob") == IDLE_WAIT


# How much, and until when


def fitted(swarm: SwarmConfig, speed: float | None, left: int, busy_for: float = -math.inf) -> int:
    """The steps of a lease on a block that others train for so many seconds more."""
    seconds = training_seconds(swarm, block(busy_until=NOW + busy_for), NOW, 0.0)
    return lease_steps(swarm, seconds, speed, left)


def test_a_first_lease_is_a_few_steps():
    assert fitted(SWARM, None, 1000) == SWARM.first_steps


@pytest.mark.parametrize(
    ("speed", "left", "steps"),
    [(2.0, 1000, 60), (0.001, 1000, 1), (1000.0, 1000, 100), (2.0, 7, 7), (None, 3, 3)],
)
def test_a_lease_is_fitted_to_the_speed_the_most_and_what_is_left(
    speed: float | None, left: int, steps: int
):
    assert fitted(SWARM, speed, left) == steps


remaining = st.just(-math.inf) | st.floats(-100, 2000)


@settings(deadline=None)
@given(swarms, speeds, st.integers(1, 1000), remaining)
def test_a_lease_fits_its_time_and_its_bounds(
    swarm: SwarmConfig, speed: float | None, left: int, busy_for: float
):
    steps = fitted(swarm, speed, left, busy_for)
    assert 1 <= steps <= min(swarm.most_steps, left)
    if speed is not None and steps > 1:
        assert (steps - 0.5) / speed <= swarm.lease_seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    ("busy_for", "steps"),
    [(-math.inf, 60), (-5.0, 60), (3.0, 60), (3.5, 7), (20.0, 40), (50.0, 60)],
)
def test_a_lease_ends_with_those_that_others_train(busy_for: float, steps: int):
    """Unless that is hardly worth a lease, or longer than a lease."""
    assert fitted(SWARM, 2.0, 1000, busy_for) == steps


def test_what_a_worker_transfers_is_part_of_the_time_until_others_end():
    shared = block(busy_until=NOW + 20.0)
    assert training_seconds(SWARM, shared, NOW, 4.0) == 16.0
    assert soon(SWARM, NOW, 4.0) == NOW + 7.0
    assert training_seconds(SWARM, shared, NOW, 17.0) == SWARM.lease_seconds


@settings(deadline=None)
@given(swarms, st.floats(1e-3, 1e5), st.floats(0, 100), st.floats(0, 2000))
def test_updates_of_those_who_share_a_block_come_in_within_a_step_of_each_other(
    swarm: SwarmConfig, speed: float, transfer: float, busy_for: float
):
    shared = block(busy_until=NOW + busy_for)
    seconds = training_seconds(swarm, shared, NOW, transfer)
    steps = lease_steps(replace(swarm, most_steps=10**9), seconds, speed, 10**9)
    comes = expected_at(block(), NOW, steps, speed, transfer)
    assert comes is not None
    fills = FILLING * swarm.lease_seconds < busy_for - transfer <= swarm.lease_seconds
    if fills and abs(busy_for - transfer - FILLING * swarm.lease_seconds) > 1e-6:
        assert abs(comes - shared.busy_until) <= 1 / speed + 1e-6


# How much of what is left of the run


def millionths(steps_per_second: float) -> int:
    return round(steps_per_second / MILLIONTH)


def shared(
    left: int, speeds: list[float], transfer: float = 0.0, swarm: SwarmConfig = SWARM
) -> list[tuple[int, float]]:
    """(steps, when it ends) of the leases of workers who all ask now, while so many steps are left
    of the run's only block."""
    given: list[tuple[int, float]] = []
    waiting = sum(speeds)
    for number, speed in enumerate(speeds):
        waiting -= speed
        busy_until = max((at for _, at in given), default=-math.inf)
        last = block(total_batches=left, busy_until=busy_until, workers=frozenset("x" * number))
        others = {0: millionths(sum(speeds[:number])), None: millionths(waiting)}
        end = seconds_left(swarm, [last], NOW, speed, others)
        seconds = training_seconds(swarm, last, NOW, transfer, end)
        if left:
            steps = lease_steps(swarm, seconds, speed, left)
            left -= steps
            given.append((steps, NOW + transfer + steps / speed))
    return given


def test_the_last_steps_are_shared_out_by_speed():
    assert [steps for steps, _ in shared(40, [1.0, 1.0, 2.0])] == [10, 10, 20]
    assert [steps for steps, _ in shared(40, [2.0, 1.0, 1.0])] == [20, 10, 10]
    assert [steps for steps, _ in shared(40, [1.0])] == [30]


def test_text_that_others_are_about_to_train_counts_by_when_they_end():
    """Ann alone has ten seconds of text left, and bob will be free to help with it, or not."""
    blocks = [block(0, total_batches=10), block(1, next_batch=100, busy_until=NOW + 4.0)]
    assert seconds_left(SWARM, blocks, NOW, 1.0, {1: millionths(1.0)}) == 7.0
    assert seconds_left(SWARM, blocks, NOW, 1.0, {}) == 10.0
    later = replace(blocks[1], busy_until=NOW + 20.0)
    assert seconds_left(SWARM, [blocks[0], later], NOW, 1.0, {1: millionths(1.0)}) > 10.0


def test_who_has_no_speed_yet_leaves_nothing_to_others():
    assert seconds_left(SWARM, [block()], NOW, None, {None: millionths(5.0)}) == math.inf


@pytest.mark.parametrize(("transfer", "steps"), [(0.0, 3), (2.0, 3), (5.0, 5), (60.0, 30)])
def test_no_lease_is_so_short_that_it_is_hardly_worth_its_transfers(transfer: float, steps: int):
    assert shared(40, [1.0, 100.0], transfer)[0][0] == steps


@settings(deadline=None)
@given(swarms, st.floats(1e-3, 1e5), st.floats(0, 100), st.integers(1, 1000), remaining)
def test_a_worker_that_is_alone_takes_what_it_would_take_anyway(
    swarm: SwarmConfig, speed: float, transfer: float, left: int, busy_for: float
):
    last = block(total_batches=left, busy_until=NOW + busy_for)
    end = seconds_left(swarm, [last], NOW, speed, {})
    cut = training_seconds(swarm, last, NOW, transfer, end)
    whole = training_seconds(swarm, last, NOW, transfer)
    assert lease_steps(swarm, cut, speed, left) == lease_steps(swarm, whole, speed, left)


@settings(deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=8), st.integers(1, 300))
def test_whoever_trains_the_last_steps_ends_with_the_others(speeds: list[float], left: int):
    """To a step, or to the shortest lease, where all that is left fits into one lease of each."""
    swarm = replace(SWARM, most_steps=10**9)
    together = left / sum(speeds)
    for steps, at in shared(left, speeds, swarm=swarm):
        shortest = max(together, FILLING * swarm.lease_seconds)
        rounded = len(speeds) * 0.5 / min(speeds)
        assert steps == 1 or at - NOW <= min(shortest, swarm.lease_seconds) + rounded + 1e-6


# When it is done


@dataclass
class Trained:
    """A lease that was given ten seconds ago."""

    steps: int = 60
    created: float = NOW - 10.0
    deadline: float = NOW + 110.0
    expected: float | None = NOW + 20.0


def test_nobody_knows_when_a_worker_of_unknown_speed_is_done():
    assert expected_at(block(), NOW, 10, None, 5.0) is None
    assert expected_at(block(), NOW, 10, 2.0, 5.0) == NOW + 10.0


@pytest.mark.parametrize(
    ("busy_for", "comes_in"), [(12.0, 10.0), (10.0, 10.0), (9.9, 9.9), (9.75, 9.75), (9.7, 10.0)]
)
def test_what_was_only_rounded_beyond_the_end_of_others_does_not_move_it(
    busy_for: float, comes_in: float
):
    """Half a step of this worker is a quarter of a second."""
    assert expected_at(block(busy_until=NOW + busy_for), NOW, 10, 2.0, 5.0) == NOW + comes_in


def test_a_lease_that_goes_otherwise_is_expected_otherwise():
    assert expected_now(SWARM, Trained(), 10, NOW) == NOW + 50.0
    assert expected_now(SWARM, Trained(), 60, NOW) == NOW
    assert expected_now(SWARM, Trained(expected=None), 10, NOW) == NOW + 50.0
    assert expected_now(SWARM, Trained(expected=None), 0, NOW) is None


@pytest.mark.parametrize("done", [0, 19, 20, 21])
def test_a_lease_that_goes_as_was_thought_is_expected_as_before(done: int):
    assert expected_now(SWARM, Trained(), done, NOW) == NOW + 20.0


@settings(deadline=None)
@given(swarms, speeds, st.integers(1, 1000))
def test_no_lease_is_shorter_than_the_work_it_asks_for(
    swarm: SwarmConfig, speed: float | None, left: int
):
    steps = fitted(swarm, speed, left)
    seconds = lease_seconds(swarm, steps, speed)
    assert seconds >= swarm.shortest_deadline
    expected = steps / speed if speed is not None else swarm.lease_seconds
    expected = min(expected, SLOWEST_LEASES * swarm.lease_seconds)  # a claim counts no further
    assert seconds >= expected
    assert seconds <= max(swarm.shortest_deadline, swarm.deadline_factor * expected)


def test_a_deadline_leaves_room():
    assert lease_seconds(SWARM, 60, 2.0) == 4 * 30
    assert lease_seconds(SWARM, 2, 2.0) == SWARM.shortest_deadline
    assert lease_seconds(SWARM, 10, None) == 4 * 30


# When to merge


def test_nothing_is_merged_where_nothing_waits():
    assert due_updates(block(), SWARM, NOW) == ()
    assert due_updates(block(open_leases=1, workers=frozenset({"bob"})), SWARM, NOW) == ()


def test_where_nobody_else_trains_there_is_nothing_to_wait_for():
    alone = block(pending=(update(),), workers=frozenset({"ann"}))
    assert due_updates(alone, SWARM, NOW) == alone.pending


def test_below_the_quorum_the_others_are_waited_for():
    waiting = block(pending=(update(),), workers=frozenset({"ann", "bob"}), open_leases=1)
    assert due_updates(waiting, SWARM, NOW + 59.9) == ()


def test_nobody_is_waited_for_longer_than_two_leases_take():
    """Not for a quorum, and not by a grace window that is longer than that."""
    swarm = replace(SWARM, lease_seconds=30.0)
    waiting = block(pending=(update(),), workers=frozenset({"ann", "bob"}), open_leases=1)
    assert due_updates(waiting, swarm, NOW + 60.0) == waiting.pending
    two = (update("ann", NOW), update("bob", NOW + 50.0))
    full = block(pending=two, workers=frozenset(WORKERS), open_leases=1)
    assert due_at(full, replace(swarm, grace_seconds=20.0)) == NOW + 60.0


def test_after_the_quorum_the_others_get_the_grace_window():
    both = (update("ann", NOW - 50), update("bob", NOW))
    full = block(pending=both, workers=frozenset(WORKERS), open_leases=1)
    assert due_updates(full, SWARM, NOW + 4.9) == ()
    assert due_updates(full, SWARM, NOW + 5.0) == both


def test_a_third_update_does_not_start_the_grace_window_again():
    three = (update("ann", NOW), update("bob", NOW + 1), update("eve", NOW + 5))
    full = block(pending=three, workers=frozenset({*WORKERS, "zoe"}), open_leases=1)
    assert due_updates(full, SWARM, NOW + 6) == three


def test_the_quorum_is_never_more_than_there_are_workers():
    """A worker that sent an update and trains on: it alone is all there is."""
    alone = block(pending=(update("ann", NOW),), workers=frozenset({"ann"}), open_leases=1)
    assert due_updates(alone, SWARM, NOW + 5) == alone.pending


def test_late_updates_do_not_make_a_quorum():
    """They come while the others train, and would make those late in turn."""
    late, fresh = update("ann"), replace(update("bob"), base_version=1)
    training = {"version": 1, "open_leases": 2, "workers": frozenset(WORKERS)}
    at_last = NOW + QUORUM_LEASES * SWARM.lease_seconds
    assert due_at(block(**training, pending=(late, fresh)), SWARM) == at_last
    two = (late, fresh, replace(update("eve"), base_version=1))
    assert due_at(block(**training, pending=two), SWARM) == NOW + SWARM.grace_seconds


@settings(deadline=None)
@given(states(), swarms, st.floats(0, 200))
def test_updates_are_merged_all_or_none_and_stay_due(
    state: BlockState, swarm: SwarmConfig, later: float
):
    due = due_updates(state, swarm, NOW)
    assert due in ((), state.pending)
    if due:
        assert due_updates(state, swarm, NOW + later) == due
    if state.pending and not state.open_leases:
        assert due == state.pending
    fresh = {update.worker for update in state.pending if update.base_version == state.version}
    if len(fresh) >= swarm.quorum:
        assert due_updates(state, swarm, NOW + swarm.grace_seconds) == state.pending


@settings(deadline=None)
@given(states(), swarms)
def test_updates_are_due_from_their_time_on_and_not_before(state: BlockState, swarm: SwarmConfig):
    at = due_at(state, swarm)
    if math.isfinite(at):
        assert due_updates(state, swarm, at) == state.pending
        assert due_updates(state, swarm, math.nextafter(at, -math.inf)) == ()
    else:
        assert (due_updates(state, swarm, NOW) == ()) == (at == math.inf)


# What an update counts


def test_a_fresh_update_counts_fully_a_late_one_less_one_too_late_nothing():
    swarm = SwarmConfig(most_stale=2, late_discount=0.5)
    assert [weight(swarm, 7, base) for base in (7, 6, 5, 4, 0)] == [1.0, 0.5, 0.25, 0.0, 0.0]


def test_without_patience_every_late_update_is_refused():
    swarm = SwarmConfig(most_stale=0)
    assert [weight(swarm, 1, base) for base in (1, 0)] == [1.0, 0.0]


@settings(deadline=None)
@given(swarms, st.integers(0, 20), st.integers(0, 20))
def test_an_older_update_never_counts_more(swarm: SwarmConfig, version: int, behind: int):
    now, then = version + behind, version
    assert 0.0 <= weight(swarm, now, then) <= 1.0
    assert weight(swarm, now + 1, then) <= weight(swarm, now, then)
    assert (weight(swarm, now, then) > 0) == (behind <= swarm.most_stale)


def test_an_update_is_refused_for_its_age_or_because_another_has_its_text():
    swarm = SwarmConfig(most_stale=2)
    assert refusal(swarm, 5, 3, text_is_its_own=True) is None
    assert refusal(swarm, 5, 3, text_is_its_own=False) is UpdateRefusal.HANDED_OUT_AGAIN
    assert refusal(swarm, 5, 2, text_is_its_own=True) is UpdateRefusal.TOO_STALE
    assert refusal(swarm, 5, 2, text_is_its_own=False) is UpdateRefusal.TOO_STALE


def test_what_fell_too_far_behind_is_told_apart_from_what_is_merged():
    due = [replace(update(), base_version=base) for base in (4, 1, 5, 3, 2)]
    fresh, stale = without_stale(SwarmConfig(most_stale=2), 5, due)
    assert [item.base_version for item in fresh] == [4, 5, 3]
    assert [item.base_version for item in stale] == [1, 2]


def test_a_claim_of_speed_is_believed_as_far_as_it_was_measured():
    first = SWARM.first_steps / SWARM.lease_seconds
    assert trusted_speed(SWARM, None, None) is None
    assert trusted_speed(SWARM, None, 5.0) is None
    assert trusted_speed(SWARM, 99_999.0, None) == first
    assert trusted_speed(SWARM, 99_999.0, 0.5) == 5.0
    assert trusted_speed(SWARM, 0.01, None) == trusted_speed(SWARM, 0.01, 0.5) == 0.01


@settings(deadline=None)
@given(swarms, st.floats(1e-9, 1e9), st.floats(0.0, 1e9), st.integers(1, 1000))
def test_no_claim_moves_a_deadline_beyond_the_runs_bound(
    swarm: SwarmConfig, speed: float, transfer: float, steps: int
):
    usual = swarm.deadline_factor * swarm.lease_seconds
    seconds = lease_seconds(swarm, steps, speed, transfer)
    assert seconds <= max(swarm.shortest_deadline, 20.0 * usual * (1 + 1e-9))
    assert seconds <= longest_seconds(swarm) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("done", "seconds_left", "deadline"),
    [
        (30, 100.0, 100.0),  # there is time
        (30, 10.0, 80.0),  # it took 20 seconds to come that far
        (59, 10.0, 80.0),
        (60, 10.0, 80.0),  # the update is still to be sent
        (99, 10.0, 80.0),
    ],
)
def test_progress_gives_more_time_where_there_is_little(
    done: int, seconds_left: float, deadline: float
):
    lease = Trained(created=NOW - 200.0, deadline=NOW + seconds_left)
    assert deadline_after_steps(SWARM, lease, done, NOW - 20.0, NOW) == NOW + deadline


def test_a_lease_that_cannot_end_in_time_at_its_pace_gets_no_more_time():
    lease = Trained(created=NOW - 200.0, deadline=NOW + 10.0)
    assert longest_seconds(SWARM) == 3600.0
    assert deadline_after_steps(SWARM, lease, 4, NOW - 20.0, NOW) > lease.deadline
    assert deadline_after_steps(SWARM, lease, 3, NOW - 20.0, NOW) == lease.deadline
    old = Trained(created=NOW - 3590.0, deadline=NOW + 5.0)
    assert deadline_after_steps(SWARM, old, 60, NOW - 20.0, NOW) == NOW + 10.0
    assert deadline_after_chunk(SWARM, old, NOW - 20.0, NOW) == NOW + 10.0


def test_a_chunk_leaves_time_for_the_next():
    lease = Trained(deadline=NOW + 10.0)
    assert deadline_after_chunk(SWARM, lease, NOW - 30.0, NOW) == NOW + 120.0
    assert deadline_after_chunk(SWARM, lease, NOW, NOW) == NOW + SWARM.shortest_deadline
    later = Trained(deadline=NOW + 70.0)
    assert deadline_after_chunk(SWARM, later, NOW - 30.0, NOW) == NOW + 70.0


def test_a_slow_line_gets_a_later_deadline():
    swarm = SwarmConfig(deadline_factor=4.0, shortest_deadline=1.0, longest_deadline=500.0)
    assert lease_seconds(swarm, 10, 1.0, 30.0) == 160.0
    assert lease_seconds(swarm, 10, 1.0) == 40.0
    assert lease_seconds(swarm, 10, 1.0, 1e5) == 500.0
    assert lease_seconds(replace(swarm, longest_deadline=1e6), 10, 1.0, 1e5) == 4.0 * (10 + 300)


# Differences


@pytest.mark.parametrize(
    ("kept", "down", "updates", "expected"),
    [(64, 0, 1, 64), (64, 0, 5, 320), (64, 0, 99, 4096), (64, 128, 5, 128)],
)
def test_a_version_has_room_for_all_its_updates_unless_the_run_says_otherwise(
    kept: int, down: int, updates: int, expected: int
):
    swarm = SwarmConfig(codec="sparse", top_k_per_4096=kept, top_k_per_4096_down=down)
    assert delta_codec(swarm, block(), updates) == Sparse(expected)
    all_out = block(next_batch=100)  # the updates that are left are final ones
    assert delta_codec(swarm, all_out, updates) == Sparse(min(16 * kept * updates, 4096))


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 300))
def test_differences_are_useful_as_long_as_all_from_there_are_shorter(sizes: list[int], whole: int):
    named = dict(enumerate(sizes, start=3))
    useful = useful_differences(named, whole)
    assert useful == {
        version
        for version in named
        if sum(size for later, size in named.items() if later >= version) < whole
    }
