"""Leases that go on from where another ended, whose update is still on its way."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.coordinator import (
    Member,
    SetClock,
    first_weights,
    join,
    join_proven,
    running,
    weights_now,
)
from tests.support.frugal import KEPT, block_weights, frugal

from blocktrain.codec.frames import codec_named, encode, top_k_of_final_update
from blocktrain.coordinator.service import Service
from blocktrain.protocol.messages import Finished, Lease, LeaseProgress, Wait
from blocktrain.swarm.plan import (
    base_of,
    chain_factors,
    choose_block,
    may_continue,
    place_in_schedule,
)
from blocktrain.swarm.state import BlockState, PendingUpdate

NUMBERS = 24  # of a block
STEPS = {"steps_per_second": 0.2}  # leases of 6


@pytest.fixture
def clock() -> SetClock:
    return SetClock(now=1000.0)


@pytest.fixture
def service(tmp_path: Path, clock: SetClock) -> Iterator[Service]:
    with running(tmp_path, clock, swarm__codec="bf16", swarm__quorum=1) as service:
        yield service


def learned(member: Member, lease: Lease, by: float) -> str:
    """Send an update in which every number has grown; what became of it."""
    coder = codec_named("bf16")
    assert coder is not None
    data = b"".join(encode(np.full(NUMBERS, by, np.float32), coder))
    return member.send(member.signer.update_of_bytes(lease, data, codec="bf16")).state


def go_on(member: Member, trained: Lease, **more: Any) -> Lease:
    return member.lease(held_block=trained.block, trained=trained.lease, **{**STEPS, **more})


def grown(service: Service, block: int = 0) -> float:
    """By how much all numbers of a block have grown since the beginning."""
    first, now = first_weights(block), weights_now(service.run, block)
    differences = {name: now[name] - first[name] for name in first}
    one = float(next(iter(differences.values())).flat[0])
    assert all(np.allclose(part, one, atol=1e-5) for part in differences.values())
    return one


def test_a_worker_goes_on_before_its_update_is_even_offered(service: Service):
    member = join(service)
    first = member.lease(blocks=(0,), **STEPS)
    second = go_on(member, first)
    assert (second.block, second.base_version, second.continues) == (0, 0, first.lease)
    assert second.first_batch == first.first_batch + first.steps
    assert second.schedule_start == first.schedule_start + first.steps


def test_who_asks_again_gets_the_lease_it_has(service: Service):
    member = join(service)
    first = member.lease(blocks=(0,), **STEPS)
    second = go_on(member, first)
    assert go_on(member, first).lease == second.lease
    assert member.lease(**STEPS).continues == first.lease


def test_nobody_gets_further_than_one_update_ahead(service: Service):
    member = join(service)
    first = member.lease(blocks=(0,), **STEPS)
    second = go_on(member, first)
    answer = member.ask(held_block=0, blocks=(0,), trained=second.lease, **STEPS).answer
    assert isinstance(answer, Wait)
    learned(member, first, 1.0)
    service.merger.merge_due()
    third = go_on(member, second, blocks=(0,))
    assert (third.continues, third.base_version) == (second.lease, 1)
    assert third.schedule_start == second.schedule_start + second.steps


def test_what_continues_counts_as_trained_from_what_the_update_before_became(service: Service):
    member = join(service)
    first = member.lease(blocks=(0,), **STEPS)
    second = go_on(member, first)
    learned(member, first, 1.0)
    assert service.merger.merge_due() == 1
    assert learned(member, second, 0.5) == "pending"
    with service.run.ledger.read() as tx:
        (waiting,) = tx.blocks.states()[0].pending
        update = tx.updates.get(second.lease)
    assert (waiting.base_version, update.weight) == (1, 1.0)  # not late, not discounted
    assert service.merger.merge_due() == 1
    assert grown(service) == pytest.approx(1.5)


def test_what_one_worker_learned_in_turn_adds_up_in_one_version(service: Service, clock: SetClock):
    """A third of the steps are another's: its weight in the mean is a third."""
    ann, bob = join(service), join(service)
    first = ann.lease(blocks=(0,), **STEPS)
    second = go_on(ann, first)  # nobody else is there yet
    other = bob.lease(blocks=(0,), **STEPS)
    learned(ann, first, 1.0)
    learned(ann, second, 0.5)
    learned(bob, other, 3.0)
    assert service.merger.merge_due() == 1
    assert grown(service) == pytest.approx((2 * 1.5 + 3.0) / 3)


