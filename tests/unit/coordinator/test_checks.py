"""Updates wait for validators, whose results decide on them: on a real run, with made-up scores."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.coordinator import (
    INVITE_SECONDS,
    Member,
    SetClock,
    first_weights,
    join,
    join_message,
    losses,
    open_stores,
    running,
    weights_now,
)

from blocktrain.coordinator.checks import CHECK_SECONDS
from blocktrain.coordinator.members import VALIDATOR_SECONDS
from blocktrain.coordinator.run import open_run
from blocktrain.coordinator.service import Service
from blocktrain.coordinator.verdicts import MOST_UNABLE
from blocktrain.errors import RefusedError
from blocktrain.ledger.schema import UpdateRow, WorkerRow
from blocktrain.protocol.check_messages import Check, CheckRequest, ScoreCheck, ScoreResult, Unable
from blocktrain.protocol.messages import Lease, LeaseRequest, Wait
from blocktrain.storage.blobs import blob_of
from blocktrain.swarm import reputation

pytestmark = pytest.mark.usefixtures("workers_without_states_are_trusted")

SETTINGS = {"train__steps": 4000, "train__warmup": 0, "swarm__quorum": 2}


@pytest.fixture
def service(tmp_path: Path, clock: SetClock) -> Iterator[Service]:
    with running(tmp_path, clock, requires_checks=True, **SETTINGS) as service:
        yield service


@pytest.fixture
def second(service: Service, tmp_path: Path, clock: SetClock) -> Iterator[Service]:
    """Another coordinator of the same run."""
    run = open_run(*open_stores(tmp_path), clock)
    yield Service(run)
    run.ledger.close()


def row(service: Service, member: Member) -> WorkerRow:
    with service.run.ledger.read() as tx:
        worker = tx.members.worker(member.id)
    assert worker is not None
    return worker


def update_of(service: Service, lease: Lease) -> UpdateRow:
    with service.run.ledger.read() as tx:
        update = tx.updates.get(lease.lease)
    assert update is not None
    return update


def version_of(service: Service, block: int = 0) -> int:
    with service.run.ledger.read() as tx:
        return tx.blocks.get(block).version


def events(service: Service, kind: str) -> list[str]:
    return [each.detail for each in service.reports.events(0, 10_000) if each.kind == kind]


def about_scores(service: Service) -> list[str]:
    """What was recorded about scores. The updates of these tests name no states, which is recorded
    as well."""
    return [each for each in events(service, "checked") if "names no states" not in each]


def work(member: Member, validator: Member, **score: float) -> Lease:
    """A lease of block 0, from the request to the validator's report and the merge."""
    lease = member.work(blocks=(0,))
    validator.score(**score)
    member.service.round()
    return lease


def many(service: Service, validator: Member, count: int) -> Member:
    """A worker whose updates define what is usual."""
    member = join(service)
    for _ in range(count):
        work(member, validator)
    return member


def leases_until_excluded(work_once: Callable[[], object]) -> int:
    for leases in range(60):
        try:
            work_once()
        except RefusedError as refused:
            if "excluded" in str(refused):
                return leases
            raise
    pytest.fail("the worker still gets leases")


# Waiting for checks


def test_an_update_is_merged_once_it_is_checked(service: Service):
    member, validator = join(service), join(service, "validate")
    lease = member.work(blocks=(0,))
    service.round()
    assert version_of(service) == 0
    check = validator.check()
    assert (check.block, check.version, check.text.steps) == (0, 0, lease.steps)
    task = check.task
    assert isinstance(task, ScoreCheck)
    assert task.current == lease.base and task.base is None and task.share == 1.0
    validator.report(check, ScoreResult(hidden=losses(0.02), own=losses(0.1)))
    service.round()
    assert version_of(service) == 1
    checked = update_of(service, lease)
    assert checked.state == "merged" and checked.checked
    assert (checked.gain, checked.own_gain) == pytest.approx((0.02, 0.1))
    assert row(service, member).accepted == 1
    assert row(service, validator).checks == 1


