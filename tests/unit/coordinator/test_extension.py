"""A coordinator's run is extended: what its workers and validators get afterwards."""

from pathlib import Path

import pytest
from tests.support.coordinator import Member, SetClock, join, running, swarm_config

from blocktrain.config import from_toml
from blocktrain.coordinator.control import OUTDATED, extend
from blocktrain.coordinator.folder import CoordinatorFolder
from blocktrain.coordinator.run import Run, open_run
from blocktrain.coordinator.service import Service
from blocktrain.errors import ConfigError, RefusedError
from blocktrain.ledger.schema import LeaseRow
from blocktrain.protocol.messages import Finished


def reopened(run: Run, clock: SetClock) -> Service:
    """The service of a coordinator that is started again."""
    return Service(open_run(run.ledger, run.chunks, clock))


def again(member: Member, service: Service) -> Member:
    """The same worker, at the coordinator that was started again."""
    return Member(service, member.signer, member.joined)


def finish(service: Service, member: Member, **request: object) -> None:
    while not isinstance(member.ask(**request).answer, Finished):
        member.work(**request)
        service.round()
    service.round()


def state(service: Service) -> str:
    return service.reports.status().state


def test_a_finished_run_goes_on_and_ends_again(tmp_path: Path, clock: SetClock):
    with running(tmp_path, clock) as service:
        member = join(service)
        finish(service, member)
        assert state(service) == "finished"
        assert extend(service.run.ledger, clock, 60).train.ends == (40, 60)
        later = reopened(service.run, clock)
        assert from_toml(later.run.description.config).train.ends == (40, 60)
        assert state(later) != "finished"
        assert [block.progress for block in later.reports.status().blocks] == [40 / 60] * 2
        newcomer = again(member, later)
        lease = newcomer.lease(run_steps=60)
        assert (lease.first_batch, lease.schedule_start) == (40, 40)
        newcomer.send(newcomer.make(lease))
        later.round()
        finish(later, newcomer, run_steps=60)
        assert state(later) == "finished"
        kinds = [event.kind for event in later.reports.events(0, 1000)]
        assert kinds.count("finished") == 2
        assert kinds.count("extended") == 1


def test_a_worker_with_the_old_settings_joins_again(tmp_path: Path, clock: SetClock):
    with running(tmp_path, clock) as service:
        member, validator = join(service), join(service, "validate")
        lease = member.lease()
        extend(service.run.ledger, clock, 60)
        later = reopened(service.run, clock)
        worker, checker = again(member, later), again(validator, later)
        assert worker.send(worker.make(lease)).state == "pending"  # open leases count
        for steps in (None, 40, 61):
            with pytest.raises(RefusedError, match="extended to 60 steps") as refused:
                worker.ask(run_steps=steps)
            assert refused.value.code == "conflict"
            with pytest.raises(RefusedError, match="extended to 60 steps"):
                checker.request_check(run_steps=steps)
        worker.lease(run_steps=60)
        checker.request_check(run_steps=60)


def test_a_running_coordinator_hands_out_nothing_and_ends(tmp_path: Path, clock: SetClock):
    with running(tmp_path, clock) as service:
        member, ended = join(service), []
        service.on_outdated = lambda: ended.append(True)
        service.round()
        assert not ended
        extend(service.run.ledger, clock, 60)
        for ask in (member.ask, join(service, "validate").request_check):
            with pytest.raises(RefusedError, match=OUTDATED) as refused:
                ask(run_steps=60)
            assert refused.value.code == "unavailable"
        service.round()
        assert ended
        assert service.is_outdated


def test_leases_whose_rates_have_changed_are_not_replayed(tmp_path: Path, clock: SetClock):
    """Near the end, several workers' schedules reach past it."""
    with running(tmp_path, clock) as service:
        before = clock()
        clock.forward(10.0)
        extend(service.run.ledger, clock, 60)
        replays = reopened(service.run, clock).checks.replays
        clock.forward(10.0)
        for created, start, stride, changed in [
            (before, 20, 1, False),  # up to step 29
            (before, 30, 1, False),  # up to 39
            (before, 31, 1, True),
            (before, 20, 3, True),
            (clock(), 31, 1, False),  # granted under the new settings
        ]:
            lease = LeaseRow(
                id="lease", worker="worker", block=0, base_version=0, first_batch=0, steps=10,
                schedule_start=start, schedule_stride=stride, fence=1, deadline=0.0,
                created=created,
            )  # fmt: skip
            assert replays._had_other_rates(lease) == changed


def test_a_folder_is_opened_with_the_first_settings_or_the_new_ones(tmp_path: Path):
    text = tmp_path / "corpus.txt"
    text.write_text("some words " * 2000)
    config = swarm_config(data__source=f"text:{text}")
    home = CoordinatorFolder(tmp_path / "run")
    home.open_or_create(config).ledger.close()
    operator = home.operator()
    with pytest.raises(ConfigError, match="40 steps per block already"):
        extend(operator.ledger, operator.clock, 40)
    extend(operator.ledger, operator.clock, 60)
    operator.ledger.close()
    for known in (config, config.extended_to(60)):
        run = home.open_or_create(known)
        assert run.config.train.ends == (40, 60)
        run.ledger.close()
    with pytest.raises(ConfigError, match="other settings"):
        home.open_or_create(config.with_settings(train__steps=60))