def test_what_comes_in_while_its_predecessor_is_merged_is_not_late(
    service: Service, monkeypatch: pytest.MonkeyPatch
):
    member = join(service)
    first = member.lease(blocks=(0,), **STEPS)
    second = go_on(member, first)
    learned(member, first, 1.0)
    merged = service.merger._merged

    def slowly(*arguments, **options):  # type: ignore[no-untyped-def]
        monkeypatch.undo()
        assert learned(member, second, 0.5) == "pending"
        return merged(*arguments, **options)

    monkeypatch.setattr(service.merger, "_merged", slowly)
    assert service.merger.merge_due() == 1
    with service.run.ledger.read() as tx:
        (waiting,) = tx.blocks.states()[0].pending
    assert (waiting.lease, waiting.base_version) == (second.lease, 1)
    service.merger.merge_due()
    assert grown(service) == pytest.approx(1.5)


def test_a_worker_that_begins_anew_gets_what_it_never_sent_again(service: Service):
    member = join(service)
    first = member.lease(blocks=(0,), **STEPS)
    second = go_on(member, first)
    assert member.lease().lease == first.lease  # nothing was heard of its update
    assert go_on(member, first).lease == second.lease
    learned(member, first, 1.0)
    assert member.lease().lease == second.lease


def test_last_words_are_asked_for_again_when_the_answer_was_lost(service: Service):
    member = join(service)
    trained = None
    while trained is None or trained.first_batch + trained.steps < 40:
        trained = member.lease(held_block=0, blocks=(0,), steps_per_second=1.0)
        if trained.first_batch + trained.steps < 40:
            learned(member, trained, 0.1)
            service.merger.merge_due()
    asked = {"held_block": 0, "trained": trained.lease, "steps_per_second": 1.0}
    answers = [member.ask(**asked) for _ in range(2)]
    assert [answer.last_words for answer in answers] == [True, True]
    assert answers[0].answer.block == answers[1].answer.block == 1


def test_an_update_whose_predecessor_was_refused_counts_by_itself(service: Service):
    member = join(service)
    first = member.lease(blocks=(0,), **STEPS)
    second = go_on(member, first)
    bad = member.signer.update_of_bytes(first, b"x" * 30, codec="bf16")
    assert member.send(bad).state == "refused"
    assert learned(member, second, 0.5) == "pending"
    service.merger.merge_due()
    assert grown(service) == pytest.approx(0.5)


def test_the_last_words_of_a_block_are_asked_for(service: Service):
    member, batches = join(service), 40
    lease = member.lease(blocks=(0,), steps_per_second=1.0)
    done = lease.steps
    while done < batches:
        answer = member.ask(held_block=0, trained=lease.lease, steps_per_second=1.0, blocks=(0,))
        assert not answer.last_words
        learned(member, lease, 0.1)
        service.merger.merge_due()
        assert isinstance(answer.answer, Lease)
        lease = answer.answer
        done += lease.steps
    answer = member.ask(held_block=0, trained=lease.lease, blocks=(0,))
    assert answer.last_words
    assert isinstance(answer.answer, Wait)


def test_last_words_are_taken_while_others_go_on_with_the_block(tmp_path: Path, clock: SetClock):
    """As of a worker that goes on with another block."""
    with frugal(tmp_path, clock) as service:
        member = join(service)
        lease = member.lease(blocks=(0,), **STEPS)
        coder = codec_named("sparse", top_k_of_final_update(KEPT))
        assert coder is not None
        data = b"".join(encode(block_weights(1)["w"], coder))
        made = member.signer.update_of_bytes(lease, data, codec="sparse")
        assert member.send(made).state == "pending"
        assert service.merger.merge_due() == 1


