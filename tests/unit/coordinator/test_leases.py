"""Handing out work and taking it back, on a real run with a clock that is moved by hand."""

from pathlib import Path

import pytest
from tests.support.coordinator import Member, SetClock, join, running, weights_now

from blocktrain.coordinator.service import Service
from blocktrain.errors import RefusedError
from blocktrain.protocol.messages import (
    Finished,
    Lease,
    LeaseProgress,
    LeaseReturn,
    LeaseState,
    Wait,
)
from blocktrain.swarm.plan import IDLE_WAIT, MERGE_WAIT


def progress(member: Member, lease: Lease, fence: int | None = None) -> LeaseState:
    told = LeaseProgress(fence=fence or lease.fence, steps_done=1)
    return member.service.leases.progress(member.caller, lease.lease, told)


def give_back(member: Member, lease: Lease, reason: str = "stopping") -> LeaseState:
    told = LeaseReturn(fence=lease.fence, reason=reason)
    return member.service.leases.give_back(member.caller, lease.lease, told)


def covered(lease: Lease) -> tuple[int, int]:
    return lease.first_batch, lease.steps


# Handing out


def test_a_lease_names_all_that_its_training_needs(service: Service):
    member = join(service)
    lease = member.lease()
    assert (lease.block, lease.base_version, covered(lease)) == (0, 0, (0, 10))
    assert (lease.schedule_start, lease.schedule_stride) == (0, 1)
    assert lease.seconds_left == 120  # four times 30 seconds, as its speed is not known
    assert lease.fence == 1
    assert lease.predecessors == ()
    with service.run.ledger.read() as tx:
        assert lease.base == tx.versions.get(0).weights
    event = service.reports.events(0, 100)[-1]
    assert (event.kind, event.worker, event.block) == ("leased", member.id, 0)
    assert event.detail == "10 steps from batch 0"


def test_asking_twice_gives_the_same_lease(service: Service, clock: SetClock):
    """Its answer was lost, or the worker was restarted; whatever it says it wants now."""
    member = join(service)
    lease = member.lease()
    clock.forward(50)
    again = member.lease(blocks=(1,), steps_per_second=3.0)
    assert again == lease.model_copy(update={"seconds_left": 70.0})
    assert [event.kind for event in service.reports.events(0, 100)] == ["joined", "leased"]


def test_steps_and_deadline_are_fitted_to_the_speed(service: Service):
    fast, slow, first = (join(service) for _ in range(3))
    quick = fast.lease(blocks=(0,), steps_per_second=0.5)
    assert (quick.steps, quick.seconds_left) == (15, 120)
    tiny = slow.lease(blocks=(0,), steps_per_second=0.01)
    assert (tiny.steps, tiny.seconds_left) == (1, 400)
    assert first.lease(blocks=(0,)).steps == 10
    rest = join(service).lease(blocks=(0,), steps_per_second=100.0)
    assert (rest.steps, rest.seconds_left) == (14, 60)  # no more is left, no deadline is shorter


@pytest.mark.parametrize(
    ("theirs", "own", "steps"),
    [((None, None), None, 8), (((0,), (1,)), None, 10), ((None, None), (0,), 10)],
)
def test_what_is_left_of_a_run_is_shared_by_all_who_may_train_it(
    service: Service,
    clock: SetClock,
    theirs: tuple[tuple[int, ...] | None, ...],
    own: tuple[int, ...] | None,
    steps: int,
):
    """Ten steps are left of each block. Ann and bob will be done in two seconds, and are then as
    free as eve: 24 seconds of work for three. Who may train only some blocks is no help."""
    for blocks in theirs:
        assert join(service).lease(blocks=blocks, steps_per_second=1.0).steps == 30
    clock.forward(28)
    assert join(service).lease(blocks=own, steps_per_second=1.0).steps == steps


def test_workers_spread_over_the_blocks(service: Service):
    assert [join(service).lease().block for _ in range(4)] == [0, 1, 0, 1]


def test_a_worker_stays_with_the_block_it_holds(service: Service):
    member = join(service)
    blocks = []
    held = None
    for _ in range(9):
        lease = member.work(held_block=held, steps_per_second=0.1)
        held = lease.block
        blocks.append(held)
        service.round()
    # Three steps of 40 at a time: it leaves once it is more than a quarter of a run ahead.
    assert blocks == [0] * 4 + [1] * 5


def test_the_schedule_of_one_worker_is_that_of_the_run(service: Service):
    member = join(service)
    told = []
    for _ in range(4):
        lease = member.work(blocks=(0,))
        told.append((lease.schedule_start, lease.schedule_stride, lease.base_version))
        service.round()
    assert told == [(0, 1, 0), (10, 1, 1), (20, 1, 2), (30, 1, 3)]


