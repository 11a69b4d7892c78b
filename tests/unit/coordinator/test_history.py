"""What the run page shows of a run's past, and what a pause does."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.support.coordinator import SetClock, join, running

from blocktrain.coordinator.control import set_control
from blocktrain.coordinator.history import ALL, MOST_POINTS, MOST_RATES, Series, Sums
from blocktrain.coordinator.service import Service
from blocktrain.protocol.messages import Lease, LeaseProgress, Wait
from blocktrain.protocol.page_messages import Contributor, Overview
from blocktrain.protocol.status_messages import Score

TOKENS_PER_STEP = 2 * 8


def overview(service: Service) -> Overview:
    service.feed.page.refresh()
    return service.feed.page.overview()


def test_a_long_curve_is_thinned_and_keeps_its_shape():
    curve = Series()
    for time in range(10_000):
        curve.add(float(time), 10_000.0 - time)
    points = curve.points()
    assert MOST_POINTS <= len(points) <= 2 * MOST_POINTS + 1
    assert all(time + value == 10_000.0 for time, value in points)  # means of both agree
    assert [time for time, _ in points] == sorted(time for time, _ in points)
    newest = curve.newest("scores")
    assert newest is not None and newest.trend is not None
    assert newest.trend.change == pytest.approx(-newest.trend.seconds)  # falls by 1 per second


def test_amounts_of_a_long_run_are_in_few_buckets_and_none_is_lost():
    sums = Sums(started=100.0)
    for time in range(100, 5_100):
        sums.add(ALL, float(time), 3)
    rates = sums.rates(ALL, 5_100.0)
    assert len(rates) <= MOST_RATES
    assert all(rate == pytest.approx(3.0) for _, rate in rates)
    assert sums.totals(ALL)[-1][1] == 15_000


def test_the_overview_counts_what_was_merged_and_by_whom(service: Service, clock: SetClock):
    ann, bob = join(service, name="ann"), join(service, name="bob")
    for worker, block in ((ann, 0), (bob, 1), (ann, 0)):
        clock.forward(20.0)
        worker.work(blocks=(block,))
        service.round()
    now = overview(service)
    assert now.tokens_trained == 30 * TOKENS_PER_STEP
    assert now.tokens_total == 80 * TOKENS_PER_STEP
    assert now.progress == pytest.approx(30 / 80)
    assert now.tokens_per_second == pytest.approx(30 * TOKENS_PER_STEP / 60.0)
    assert now.seconds_left == pytest.approx(50 / 30 * 60.0)
    first, second = now.blocks
    assert first.loss is not None and (first.loss.source, first.loss.value) == ("workers", 1.5)
    assert (first.version, second.version, first.staleness) == (2, 1, 0.0)
    tokens = {each.name: each.tokens for each in contributors(service)}
    assert tokens == {"ann": 20 * TOKENS_PER_STEP, "bob": 10 * TOKENS_PER_STEP}
    number = next(each.number for each in contributors(service) if each.name == "ann")
    points = service.feed.page.contribution(number).points
    assert points[-1][1] == 20 * TOKENS_PER_STEP


def contributors(service: Service) -> Sequence[Contributor]:
    return service.feed.page.contributors(private=False).workers


def test_scores_come_before_checks_before_what_workers_report(tmp_path: Path, clock: SetClock):
    with running(tmp_path, clock, requires_checks=True) as service:
        worker, validator = join(service), join(service, "validate")
        worker.work(blocks=(0,))
        while validator.caller and (check := validator.request_check()) and check.kind == "check":
            validator.score()
        service.round()
        loss = overview(service).blocks[0].loss
        assert loss is not None and (loss.source, loss.value) == ("checks", pytest.approx(1.98))
        evaluator = join(service, "evaluate")
        score = Score(block=0, versions=(1,), split="valid", windows="w" * 16, ce=1.25)
        service.reports.score(evaluator.caller, score)
        loss = overview(service).blocks[0].loss
        assert loss is not None and (loss.source, loss.value) == ("scores", 1.25)


def test_a_paused_run_ends_leases_and_says_so_and_a_resumed_one_goes_on(service: Service):
    run, member = service.run, join(service)
    lease = member.lease()
    assert set_control(run.ledger, run.clock, "paused") == 1
    assert set_control(run.ledger, run.clock, "paused") == 0  # again changes nothing
    progress = LeaseProgress(fence=lease.fence, steps_done=5)
    state = service.leases.progress(member.caller, lease.lease, progress)
    assert not state.open and "the operator has paused the run" in state.reason
    answer = member.ask().answer
    assert isinstance(answer, Wait) and "the operator has paused the run" in answer.reason
    assert overview(service).state == "paused" and overview(service).seconds_left is None
    set_control(run.ledger, run.clock, "running")
    again = member.lease()
    assert (again.first_batch, again.steps) == (lease.first_batch, lease.steps)
    kinds = [event.kind for event in service.reports.events(0, 100)]
    assert kinds == ["joined", "leased", "paused", "resumed", "leased"]


def test_a_draining_run_lets_leases_end_and_is_then_drained(service: Service):
    run, member, other = service.run, join(service), join(service)
    lease = member.lease()
    assert set_control(run.ledger, run.clock, "draining") == 0
    assert isinstance(other.ask().answer, Wait)
    assert isinstance(member.lease(), Lease)  # its own again
    assert overview(service).state == "draining"
    assert member.send(member.make(lease)).state == "pending"
    service.round()
    now = overview(service)
    assert now.state == "drained" and now.blocks[lease.block].version == 1
    assert isinstance(member.ask().answer, Wait)


def test_the_past_is_the_same_whether_it_is_read_at_once_or_in_steps(
    service: Service, clock: SetClock
):
    member = join(service)
    for _ in range(4):
        clock.forward(7.0)
        member.work()
        service.round()
        service.feed.page.refresh()
    in_steps = service.feed.page.charts()
    at_once = Service(service.run).feed.page
    at_once.refresh()
    assert at_once.charts() == in_steps
    assert sum(len(curve.points) for curve in in_steps.losses) == 4