def test_until_then_it_counts_as_being_sent(service: Service, clock: SetClock):
    """It neither counts for the quorum nor does its worker get a lease from the same version."""
    ann, bob, validator = join(service), join(service), join(service, "validate")
    slow = bob.lease(blocks=(0,))
    ann.work(blocks=(0,))
    with service.run.ledger.read() as tx:
        state = tx.blocks.states()[0]
    assert not state.pending and state.open_leases == 2 and ann.id in state.finishing
    assert isinstance(ann.ask(blocks=(0,), held_block=0).answer, Wait)
    clock.forward(1.0)
    bob.send(bob.make(slow))
    validator.score()
    service.round()
    assert version_of(service) == 0, "the other one is still unchecked"
    validator.score()
    service.round()
    assert version_of(service) == 1


def test_the_validator_can_fetch_the_update_by_its_name(service: Service):
    member, validator = join(service), join(service, "validate")
    lease = member.lease(blocks=(0,))
    made = member.make(lease)
    member.send(made)
    answer, recipe = service.checks.claim(validator.caller, CheckRequest())
    assert recipe == made.offer.claim.recipe
    assert isinstance(answer.answer, Check)
    assert answer.answer.task.update == blob_of(recipe)


def test_only_validators_check_and_only_workers_train(service: Service):
    member, validator = join(service), join(service, "validate")
    with pytest.raises(RefusedError, match="validators"):
        member.check()
    with pytest.raises(RefusedError, match="gets no leases"):
        validator.lease()
    lease = member.work()
    check = validator.check()
    other = join(service, "validate")
    with pytest.raises(RefusedError, match="no such check"):
        other.report(check, ScoreResult(hidden=losses(9.0), own=losses(9.0)))
    assert not update_of(service, lease).checked


def test_without_an_update_a_validator_waits(service: Service):
    assert isinstance(join(service, "validate").request_check(), Wait)


def test_a_validator_gets_its_check_again_and_others_get_another(service: Service):
    ann, bob = join(service), join(service)
    first, other = join(service, "validate"), join(service, "validate")
    ann.work(blocks=(0,))
    bob.work(blocks=(1,))
    check = first.check()
    assert first.check().check == check.check
    assert other.check().check != check.check
    assert isinstance(join(service, "validate").request_check(), Wait)


def test_a_check_goes_to_another_validator_when_the_first_does_not_answer(
    service: Service, clock: SetClock
):
    member, dead = join(service), join(service, "validate")
    lease = member.work()
    check = dead.check()
    clock.forward(CHECK_SECONDS)
    service.round()
    other = join(service, "validate")
    assert isinstance(other.request_check(), Wait)
    clock.forward(1.0)
    service.round()
    assert other.check().check == check.check
    with pytest.raises(RefusedError, match="no such check"):
        dead.report(check, ScoreResult(hidden=losses(-9.0), own=losses(-9.0)))
    other.score()
    assert update_of(service, lease).checked


def test_a_result_that_is_sent_twice_counts_once(service: Service):
    member, validator = join(service), join(service, "validate")
    member.work()
    check, result = validator.check(), ScoreResult(hidden=losses(0.02), own=losses(0.1))
    validator.report(check, result)
    validator.report(check, result)
    assert row(service, member).accepted == 1 and row(service, validator).checks == 1


def test_a_run_may_require_checks_later_and_stop_requiring_them(tmp_path: Path, clock: SetClock):
    with running(tmp_path, clock) as service:
        member, validator = join(service), join(service, "validate")
        first = member.work(blocks=(0,))
        service.run.require_checks(True)
        service.round()
        assert version_of(service) == 0
        validator.score()
        service.round()
        assert update_of(service, first).checked and version_of(service) == 1
        member.work(blocks=(0,))
        service.run.require_checks(False)
        service.round()
        assert version_of(service) == 2


def test_hidden_windows_follow_from_the_secret_and_the_version(service: Service):
    ann, bob, validator = join(service), join(service), join(service, "validate")
    seeds = []
    ann.work(blocks=(0,))
    bob.work(blocks=(0,))
    for _ in range(2):
        task = validator.score().task
        assert isinstance(task, ScoreCheck)
        seeds.append(task.seed)
    service.round()
    ann.work(blocks=(0,))
    task = validator.check().task
    assert isinstance(task, ScoreCheck)
    assert seeds[0] == seeds[1] != task.seed