def test_the_schedule_of_two_workers_goes_in_double_steps(tmp_path: Path, clock: SetClock):
    """Both begin where the block stands; together they go on from there at the same pace."""
    with running(tmp_path, clock, swarm__quorum=2) as service:
        first, second = join(service), join(service)
        told = []
        for _ in range(2):
            leases = [first.lease(blocks=(0,)), second.lease(blocks=(0,))]
            told += [(lease.schedule_start, lease.schedule_stride) for lease in leases]
            for member, lease in zip((first, second), leases, strict=True):
                member.send(member.make(lease))
            service.round()
        assert told == [(0, 1), (0, 2), (20, 1), (20, 2)]


def test_a_cascades_lease_names_the_blocks_before_as_they_are(tmp_path: Path, clock: SetClock):
    settings = {"objective__kind": "cascade", "objective__tail": 1, "objective__lead": 0.0}
    with running(tmp_path, clock, **settings) as service:
        member = join(service)
        assert member.work(blocks=(0,)).predecessors == ()
        service.round()
        (before,) = member.lease(blocks=(1,)).predecessors
        with service.run.ledger.read() as tx:
            assert (before.block, before.version) == (0, 1)
            assert before.weights == tx.versions.get(0, 1).weights


def test_a_block_of_a_cascade_is_handed_out_when_the_one_before_has_its_lead(
    tmp_path: Path, clock: SetClock
):
    settings = {"objective__kind": "cascade", "objective__tail": 1, "objective__lead": 0.5}
    with running(tmp_path, clock, **settings) as service:
        first, second = join(service), join(service)
        answer = second.ask(blocks=(1,)).answer
        assert isinstance(answer, Wait)
        assert answer.reason.endswith("builds on blocks that are not far enough yet")
        while not isinstance(answer, Lease):
            first.work(blocks=(0,))
            service.round()
            answer = second.ask(blocks=(1,)).answer
        (before,) = answer.predecessors
        with service.run.ledger.read() as tx:
            block = tx.blocks.states()[0]
        assert block.merged_batches >= 0.5 * block.total_batches
        assert before.version == block.version


def test_leases_are_for_the_train_role(service: Service):
    with pytest.raises(RefusedError, match="evaluate") as refused:
        join(service, "evaluate").ask()
    assert refused.value.code == "forbidden"


def test_a_worker_waits_for_its_own_update(service: Service, clock: SetClock):
    member = join(service)
    member.work(blocks=(0,))
    answer = member.ask(blocks=(0,)).answer
    assert isinstance(answer, Wait) and answer.seconds == MERGE_WAIT
    assert member.lease().block == 1
    service.round()
    clock.forward(1)
    other = join(service)
    assert other.lease(blocks=(0,)).base_version == 1


def test_a_worker_that_was_late_once_is_not_late_for_ever(service: Service):
    """Its late update becomes a version together with its next one, not in the middle of it."""
    late, other = join(service), join(service)
    lease = late.lease(blocks=(0,))
    other.work(blocks=(0,))
    service.merger.merge_due()
    assert late.send(late.make(lease)).weight == 0.5
    following = late.lease(blocks=(0,))
    service.merger.merge_due()
    assert following.base_version == 1
    assert late.send(late.make(following)).weight == 1.0


def test_a_worker_whose_upload_is_under_way_gets_other_work(service: Service):
    member = join(service)
    lease = member.lease(blocks=(0,))
    service.updates.offer(member.caller, member.make(lease).offer)
    assert member.lease().block == 1


def test_a_worker_that_can_do_nothing_now_is_told_to_wait(service: Service):
    first, second = join(service), join(service)
    assert first.lease(blocks=(0,), steps_per_second=3.0).steps == 40
    answer = second.ask(blocks=(0,)).answer
    assert isinstance(answer, Wait) and answer.seconds == IDLE_WAIT
    assert isinstance(second.ask(blocks=(7,)).answer, Wait)
    assert second.lease().block == 1


def test_when_all_is_merged_the_run_is_finished(service: Service):
    member = join(service)
    for _ in range(8):
        member.work()
        service.round()
    assert isinstance(member.ask().answer, Finished)
    with service.run.ledger.read() as tx:
        assert [state.merged_batches for state in tx.blocks.states()] == [40, 40]