def test_a_last_version_owes_nothing(tmp_path: Path, clock: SetClock):
    """Every version before is cut down to what its difference holds."""
    settings = {
        "swarm__codec": "sparse",
        "swarm__top_k_per_4096": 1,
        "swarm__quorum": 1,
        "train__steps": 8,
    }
    coder = codec_named("sparse", 16)
    assert coder is not None
    with running(tmp_path, clock, **settings) as service:
        member, total = join(service), np.zeros(NUMBERS)
        for number in range(8):
            lease = member.lease(blocks=(0,), steps_per_second=1 / 30)
            told = np.zeros(NUMBERS, np.float32)
            told[number : number + 2] = (1.0, -1.0)
            data = b"".join(encode(told, coder))
            assert (
                member.send(member.signer.update_of_bytes(lease, data, codec="sparse")).state
                == "pending"
            )
            assert service.merger.merge_due() == 1
            total += told
        with service.run.ledger.read() as tx:
            assert tx.versions.get(0).residual is None
            assert sorted(tx.versions.deltas(0)) == list(range(1, 8))
        first, now = first_weights(0), weights_now(service.run, 0)
        moved = np.concatenate([(now[n] - first[n]).reshape(-1) for n in sorted(first)])
        np.testing.assert_allclose(moved, total, atol=1e-5)


def test_whole_updates_are_never_continued(tmp_path: Path, clock: SetClock):
    with running(tmp_path, clock, swarm__quorum=1) as service:
        member = join(service)
        lease = member.lease(blocks=(0,), **STEPS)
        assert member.lease(trained=lease.lease).lease == lease.lease  # it is still open


def test_no_worker_ends_another_s_lease(service: Service):
    ann, bob = join(service), join(service)
    lease = ann.lease(blocks=(0,), **STEPS)
    assert bob.lease(trained=lease.lease, held_block=0, blocks=(0,)).continues is None
    assert ann.lease().lease == lease.lease


def test_a_run_ends_with_leases_that_continue(service: Service):
    """Nothing is lost, nothing is merged twice."""
    member, trained = join(service), None
    for _ in range(100):
        held = trained.block if trained else None
        asked = {"held_block": held, "trained": trained.lease if trained else None, **STEPS}
        answer = member.ask(**asked).answer
        if trained:
            learned(member, trained, 0.0)
            service.merger.merge_due()
        trained = answer if isinstance(answer, Lease) else None
        if isinstance(answer, Finished):
            break
    with service.run.ledger.read() as tx:
        assert [state.merged_batches for state in tx.blocks.states()] == [40, 40]


# The plan


def block(**changes: Any) -> BlockState:
    fields = {
        "index": 0, "version": 3, "merged_batches": 30, "next_batch": 60, "total_batches": 100,
        "returned_batches": 0, "leased_batches": 0, "open_leases": 0, "finishing": frozenset(),
        "workers": frozenset({"ann", "bob"}), "pending": (), **changes,
    }  # fmt: skip
    return BlockState(**fields)


def test_a_worker_may_continue_what_is_all_that_is_missing():
    alone = {"workers": frozenset({"ann"})}
    sent = block(sending=(("ann", "one", 10),), **alone)
    assert may_continue(sent, "ann", "one")
    assert not may_continue(sent, "ann", "two")
    assert not may_continue(sent, "ann", None)
    update = PendingUpdate("one", "ann", 3, 10, 5.0)
    assert may_continue(block(pending=(update,), **alone), "ann", "one")
    assert not may_continue(block(**alone), "ann", "one")  # it is merged: there is nothing to add
    both = block(sending=(("ann", "two", 10),), pending=(update,), **alone)
    assert not may_continue(both, "ann", "two")


def test_who_shares_a_block_waits_for_what_all_have_made_of_it():
    sent = block(sending=(("ann", "one", 10), ("bob", "two", 10)))
    assert not may_continue(sent, "ann", "one")
    assert may_continue(sent, "ann", "one", patient=False)  # that would take too long
    assert not may_continue(sent, "ann", "two", patient=False)
    assert choose_block([sent], "ann", 0, None, trained="one", patient=False) == sent
    busy = block(sending=sent.sending, finishing=frozenset({"ann", "bob"}))
    assert choose_block([busy], "ann", 0, None, trained="one") is None