def test_an_update_of_an_older_version_is_compared_with_the_newest(
    service: Service, clock: SetClock
):
    ann, bob, validator = join(service), join(service), join(service, "validate")
    late = bob.lease(blocks=(0,))
    ann.work(blocks=(0,))
    validator.score()
    clock.forward(2 * service.run.config.swarm.lease_seconds)
    service.round()
    assert version_of(service) == 1
    bob.send(bob.make(late))
    check = validator.check()
    assert isinstance(check.task, ScoreCheck)
    assert check.version == 1 and check.task.base == late.base and check.task.share == 0.5


def test_any_coordinator_answers_any_validator(service: Service, second: Service):
    """The second one was not told that checks are required; the run knows."""
    member, validator = join(service), join(service, "validate")
    lease = member.work(blocks=(0,))
    second.round()
    assert version_of(service) == 0
    elsewhere = Member(second, validator.signer, validator.joined)
    check = elsewhere.check()
    validator.report(check, ScoreResult(hidden=losses(0.02), own=losses(0.1)))
    second.round()
    assert version_of(service) == 1 and update_of(service, lease).checked
    trusted = second.leases.claim(
        member.caller, LeaseRequest(blocks=(0,), held_block=0, steps_per_second=1000.0)
    )
    assert isinstance(trusted.answer, Lease) and trusted.answer.steps > lease.steps


# Judging updates


def test_a_harmful_update_does_not_count_and_its_text_is_trained_again(service: Service):
    validator = join(service, "validate")
    many(service, validator, 6)
    hostile = join(service)
    lease = hostile.work(blocks=(0,))
    validator.score(gain=-0.5, own_gain=-0.5)
    refused = update_of(service, lease)
    assert refused.state == "refused" and "raises the loss" in refused.reason
    assert row(service, hostile).refused == 1
    again = join(service).lease(blocks=(0,))
    assert (again.first_batch, again.steps) == (lease.first_batch, lease.steps)


def test_a_hostile_worker_pauses_longer_and_longer_and_is_excluded(
    service: Service, clock: SetClock
):
    validator = join(service, "validate")
    honest = many(service, validator, 6)
    hostile, pauses = join(service), []

    def flip() -> None:
        began = clock()
        while not isinstance(answer := hostile.ask(blocks=(0,)).answer, Lease):
            clock.forward(1.0)
        pauses.append(clock() - began)
        hostile.send(hostile.make(answer))
        validator.score(gain=-0.5, own_gain=-0.5)

    assert leases_until_excluded(flip) == 4
    assert pauses == [0.0, 30.0, 60.0, 120.0]
    (excluded,) = events(service, "excluded")
    assert "4 of 4 updates" in excluded
    secret = service.operator.invite("train", 1, INVITE_SECONDS)
    again = join_message(service.run.id, secret, hostile.signer.key)
    with pytest.raises(RefusedError, match="excluded"):
        service.members.join(again)
    work(honest, validator)
    assert row(service, honest).accepted == 7


def test_a_worker_that_trains_nothing_is_excluded_and_not_credited(
    service: Service, clock: SetClock
):
    """Its updates do no harm, but do not fit the text of their leases."""
    validator = join(service, "validate")
    many(service, validator, 6)
    idle = join(service)

    def send_the_base() -> None:
        lease = idle.lease(blocks=(0,), steps_per_second=1000.0)
        assert lease.steps <= service.run.config.swarm.first_steps
        idle.send(idle.make(lease, by=0.0))
        validator.score(gain=0.0, own_gain=0.0)
        service.round()
        clock.forward(1000.0)

    assert leases_until_excluded(send_the_base) <= 6
    assert row(service, idle).speed is None and row(service, idle).batches_merged == 0


def test_weak_evidence_adds_up(service: Service):
    """A noisy score refuses no update, but many of them exclude the worker."""
    validator = join(service, "validate")
    many(service, validator, 6)
    lazy = join(service)
    noisy = {"gain": 0.02, "own_gain": 0.025, "error": 0.02}
    assert 5 <= leases_until_excluded(lambda: work(lazy, validator, **noisy)) <= 10
    assert row(service, lazy).refused == 0


def test_leases_and_updates_of_an_excluded_worker_end(service: Service):
    validator = join(service, "validate")
    many(service, validator, 6)
    hostile = join(service)
    waiting = hostile.work(blocks=(0,))
    with service.run.ledger.write() as tx:
        tx.members.record_standing(hostile.id, suspicion=9.5)
    other = hostile.lease(blocks=(1,))
    validator.score(gain=-0.5, own_gain=-0.5)
    with service.run.ledger.read() as tx:
        assert tx.leases.get(other.lease).state == "returned"
        assert not tx.checks.due()
    assert update_of(service, waiting).state == "refused"


