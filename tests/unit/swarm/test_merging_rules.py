"""When updates are merged and what they count: examples, and properties that hold always."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.blocks import NOW, SWARM, WORKERS, block, states, swarms, update

from blocktrain.codec.sparse import Sparse
from blocktrain.config import SwarmConfig
from blocktrain.swarm.merging_rules import (
    QUORUM_LEASES,
    UpdateRefusal,
    chain_factors,
    delta_codec,
    due_at,
    due_updates,
    effective_base,
    judge_update,
    split_stale,
    update_weight,
    useful_deltas,
)
from blocktrain.swarm.state import BlockState, PendingUpdate


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


def test_a_fresh_update_counts_fully_a_late_one_less_one_too_late_nothing():
    swarm = SwarmConfig(most_stale=2, late_discount=0.5)
    assert [update_weight(swarm, 7, base) for base in (7, 6, 5, 4, 0)] == [1.0, 0.5, 0.25, 0.0, 0.0]


def test_without_patience_every_late_update_is_refused():
    swarm = SwarmConfig(most_stale=0)
    assert [update_weight(swarm, 1, base) for base in (1, 0)] == [1.0, 0.0]


@settings(deadline=None)
@given(swarms, st.integers(0, 20), st.integers(0, 20))
def test_an_older_update_never_counts_more(swarm: SwarmConfig, version: int, behind: int):
    now, then = version + behind, version
    assert 0.0 <= update_weight(swarm, now, then) <= 1.0
    assert update_weight(swarm, now + 1, then) <= update_weight(swarm, now, then)
    assert (update_weight(swarm, now, then) > 0) == (behind <= swarm.most_stale)


@pytest.mark.parametrize(
    ("base", "in_time", "reclaimed", "refusal"),
    [
        (3, True, False, None),
        (3, False, True, None),
        (3, False, False, UpdateRefusal.HANDED_OUT_AGAIN),
        (2, True, True, UpdateRefusal.TOO_STALE),
        (2, False, True, UpdateRefusal.TOO_STALE),
    ],
)
def test_an_update_is_refused_for_its_age_or_because_another_worker_has_its_text(
    base: int, in_time: bool, reclaimed: bool, refusal: UpdateRefusal | None
):
    swarm = SwarmConfig(most_stale=2, late_discount=0.5)
    verdict = judge_update(swarm, 5, base, in_time=in_time, reclaim=lambda: reclaimed)
    assert verdict == (0.25 if base == 3 else 0.0, refusal)


@pytest.mark.parametrize(("base", "in_time"), [(2, False), (3, True)])
def test_text_is_reclaimed_only_for_an_update_that_counts_and_came_too_late(
    base: int, in_time: bool
):
    def reclaim() -> bool:
        raise AssertionError("its text must not be reclaimed")

    judge_update(SwarmConfig(most_stale=2), 5, base, in_time=in_time, reclaim=reclaim)


def test_what_fell_too_far_behind_is_told_apart_from_what_is_merged():
    due = [replace(update(), base_version=base) for base in (4, 1, 5, 3, 2)]
    fresh, stale = split_stale(SwarmConfig(most_stale=2), 5, due)
    assert [item.base_version for item in fresh] == [4, 5, 3]
    assert [item.base_version for item in stale] == [1, 2]


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
    useful = useful_deltas(named, whole)
    assert useful == {
        version
        for version in named
        if sum(size for later, size in named.items() if later >= version) < whole
    }


@given(st.integers(0, 9), st.none() | st.integers(0, 9))
def test_an_update_is_never_older_than_its_base(base: int, into: int | None):
    assert effective_base(base, into) >= base
    assert effective_base(base, into) >= (into or 0)


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=8))
def test_chains_keep_their_weight_in_the_mean_and_add_up(links: list[tuple[int, bool]]):
    """The share of a member, times its steps, is the chain's steps: for each what it learned."""
    updates = [
        PendingUpdate(str(n), "ann", 0, steps, float(n), str(n - 1) if linked and n else None)
        for n, (steps, linked) in enumerate(links)
    ]
    factors = chain_factors(updates[::-1])
    chains: list[list[PendingUpdate]] = []
    for item in updates:
        if item.continues:
            chains[-1].append(item)
        else:
            chains.append([item])
    for chain in chains:
        together = sum(item.steps for item in chain)
        assert [factors[u.lease] * u.steps for u in chain] == pytest.approx([together] * len(chain))