def test_who_shares_a_block_trains_on_while_others_are_not_done_soon():
    sent = block(sending=(("ann", "one", 10),), finishing=frozenset({"ann"}), busy_until=500.0)
    for soon, goes_on in ((499.0, True), (500.0, False), (501.0, False)):
        assert may_continue(sent, "ann", "one", soon=soon) == goes_on
        found = choose_block([sent], "ann", 0, None, trained="one", soon=soon)
        assert found == (sent if goes_on else None)
    ahead = block(sending=(("ann", "one", 10), ("ann", "two", 10)), busy_until=500.0)
    assert not may_continue(ahead, "ann", "two", soon=0.0)  # two updates that nobody else has seen


def test_nobody_begins_anew_from_a_version_that_its_own_late_update_is_to_change():
    """Though a late update, or one that continues another, is not of the current version."""
    late = block(sending=(("ann", "one", 10),))
    assert choose_block([late], "ann", 0, None, trained="one") is None
    assert choose_block([late], "ann", 0, None) == late  # codec none: there it would only wait


def test_who_ends_before_the_others_fills_the_time_until_they_end(
    service: Service, clock: SetClock
):
    ann, bob = join_proven(service), join(service)
    bob.lease(blocks=(0,), **STEPS)  # 6 steps in 30 seconds
    first = ann.lease(blocks=(0,), steps_per_second=0.4)
    assert first.steps == 12  # also 30 seconds
    clock.forward(10.0)  # it was faster than it said
    second = go_on(ann, first, blocks=(0,), steps_per_second=0.4)
    assert (second.continues, second.steps) == (first.lease, 8)  # bob has 20 seconds to go


def test_a_sign_of_life_tells_others_how_long_there_is_to_fill(service: Service, clock: SetClock):
    ann, bob = join(service), join(service)
    slow = bob.lease(blocks=(0,), **STEPS)
    first = ann.lease(blocks=(0,), **STEPS)
    clock.forward(30.0)
    asked = {"held_block": 0, "blocks": (0,), "trained": first.lease, **STEPS}
    assert isinstance(ann.ask(**asked).answer, Wait)
    half = LeaseProgress(fence=slow.fence, steps_done=3)
    service.leases.progress(bob.caller, slow.lease, half)
    second = ann.lease(**asked)
    assert (second.continues, second.steps) == (first.lease, 6)


def test_whoever_is_joined_by_another_goes_on_from_a_version(service: Service, clock: SetClock):
    ann, bob = join(service), join(service)
    first = ann.lease(blocks=(0,), **STEPS)
    other = bob.lease(blocks=(0,), **STEPS)
    clock.forward(30.0)
    asked = {"held_block": 0, "blocks": (0,), "trained": first.lease, **STEPS}
    assert isinstance(ann.ask(**asked).answer, Wait)
    learned(ann, first, 1.0)
    learned(bob, other, 3.0)
    assert service.merger.merge_due() == 1
    following = ann.lease(**asked)
    assert (following.base_version, following.continues) == (1, None)


def test_the_schedule_goes_on_as_if_all_had_gone_equally_far():
    sent = block(sending=(("ann", "one", 10),))
    assert place_in_schedule(sent, "ann", continuing=True) == (50, 2)
    assert place_in_schedule(sent, "ann") == (30, 2)
    assert place_in_schedule(sent, "eve") == (30, 3)


@given(st.integers(0, 9), st.none() | st.integers(0, 9))
def test_an_update_is_never_older_than_its_base(base: int, into: int | None):
    assert base_of(base, into) >= base
    assert base_of(base, into) >= (into or 0)


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=8))
def test_chains_keep_their_weight_in_the_mean_and_add_up(links: list[tuple[int, bool]]):
    """The share of a member, times its steps, is the chain's steps: for each what it learned."""
    updates = [
        PendingUpdate(str(n), "ann", 0, steps, float(n), str(n - 1) if linked and n else None)
        for n, (steps, linked) in enumerate(links)
    ]
    factors = chain_factors(updates[::-1])
    chains: list[list[PendingUpdate]] = []
    for update in updates:
        if update.continues:
            chains[-1].append(update)
        else:
            chains.append([update])
    for chain in chains:
        together = sum(update.steps for update in chain)
        assert [factors[u.lease] * u.steps for u in chain] == pytest.approx([together] * len(chain))
