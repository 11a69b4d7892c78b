"""Steps and deadlines of leases: examples, and properties that hold for every state."""

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.blocks import NOW, SWARM, block, speeds, swarms

from blocktrain.config import SwarmConfig
from blocktrain.swarm.lease_terms import (
    MICROSTEP,
    SHORTEST_SHARE,
    SLOWEST_LEASES,
    arrival_after_progress,
    deadline_after_chunk,
    deadline_after_steps,
    deadline_seconds,
    earliest_useful_end,
    expected_arrival,
    lease_steps,
    longest_lease_seconds,
    run_seconds_left,
    training_seconds,
    trusted_speed,
)


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
    assert earliest_useful_end(SWARM, NOW, 4.0) == NOW + 7.0
    assert training_seconds(SWARM, shared, NOW, 17.0) == SWARM.lease_seconds


@settings(deadline=None)
@given(swarms, st.floats(1e-3, 1e5), st.floats(0, 100), st.floats(0, 2000))
def test_updates_of_those_who_share_a_block_come_in_within_a_step_of_each_other(
    swarm: SwarmConfig, speed: float, transfer: float, busy_for: float
):
    shared = block(busy_until=NOW + busy_for)
    seconds = training_seconds(swarm, shared, NOW, transfer)
    steps = lease_steps(replace(swarm, most_steps=10**9), seconds, speed, 10**9)
    comes = expected_arrival(block(), NOW, steps, speed, transfer)
    assert comes is not None
    fills = SHORTEST_SHARE * swarm.lease_seconds < busy_for - transfer <= swarm.lease_seconds
    if fills and abs(busy_for - transfer - SHORTEST_SHARE * swarm.lease_seconds) > 1e-6:
        assert abs(comes - shared.busy_until) <= 1 / speed + 1e-6


def millionths(steps_per_second: float) -> int:
    return round(steps_per_second / MICROSTEP)


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
        end = run_seconds_left(swarm, [last], NOW, speed, others)
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
    assert run_seconds_left(SWARM, blocks, NOW, 1.0, {1: millionths(1.0)}) == 7.0
    assert run_seconds_left(SWARM, blocks, NOW, 1.0, {}) == 10.0
    later = replace(blocks[1], busy_until=NOW + 20.0)
    assert run_seconds_left(SWARM, [blocks[0], later], NOW, 1.0, {1: millionths(1.0)}) > 10.0


def test_who_has_no_speed_yet_leaves_nothing_to_others():
    assert run_seconds_left(SWARM, [block()], NOW, None, {None: millionths(5.0)}) == math.inf


@pytest.mark.parametrize(("transfer", "steps"), [(0.0, 3), (2.0, 3), (5.0, 5), (60.0, 30)])
def test_no_lease_is_so_short_that_it_is_hardly_worth_its_transfers(transfer: float, steps: int):
    assert shared(40, [1.0, 100.0], transfer)[0][0] == steps


@settings(deadline=None)
@given(swarms, st.floats(1e-3, 1e5), st.floats(0, 100), st.integers(1, 1000), remaining)
def test_a_worker_that_is_alone_takes_what_it_would_take_anyway(
    swarm: SwarmConfig, speed: float, transfer: float, left: int, busy_for: float
):
    last = block(total_batches=left, busy_until=NOW + busy_for)
    end = run_seconds_left(swarm, [last], NOW, speed, {})
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
        shortest = max(together, SHORTEST_SHARE * swarm.lease_seconds)
        rounded = len(speeds) * 0.5 / min(speeds)
        assert steps == 1 or at - NOW <= min(shortest, swarm.lease_seconds) + rounded + 1e-6


@dataclass
class Trained:
    """A lease that was given ten seconds ago."""

    steps: int = 60
    created: float = NOW - 10.0
    deadline: float = NOW + 110.0
    expected: float | None = NOW + 20.0


def test_nobody_knows_when_a_worker_of_unknown_speed_is_done():
    assert expected_arrival(block(), NOW, 10, None, 5.0) is None
    assert expected_arrival(block(), NOW, 10, 2.0, 5.0) == NOW + 10.0


@pytest.mark.parametrize(
    ("busy_for", "comes_in"), [(12.0, 10.0), (10.0, 10.0), (9.9, 9.9), (9.75, 9.75), (9.7, 10.0)]
)
def test_what_was_only_rounded_beyond_the_end_of_others_does_not_move_it(
    busy_for: float, comes_in: float
):
    """Half a step of this worker is a quarter of a second."""
    assert expected_arrival(block(busy_until=NOW + busy_for), NOW, 10, 2.0, 5.0) == NOW + comes_in


def test_a_lease_that_goes_otherwise_is_expected_otherwise():
    assert arrival_after_progress(SWARM, Trained(), 10, NOW) == NOW + 50.0
    assert arrival_after_progress(SWARM, Trained(), 60, NOW) == NOW
    assert arrival_after_progress(SWARM, Trained(expected=None), 10, NOW) == NOW + 50.0
    assert arrival_after_progress(SWARM, Trained(expected=None), 0, NOW) is None


@pytest.mark.parametrize("done", [0, 19, 20, 21])
def test_a_lease_that_goes_as_was_thought_is_expected_as_before(done: int):
    assert arrival_after_progress(SWARM, Trained(), done, NOW) == NOW + 20.0


@settings(deadline=None)
@given(swarms, speeds, st.integers(1, 1000))
def test_no_lease_is_shorter_than_the_work_it_asks_for(
    swarm: SwarmConfig, speed: float | None, left: int
):
    steps = fitted(swarm, speed, left)
    seconds = deadline_seconds(swarm, steps, speed)
    assert seconds >= swarm.shortest_deadline
    expected = steps / speed if speed is not None else swarm.lease_seconds
    expected = min(expected, SLOWEST_LEASES * swarm.lease_seconds)  # a claim counts no further
    assert seconds >= expected
    assert seconds <= max(swarm.shortest_deadline, swarm.deadline_factor * expected)


def test_a_deadline_leaves_room():
    assert deadline_seconds(SWARM, 60, 2.0) == 4 * 30
    assert deadline_seconds(SWARM, 2, 2.0) == SWARM.shortest_deadline
    assert deadline_seconds(SWARM, 10, None) == 4 * 30


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
    seconds = deadline_seconds(swarm, steps, speed, transfer)
    assert seconds <= max(swarm.shortest_deadline, 20.0 * usual * (1 + 1e-9))
    assert seconds <= longest_lease_seconds(swarm) * (1 + 1e-9)


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
    assert longest_lease_seconds(SWARM) == 3600.0
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
    assert deadline_seconds(swarm, 10, 1.0, 30.0) == 160.0
    assert deadline_seconds(swarm, 10, 1.0) == 40.0
    assert deadline_seconds(swarm, 10, 1.0, 1e5) == 500.0
    assert deadline_seconds(replace(swarm, longest_deadline=1e6), 10, 1.0, 1e5) == 4.0 * (10 + 300)