def test_nobody_is_sent_home_while_another_still_trains(service: Service):
    """Its work may come back."""
    first, second = join(service), join(service)
    last = second.lease(blocks=(1,), steps_per_second=100.0)
    first.work(steps_per_second=100.0)
    service.round()
    assert isinstance(first.ask().answer, Wait)
    second.send(second.make(last))
    assert isinstance(first.ask().answer, Wait)
    service.round()
    assert isinstance(first.ask().answer, Finished)


# Taking back


def test_a_lease_tells_whether_it_is_still_the_workers(service: Service, clock: SetClock):
    member = join(service)
    lease = member.lease()
    clock.forward(100)
    assert progress(member, lease) == LeaseState(open=True, seconds_left=20.0)
    clock.forward(21)
    service.leases.expire()
    state = progress(member, lease)
    assert (state.open, state.reason) == (False, "this lease is expired")


def test_progress_is_a_sign_of_life_and_moves_no_deadline(service: Service, clock: SetClock):
    member = join(service)
    lease = member.lease()
    clock.forward(100)
    progress(member, lease)
    assert service.reports.status().workers[0].seconds_since_seen == 0
    clock.forward(20.5)
    service.leases.expire()
    assert not progress(member, lease).open


def test_a_returned_range_is_handed_out_again(service: Service):
    first, second = join(service), join(service)
    lease = first.lease(blocks=(0,))
    state = give_back(first, lease, "the laptop sleeps")
    assert (state.open, state.reason) == (False, "given back")
    assert covered(second.lease(blocks=(0,))) == covered(lease)
    event = service.reports.events(0, 100)[-2]
    assert (event.kind, event.worker, event.detail) == ("returned", first.id, "the laptop sleeps")


def test_returning_twice_gives_back_once(service: Service):
    member = join(service)
    lease = member.lease(blocks=(0,))
    give_back(member, lease)
    give_back(member, lease)
    with service.run.ledger.read() as tx:
        assert tx.blocks.states()[0].returned_batches == lease.steps
        assert tx.blocks.states()[0].to_hand_out == 40


def test_an_expired_range_is_handed_out_again(service: Service, clock: SetClock):
    first, second = join(service), join(service)
    lost, kept = first.lease(blocks=(0,)), second.lease(blocks=(0,), steps_per_second=0.001)
    clock.forward(120)
    service.leases.expire()
    assert progress(first, lost).open
    clock.forward(0.1)
    service.leases.expire()
    assert not progress(first, lost).open
    assert progress(second, kept).open
    assert covered(join(service).lease(blocks=(0,))) == covered(lost)
    event = service.reports.events(0, 100)[-3]
    assert (event.kind, event.worker, event.detail) == ("lost", first.id, "10 steps")


def test_an_upload_that_never_ends_expires_too(service: Service, clock: SetClock):
    member = join(service)
    lease = member.lease(blocks=(0,))
    service.updates.offer(member.caller, member.make(lease).offer)
    clock.forward(121)
    service.leases.expire()
    assert not progress(member, lease).open
    assert covered(member.lease(blocks=(0,))) == covered(lease)


def test_a_short_returned_range_makes_a_short_lease(service: Service):
    slow, quick = join(service), join(service)
    short = slow.lease(blocks=(0,), steps_per_second=0.1)
    give_back(slow, short)
    assert covered(quick.lease(blocks=(0,), steps_per_second=1.0)) == (0, 3)


def test_a_lease_is_its_workers_alone(service: Service):
    owner, other = join(service), join(service)
    lease = owner.lease()
    for call in (lambda: progress(other, lease), lambda: give_back(other, lease)):
        with pytest.raises(RefusedError) as refused:
            call()
        assert refused.value.code == "not_found"
    assert progress(owner, lease).open


def test_a_wrong_fence_is_refused(service: Service):
    member = join(service)
    lease = member.lease()
    with pytest.raises(RefusedError, match="fencing") as refused:
        progress(member, lease, fence=lease.fence + 1)
    assert refused.value.code == "conflict"
    with pytest.raises(RefusedError, match="fencing"):
        give_back(member, lease.model_copy(update={"fence": 9}))
    assert progress(member, lease).open


def test_a_worker_that_dies_forever_does_not_keep_the_run_from_its_end(
    service: Service, clock: SetClock
):
    dead, alive = join(service), join(service)
    dead.lease(blocks=(1,), steps_per_second=100.0)
    for _ in range(4):
        alive.work(blocks=(0,))
        service.round()
    assert isinstance(alive.ask().answer, Wait)
    clock.forward(121)
    service.round()
    alive.work(steps_per_second=100.0)
    service.round()
    assert isinstance(alive.ask().answer, Finished)
    assert weights_now(service.run, 1).keys() == weights_now(service.run, 0).keys()
