"""Leases that go on from where another ended, whose update is still on its way."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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

from blocktrain import faults
from blocktrain.codec.dense import Bf16
from blocktrain.codec.frames import encode
from blocktrain.codec.sparse import FINAL_UPDATE, Sparse
from blocktrain.coordinator.service import Service
from blocktrain.protocol.messages import Finished, Lease, LeaseProgress, Wait

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
    data = b"".join(encode(np.full(NUMBERS, by, np.float32), Bf16()))
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

    def send_second(point: str) -> None:
        if point == "merge-written":
            monkeypatch.undo()
            assert learned(member, second, 0.5) == "pending"

    monkeypatch.setattr(faults, "reached", send_second)
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
    assert [answer.final_update for answer in answers] == [True, True]
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
        assert not answer.final_update
        learned(member, lease, 0.1)
        service.merger.merge_due()
        assert isinstance(answer.answer, Lease)
        lease = answer.answer
        done += lease.steps
    answer = member.ask(held_block=0, trained=lease.lease, blocks=(0,))
    assert answer.final_update
    assert isinstance(answer.answer, Wait)


def test_last_words_are_taken_while_others_go_on_with_the_block(tmp_path: Path, clock: SetClock):
    """As of a worker that goes on with another block."""
    with frugal(tmp_path, clock) as service:
        member = join(service)
        lease = member.lease(blocks=(0,), **STEPS)
        coder = Sparse(FINAL_UPDATE * KEPT)
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
    coder = Sparse(16)
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