def test_a_new_key_of_the_same_invite_begins_with_its_reputation(service: Service, clock: SetClock):
    secret = service.operator.invite("train", 10, 1e6)
    first = join(service, invite=secret)
    assert row(service, first).suspicion == 0.0
    service.operator.ban(first.id)
    again = join(service, invite=secret)
    assert row(service, again).suspicion > 3.0
    assert isinstance(again.ask().answer, Wait)
    clock.forward(service.run.config.swarm.lease_seconds)
    again.lease()
    elsewhere = join(service)
    assert row(service, elsewhere).suspicion == 0.0
    elsewhere.lease()


def test_if_most_established_workers_look_harmful_nobody_is_punished(service: Service):
    validator = join(service, "validate")
    members = [join(service) for _ in range(3)]
    for member in members:
        for _ in range(3):
            work(member, validator)
        with service.run.ledger.write() as tx:
            tx.members.record_standing(member.id, accepted=30, replayed=5)
    for member in members[:2]:
        lease = member.work(blocks=(0,))
        validator.score(gain=-0.5, own_gain=-0.4)
        assert update_of(service, lease).state == "refused"
    last = members[2].work(blocks=(0,))
    validator.score(gain=-0.5, own_gain=-0.4)
    assert update_of(service, last).checked
    (said,) = about_scores(service)
    assert "most updates of this block" in said
    assert row(service, members[2]).refused == 0


def test_an_update_that_no_validator_can_score_counts_and_is_reported(service: Service):
    member = join(service)
    validators = [join(service, "validate") for _ in range(MOST_UNABLE)]
    lease = member.work()
    for validator in validators:
        assert not update_of(service, lease).checked
        validator.report(validator.check(), Unable(reason="no memory"))
    assert update_of(service, lease).checked
    assert "no validator could score it" in about_scores(service)[0]


def test_losses_that_are_not_finite_are_harmful(service: Service):
    member, validator = join(service), join(service, "validate")
    lease = member.work()
    check = validator.check()
    hidden = losses(0.0).model_copy(update={"after": None, "error": None})
    validator.report(check, ScoreResult(hidden=hidden, own=losses(0.1)))
    assert "infinite" in update_of(service, lease).reason


# Several validators


def test_a_validator_that_lies_loses_its_role(service: Service, clock: SetClock):
    """It lets every update pass; the two others find out, and are not blamed."""
    ann = join(service)
    liar, *honest = (join(service, "validate") for _ in range(3))

    def lie() -> None:
        ann.work(blocks=(0,))
        liar.score(gain=0.5, own_gain=1.0)
        for validator in honest:
            if not isinstance(validator.request_check(), Wait):
                validator.score()
        service.round()

    assert leases_until_excluded(lie) <= 10
    assert row(service, liar).excluded
    assert not any(row(service, validator).excluded for validator in honest)
    assert row(service, ann).refused == 0


def test_a_validator_that_refuses_everything_does_no_harm(service: Service):
    ann = join(service)
    liar, *honest = (join(service, "validate") for _ in range(3))
    lease = ann.work(blocks=(0,))
    liar.score(gain=-5.0, own_gain=-5.0)
    assert update_of(service, lease).state == "pending"
    for validator in honest:
        validator.score()
    assert update_of(service, lease).checked
    assert row(service, liar).suspicion == reputation.OVERRULED


def test_of_two_that_disagree_the_one_that_joined_first_is_believed(
    service: Service, clock: SetClock
):
    ann, first = join(service), join(service, "validate")
    clock.forward(1.0)
    second = join(service, "validate")
    lease = ann.work(blocks=(0,))
    second.score(gain=-5.0, own_gain=-5.0)
    first.score()
    assert update_of(service, lease).checked
    assert not row(service, second).suspicion


def test_a_second_opinion_is_not_waited_for_when_its_validators_have_left(
    service: Service, clock: SetClock
):
    ann, first = join(service), join(service, "validate")
    join(service, "validate")
    lease = ann.work(blocks=(0,))
    first.score()
    assert not update_of(service, lease).checked, "the other validator repeats it first"
    clock.forward(VALIDATOR_SECONDS + 1)
    assert isinstance(first.request_check(), Wait)
    service.round()
    assert update_of(service, lease).checked


