"""Handing out work and taking it back, on a real run with a clock that is moved by hand."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tests.support.coordinator import (
    INVITE_SECONDS,
    Member,
    SetClock,
    join,
    join_proven,
    running,
    weights_now,
)

from blocktrain.coordinator.members import Caller
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
from blocktrain.swarm.assignment import IDLE_WAIT, MERGE_WAIT


def progress(
    member: Member, lease: Lease, fence: int | None = None, steps_done: int = 0
) -> LeaseState:
    told = LeaseProgress(fence=fence or lease.fence, steps_done=steps_done)
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
    assert event.detail == f"10 steps from batch 0 (lease {lease.lease})"


def test_an_idle_worker_takes_over_a_lease_that_would_end_much_later(
    tmp_path: Path, clock: SetClock
):
    """The slow worker needs 30 seconds for its three steps, the idle one three."""
    with running(tmp_path, clock, swarm__quorum=1) as service:
        slow, idle = join_proven(service), join_proven(service)
        lease = slow.lease(blocks=(0,), steps_per_second=0.1)
        rest = idle.lease(blocks=(0,), steps_per_second=3.0)
        assert lease.steps + rest.steps == 40
        assert idle.send(idle.make(rest)).state == "pending"
        clock.forward(6)
        service.round()
        again = idle.lease(blocks=(0,), steps_per_second=1.0)
        assert covered(again) == covered(lease)
        assert again.base_version == 1
        closed = progress(slow, lease, steps_done=1)
        assert (closed.open, "took over" in closed.reason) == (False, True)
        assert slow.send(slow.make(lease)).state == "refused"  # its batches were leased again
        assert idle.send(idle.make(again)).state == "pending"


@pytest.mark.parametrize("measured", [False, True])
def test_a_claimed_speed_takes_no_lease_over(service: Service, measured: bool):
    slow = join_proven(service)
    other = join_proven(service) if measured else join(service)
    leases = [slow.lease(blocks=(0,), steps_per_second=0.1)]
    for _ in range(3):
        helper = join(service)
        if isinstance(lease := helper.ask(blocks=(0,)).answer, Lease):
            leases.append(lease)
    assert sum(lease.steps for lease in leases) > 30
    while isinstance(join(service).ask(blocks=(0,)).answer, Lease):
        pass  # the rest
    answer = other.ask(blocks=(0,), steps_per_second=1000.0).answer
    assert isinstance(answer, Lease) == measured


def test_a_worker_cannot_collect_leases_by_naming_each_as_trained(tmp_path: Path, clock: SetClock):
    with running(tmp_path, clock, swarm__codec="int8") as service:
        member, answers = join(service), []
        for _ in range(5):
            trained = answers[-1].lease if answers else None
            answer = member.ask(trained=trained, blocks=(len(answers) % 2,)).answer
            if isinstance(answer, Wait):
                break
            answers.append(answer)
        assert len(answers) == 2  # one that is sent, one that is trained
        assert "still being sent" in answer.reason


def test_asking_twice_gives_the_same_lease(service: Service, clock: SetClock):
    """Its answer was lost, or the worker was restarted; whatever it says it wants now."""
    member = join(service)
    lease = member.lease()
    clock.forward(50)
    again = member.lease(blocks=(1,), steps_per_second=3.0)
    assert again == lease.model_copy(update={"seconds_left": 70.0})
    assert [event.kind for event in service.reports.events(0, 100)] == ["joined", "leased"]


def test_steps_and_deadline_are_fitted_to_the_speed(service: Service):
    fast, slow = join_proven(service), join_proven(service)
    quick = fast.lease(blocks=(0,), steps_per_second=0.5)
    assert (quick.steps, quick.seconds_left) == (15, 120)
    tiny = slow.lease(blocks=(0,), steps_per_second=0.01)
    assert (tiny.steps, tiny.seconds_left) == (1, 400)
    assert join(service).lease(blocks=(0,)).steps == 10
    rest = join_proven(service).lease(blocks=(0,), steps_per_second=100.0)
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
        assert join_proven(service).lease(blocks=blocks, steps_per_second=1.0).steps == 30
    clock.forward(28)
    assert join_proven(service).lease(blocks=own, steps_per_second=1.0).steps == steps


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
        assert answer.reason.endswith("wait until earlier blocks are trained further")
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
    service.updates.record_offer(member.caller, member.make(lease).offer)
    assert member.lease().block == 1


def test_a_worker_that_can_do_nothing_now_is_told_to_wait(service: Service):
    first, second = join_proven(service), join(service)
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
    first, second = join_proven(service), join_proven(service)
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
    assert not state.open and state.reason.startswith("this lease is expired:")


def test_heartbeats_without_progress_move_no_deadline(service: Service, clock: SetClock):
    member = join(service)
    lease = member.lease()
    for seconds in (10, 90):
        clock.forward(seconds)
        assert progress(member, lease).seconds_left == 120.0 - (clock() - service.run.created)
        assert service.reports.status().workers[0].seconds_since_seen == 0
    clock.forward(20.5)
    service.leases.expire()
    assert not progress(member, lease).open


def test_a_returned_range_is_handed_out_again(service: Service):
    first, second = join(service), join(service)
    lease = first.lease(blocks=(0,))
    state = give_back(first, lease, "the laptop sleeps")
    assert (state.open, state.reason) == (False, "the lease was returned")
    assert covered(second.lease(blocks=(0,))) == covered(lease)
    event = service.reports.events(0, 100)[-2]
    assert (event.kind, event.worker) == ("returned", first.id)
    assert event.detail == f"the laptop sleeps (lease {lease.lease})"


def test_a_lease_can_end_before_all_its_steps(service: Service):
    slow, fast = join(service), join(service)
    lease = slow.lease()
    assert lease.steps == 10
    ended = LeaseProgress(fence=lease.fence, steps_done=4, ends=True)
    assert service.leases.progress(slow.caller, lease.lease, ended).open
    assert service.leases.progress(slow.caller, lease.lease, ended).open  # the answer was lost
    rest = fast.lease(blocks=(lease.block,))
    assert covered(rest)[0] == lease.first_batch + 4
    assert slow.send(slow.make(lease)).state == "pending"
    with service.run.ledger.read() as tx:
        (pending,) = tx.blocks.states()[lease.block].pending
        assert pending.steps == 4
        assert tx.leases.steps_lost() == {}


def test_steps_of_expired_leases_are_counted_unless_their_update_comes_late(
    service: Service, clock: SetClock
):
    late, gone = join(service), join(service)
    first, second = late.lease(blocks=(0,)), gone.lease(blocks=(0,))
    clock.now += 1e6
    service.leases.expire()
    with service.run.ledger.read() as tx:
        assert tx.leases.steps_lost() == {0: first.steps + second.steps}
    assert late.send(late.make(first)).state == "pending"
    assert service.reports.status().blocks[0].steps_lost == second.steps


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
    assert (event.kind, event.worker) == ("lost", first.id)
    assert event.detail == f"10 steps; it missed its deadline (lease {lost.lease})"


def test_an_upload_that_never_ends_expires_too(service: Service, clock: SetClock):
    member = join(service)
    lease = member.lease(blocks=(0,))
    service.updates.record_offer(member.caller, member.make(lease).offer)
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
    dead, alive = join_proven(service), join_proven(service)
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


# What a worker claims, and what it does

EXPLOIT = {"steps_per_second": 99_999.0, "transfer_seconds": 999_999.0}


def wait(service: Service, clock: SetClock, seconds: int) -> None:
    """The coordinator makes its rounds meanwhile."""
    for _ in range(seconds):
        clock.forward(1.0)
        service.leases.expire()


def held(service: Service) -> int:
    with service.run.ledger.read() as tx:
        return len(tx.leases.active())


def test_who_claims_to_be_fast_on_a_slow_line_gets_a_first_lease_with_a_bound(service: Service):
    lease = join(service).lease(**EXPLOIT)
    assert lease.steps == 10
    assert lease.seconds_left == 4 * (30 + 30)
    crawling = join(service).lease(steps_per_second=1e-9, transfer_seconds=999_999.0)
    assert crawling.steps == 1
    assert crawling.seconds_left == 4 * (300 + 30)
    slow_line = join_proven(service).lease(steps_per_second=1.0, transfer_seconds=999_999.0)
    assert slow_line.seconds_left == 4 * (30 + 300)


def test_a_run_finishes_without_whoever_only_asks(tmp_path: Path, clock: SetClock):
    with running(tmp_path, clock, swarm__take_over=False) as service:
        join(service).lease(blocks=(1,), **EXPLOIT)
        alive = join(service)
        for _ in range(7):
            alive.work()
            service.round()
        assert isinstance(alive.ask().answer, Wait)
        for _ in range(13):
            wait(service, clock, 10)
            answer = alive.ask().answer  # it is heard of
        assert isinstance(answer, Lease)
        assert alive.send(alive.make(answer)).state == "pending"
        service.round()
        assert isinstance(alive.ask().answer, Finished)


def test_a_fast_worker_gets_full_leases_after_its_first(tmp_path: Path, clock: SetClock):
    with running(tmp_path, clock, train__steps=4000) as service:
        member, steps = join(service), []
        for _ in range(3):
            lease = member.lease(blocks=(0,), steps_per_second=3.0, transfer_seconds=10.0)
            clock.forward(10.0 + lease.steps / 3.0)
            assert member.send(member.make(lease)).state == "pending"
            service.round()
            steps.append(lease.steps)
        assert steps == [10, 90, 90]


def test_speed_beyond_what_was_measured_is_not_believed(tmp_path: Path, clock: SetClock):
    with running(tmp_path, clock, train__steps=4000) as service:
        member = join(service)
        lease = member.lease(blocks=(0,), **EXPLOIT)
        clock.forward(100.0)  # a step in ten seconds; ten times that is believed
        assert member.send(member.make(lease)).state == "pending"
        service.round()
        assert member.lease(blocks=(0,), **EXPLOIT).steps == 30


def test_a_coordinator_that_was_restarted_begins_with_first_leases(tmp_path: Path, clock: SetClock):
    with running(tmp_path, clock, train__steps=4000) as service:
        member = join_proven(service)
        assert member.work(blocks=(0,), steps_per_second=3.0).steps == 90
        service.round()
        other = replace(member, service=Service(service.run))
        assert other.work(blocks=(0,), steps_per_second=3.0).steps == 10
        other.service.round()
        assert other.lease(blocks=(0,), steps_per_second=3.0).steps == 90


def test_the_lease_of_a_silent_worker_expires_before_its_deadline(
    service: Service, clock: SetClock
):
    silent, alive = join(service), join(service)
    lost, kept = silent.lease(**EXPLOIT), alive.lease(**EXPLOIT)
    for _ in range(12):
        wait(service, clock, 10)
        assert progress(alive, kept).open
    assert held(service) == 2
    wait(service, clock, 1)
    assert held(service) == 1
    wait(service, clock, 5)
    assert not progress(silent, lost).open
    assert progress(alive, kept).open
    workers = {worker.worker: worker.state for worker in service.reports.status().workers}
    assert workers[silent.id] != "lost"  # it was heard of since


def test_after_a_pause_of_the_coordinator_all_workers_have_time_to_be_heard(
    service: Service, clock: SetClock
):
    """It was suspended, or had no ledger, or was restarted."""
    member = join_proven(service)
    lease = member.lease(steps_per_second=0.1, transfer_seconds=300.0)
    wait(service, clock, 10)
    clock.forward(1000.0)
    wait(service, clock, 100)
    assert held(service) == 1
    restarted = Service(service.run)
    wait(restarted, clock, 100)
    assert held(service) == 1
    assert progress(member, lease).open
    wait(restarted, clock, 121)
    assert held(service) == 0


def test_a_slow_worker_keeps_its_lease_while_it_comes_on(service: Service, clock: SetClock):
    """It was thought to need 30 seconds, and needs 900."""
    member = join_proven(service)
    lease = member.lease(steps_per_second=1.0)
    assert (lease.steps, lease.seconds_left) == (30, 120)
    for second in range(0, 900, 10):
        assert progress(member, lease, steps_done=second // 30).open
        wait(service, clock, 10)
    assert member.send(member.make(lease)).state == "pending"


def test_a_worker_that_comes_on_no_more_loses_its_lease(service: Service, clock: SetClock):
    member = join_proven(service)
    lease = member.lease(steps_per_second=1.0)
    seconds = 0
    while progress(member, lease, steps_done=min(29, seconds // 10)).open:
        wait(service, clock, 10)
        seconds += 10
    assert seconds <= 290 + 120 + 10


@pytest.mark.parametrize("pace", [10.0, 200.0])
def test_no_lease_is_extended_for_ever(service: Service, clock: SetClock, pace: float):
    """Who lies about its steps keeps a lease for 30 usual deadlines at the most; who could not end
    within that at its own pace is not waited for."""
    member = join_proven(service)
    lease = member.lease(steps_per_second=1.0)
    seconds = 0
    while progress(member, lease, steps_done=int(30 * (1 - 0.999 ** (seconds / pace)))).open:
        wait(service, clock, 10)
        seconds += 10
    assert seconds <= 3610


def test_an_upload_goes_on_while_its_chunks_come_in(service: Service, clock: SetClock):
    member = join(service)
    lease = member.lease(blocks=(0,))
    service.updates.record_offer(member.caller, member.make(lease).offer)
    for _ in range(6):
        wait(service, clock, 110)  # no heartbeat
        service.leases.record_chunk(member.caller, lease.lease)
    assert held(service) == 1
    wait(service, clock, 121)
    assert held(service) == 0
    state = progress(member, lease)
    service.leases.record_chunk(member.caller, lease.lease)
    assert progress(member, lease) == state


def test_only_its_own_worker_keeps_an_upload(service: Service, clock: SetClock):
    owner, other = join(service), join(service)
    lease = owner.lease(blocks=(0,))
    wait(service, clock, 100)
    service.leases.record_chunk(other.caller, lease.lease)
    assert progress(owner, lease).seconds_left == 20.0


def test_chunks_are_recorded_only_if_that_changes_something(service: Service, clock: SetClock):
    member = join(service)
    lease = member.lease(blocks=(0,))
    records = []
    record_chunk = service.leases.record_chunk

    def counted(caller: Caller, lease_id: str) -> None:
        records.append(clock.now - began)
        record_chunk(caller, lease_id)

    async def receive(seconds: int) -> None:
        service.executor.start()
        for _ in range(seconds):
            clock.forward(1.0)
            await service.leases.chunk_received(member.caller, lease.lease)
        service.executor.stop()

    began = clock.now
    with patch.object(service.leases, "record_chunk", counted):
        asyncio.run(receive(300))
    assert records[:3] == [5.0, 10.0, 15.0]
    assert len(records) < 70  # some more, because they move the deadline
    service.leases.expire()
    assert held(service) == 1


CASCADE = {"objective__kind": "cascade", "objective__tail": 1, "objective__lead": 0.1}


@pytest.mark.parametrize("claims", [{}, {"steps_per_second": 1e5, "transfer_seconds": 1e5}])
@pytest.mark.parametrize("kind", [{}, CASCADE])
def test_hoarders_do_not_keep_a_run_from_its_end(
    tmp_path: Path, clock: SetClock, claims: dict[str, float], kind: dict[str, Any]
):
    """Thirteen new keys on one invite lease all text at once, ask again as soon as they lose it,
    and report progress that they do not make. An honest worker takes their leases over."""
    with running(tmp_path, clock, train__steps=60, **kind) as service:
        honest = join_proven(service)
        secret = service.operator.invite("train", 13, INVITE_SECONDS)
        hoarders = [join(service, invite=secret) for _ in range(13)]
        taken = [hoarder.ask(**claims).answer for hoarder in hoarders]
        held = {
            h.id: lease
            for h, lease in zip(hoarders, taken, strict=True)
            if isinstance(lease, Lease)
        }
        assert sum(lease.steps for lease in held.values()) >= 60  # all of the blocks that are open
        assert max(lease.seconds_left for lease in held.values()) <= 240
        clock.forward(20)
        began = clock.now
        for hoarder in hoarders[: len(held)]:  # as if the last step was under way
            progress(hoarder, held[hoarder.id], steps_done=held[hoarder.id].steps - 1)
        while not isinstance(answer := honest.ask(steps_per_second=4.0).answer, Finished):
            if isinstance(answer, Lease):
                clock.forward(answer.steps / 4.0)
                assert honest.send(honest.make(answer)).state == "pending"
            else:
                clock.forward(answer.seconds)
            service.round()
            for hoarder in hoarders:
                if lease := held.get(hoarder.id):
                    progress(hoarder, lease, steps_done=lease.steps - 1)
                if isinstance(lease := hoarder.ask(**claims).answer, Lease):
                    held[hoarder.id] = lease
        assert clock.now - began < 1.5 * 120 / 4.0
