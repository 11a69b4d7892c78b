"""Which workers count as present, and how fast they are."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktrain.config import SwarmConfig
from blocktrain.swarm.dispatcher import Attendance
from blocktrain.swarm.lease_terms import MICROSTEP

SWARM = SwarmConfig(lease_seconds=30.0, most_steps=100)
SECONDS = 60.0  # two leases
FASTEST = 100 / 3.0  # a tenth of a lease for the steps of the longest


def speeds(attendance: Attendance, worker: str) -> dict[int | None, float]:
    """Of the others, in steps a second."""
    return {block: MICROSTEP * speed for block, speed in attendance.other_speeds(worker).items()}


def test_others_are_counted_by_the_block_they_train():
    attendance = Attendance(SWARM)
    attendance.record("ann", 0, 1.0, 0.0)
    attendance.record("bob", 0, 2.0, 1.0)
    attendance.record("eve", None, 4.0, 2.0)
    assert speeds(attendance, "zoe") == {0: 3.0, None: 4.0}
    assert speeds(attendance, "bob") == {0: 1.0, None: 4.0}
    assert attendance.others("zoe", 2.0) == {0: 2, None: 1}
    assert attendance.others("bob", 2.0) == {0: 1, None: 1}


def test_a_waiting_worker_counts_at_its_last_block_but_trains_nothing():
    attendance = Attendance(SWARM)
    attendance.record("ann", 2, 1.0, 0.0)
    attendance.record("ann", None, 1.0, 30.0)
    attendance.record("ann", None, 1.0, 30.3)
    assert attendance.others("bob", 30.3)[2] == 1
    assert speeds(attendance, "bob") == {2: 0.0, None: 1.0}


def test_a_worker_that_asks_again_counts_once():
    attendance = Attendance(SWARM)
    attendance.record("ann", 0, 1.0, 0.0)
    attendance.record("ann", 1, 2.0, 30.0)
    assert speeds(attendance, "bob") == {0: 0.0, 1: 2.0}
    assert attendance.others("bob", 30.0) == {0: 0, 1: 1}


def test_a_worker_that_has_not_asked_for_long_is_absent():
    attendance = Attendance(SWARM)
    attendance.record("ann", 0, 1.0, 0.0)
    attendance.record("bob", 0, 2.0, 1.0)
    attendance.record("eve", 1, 4.0, SECONDS)
    assert speeds(attendance, "eve") == {0: 3.0, 1: 0.0}
    attendance.record("eve", 1, 4.0, SECONDS + 0.5)
    assert speeds(attendance, "eve") == {0: 2.0, 1: 0.0}
    assert attendance.others("eve", SECONDS + 0.5) == {0: 1, 1: 0}


def test_absent_workers_are_forgotten_at_the_first_request_after_a_pause():
    attendance = Attendance(SWARM)
    attendance.record("ann", 0, 1.0, 0.0)
    attendance.record("bob", 1, 1.0, 10.0)
    assert attendance.others("eve", SECONDS + 1.0) == {0: 0, 1: 1}


def test_a_worker_that_stays_is_present_until_it_is_recorded_again_or_has_left():
    attendance = Attendance(SWARM)
    for worker in ("ann", "bob"):
        attendance.record(worker, 0, 1.0, 0.0)
        attendance.record(worker, None, 1.0, 30.0)
        attendance.stays(worker)
    later = 30.0 + 10 * SECONDS
    assert attendance.others("eve", later) == {0: 2}
    assert speeds(attendance, "eve") == {0: 0.0, None: 2.0}
    attendance.record("ann", 1, 1.0, later)
    attendance.left("bob", later)
    assert attendance.others("eve", later + SECONDS) == {0: 1, 1: 1}
    assert attendance.others("eve", later + SECONDS + 1.0) == {0: 0, 1: 0}
    attendance.left("bob", later + SECONDS + 1.0)
    assert attendance.others("eve", later + SECONDS + 1.0) == {0: 0, 1: 0}


def test_a_claimed_speed_beyond_all_bounds_is_cut():
    attendance = Attendance(SWARM)
    attendance.record("ann", 0, 1.0, 0.0)
    attendance.record("bob", 0, 1e308, 0.0)
    assert speeds(attendance, "eve")[0] == pytest.approx(1.0 + FASTEST)
    assert speeds(attendance, "bob") == {0: 1.0}


def test_a_worker_of_unknown_speed_is_present():
    attendance = Attendance(SWARM)
    attendance.record("ann", 0, None, 0.0)
    assert speeds(attendance, "bob") == {0: 0.0}
    assert attendance.others("bob", 0.0) == {0: 1}


asked = st.tuples(
    st.sampled_from("abcdef"),
    st.none() | st.integers(0, 3),
    st.none() | st.floats(1e-3, FASTEST),
    st.floats(0, 2 * SECONDS),
)


@settings(deadline=None)
@given(st.lists(asked, max_size=30), st.sampled_from("abcdefg"))
def test_sums_are_those_of_the_last_requests(
    said: list[tuple[str, int | None, float | None, float]], worker: str
):
    attendance, now, last, given = Attendance(SWARM), 0.0, {}, {}
    for name, block, speed, passed in said:
        now += passed
        attendance.record(name, block, speed, now)
        was_there = name in last and now - last[name][2] <= SECONDS
        given[name] = given[name] if block is None and was_there else block
        last[name] = (block, speed, now)
    there = {name for name, (_, _, at) in last.items() if now - at <= SECONDS} - {worker}
    fast, others = speeds(attendance, worker), attendance.others(worker, now)
    for index in (None, 0, 1, 2, 3):
        told = [last[name][1] or 0.0 for name in there if last[name][0] == index]
        assert fast.get(index, 0.0) == pytest.approx(sum(told), abs=1e-5)
        assert others.get(index, 0) == sum(given[name] == index for name in there)