def test_checks_of_a_banned_worker_are_not_handed_out(service: Service):
    member, validator = join(service), join(service, "validate")
    member.work()
    service.operator.ban(member.id)
    assert isinstance(validator.request_check(), Wait)


# Reputation


def test_speed_counts_only_from_updates_that_passed(service: Service, clock: SetClock):
    member, validator = join(service), join(service, "validate")
    first_steps = service.run.config.swarm.first_steps
    lease = member.work(blocks=(0,))
    assert member.lease(blocks=(1,), steps_per_second=1000.0).steps == first_steps
    assert row(service, member).speed is None
    clock.forward(1.0)
    validator.score()
    assert row(service, member).speed == pytest.approx(lease.steps / 1e-3)


def test_newcomers_weigh_less_than_established_workers(service: Service, clock: SetClock):
    validator, ann, bob = join(service, "validate"), join(service), join(service)
    with service.run.ledger.write() as tx:
        tx.members.record_standing(ann.id, accepted=30, replayed=5)
    leases = [member.lease(blocks=(0,)) for member in (ann, bob)]
    for member, lease, by in zip((ann, bob), leases, (1.0, 6.0), strict=True):
        member.send(member.make(lease, by=by))
        validator.score()
    service.round()
    found = weights_now(service.run, 0)["scale"] - first_weights(0)["scale"]
    np.testing.assert_allclose(found, (1.0 + 0.25 * 6.0) / 1.25, rtol=1e-5)


def test_newcomers_among_themselves_weigh_as_without_checks(tmp_path: Path, clock: SetClock):
    results = []
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
        with running(tmp_path / name, clock, requires_checks=name == "with") as service:
            members = [join(service), join(service)]
            leases = [member.lease(blocks=(0,)) for member in members]
            validator = join(service, "validate")
            for number, (member, lease) in enumerate(zip(members, leases, strict=True)):
                member.send(member.make(lease, by=0.1 * (1 + number)))
                if name == "with":
                    validator.score()
            service.round()
            assert version_of(service) == 1
            results.append(weights_now(service.run, 0))
    for tensor, other in zip(results[0].values(), results[1].values(), strict=True):
        np.testing.assert_array_equal(tensor, other)


# What is reported


def test_the_status_tells_what_checks_found_and_cost(service: Service, clock: SetClock):
    member, hostile = join(service, name="ann"), join(service, name="eve")
    member.work(blocks=(0,))
    checking = service.reports.status().checking
    assert checking is not None and (checking.validators, checking.waiting) == (0, 1)
    assert "no validator answers" in checking.note and checking.share is None
    validator = join(service, "validate", name="judge")
    clock.forward(8.0)
    check = validator.check()
    states = {each.name: each.state for each in service.reports.status().workers}
    assert states["judge"] == "checking"
    clock.forward(2.0)
    validator.report(check, ScoreResult(hidden=losses(0.02), own=losses(0.1)))
    lease = hostile.lease(blocks=(1,))
    clock.forward(90.0)
    hostile.send(hostile.make(lease))
    validator.score(gain=-5.0, own_gain=-5.0)
    status = service.reports.status()
    assert status.checking is not None
    assert (status.checking.waiting, status.checking.note) == (0, "")
    assert status.checking.share == pytest.approx(2.0 / 90.0)
    trust = {each.name: each.trust for each in status.workers}
    assert trust["ann"] and trust["ann"].accepted == 1 and trust["ann"].newcomer
    assert trust["eve"] and trust["eve"].refused == 1 and trust["eve"].suspicion > 0
    assert trust["judge"] is None
    states = {each.name: each.state for each in status.workers}
    assert states["eve"] == "paused"
    page = service.metrics.page()[0].decode()
    assert 'blocktrain_judged_updates_total{result="refused"} 1.0' in page
    assert "blocktrain_check_share 0.02" in page


def test_a_run_without_checks_reports_none(tmp_path: Path, clock: SetClock):
    with running(tmp_path, clock) as service:
        join(service).work()
        status = service.reports.status()
    assert status.checking is None and status.workers[0].trust is None
    assert "checking" not in status.model_dump_json() and "trust" not in status.model_dump_json()
