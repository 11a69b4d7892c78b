"""A coordinator with validators: honest updates count, others do not, and their workers go."""

import json
import os
import signal
from contextlib import closing
from pathlib import Path

import pytest
from tests.conftest import ROOT
from tests.support.processes import Processes, Running, free_port
from tests.support.stepped_run import Member, SteppedRun

from blocktrain.cli.options import client_of
from blocktrain.config import Config, load_config
from blocktrain.coordinator.folder import CoordinatorFolder
from blocktrain.data.corpus import load_corpus
from blocktrain.swarm.reputation import SUSPECTED

STEPS_PER_SECOND = 6.0
RUN_SECONDS = 90.0


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "corpus.txt").write_bytes((ROOT / "LICENSE").read_bytes() * 8)
    return tmp_path


@pytest.fixture
def config(home: Path) -> Config:
    return load_config(
        ROOT / "configs" / "tiny.toml",
        ["model.layers=2", "model.blocks=2", "model.width=32", "model.heads=2", "model.window=32",
         "train.steps=60", "train.precision=fp32", "train.device=cpu", "swarm.first_steps=6",
         "swarm.most_steps=6", "swarm.codec=int8", f"data.source=text:{home}/corpus.txt"],
    )  # fmt: skip


def stepped(home: Path, config: Config, plan: str, validators: tuple[str, ...]) -> SteppedRun:
    crew = [Member(name, "honest", STEPS_PER_SECOND) for name in ("a", "b", "c")]
    crew.append(Member("d", plan, STEPS_PER_SECOND))
    return SteppedRun(home, config, load_corpus(config.data), crew, 0, validators)


def events(run: SteppedRun, kind: str) -> list[str]:
    return [each.detail for each in run.service.reports.events(0, 10_000) if each.kind == kind]


def failed(run: SteppedRun) -> dict[str, int]:
    """How many updates of a worker failed their checks, by its name."""
    with run.run.ledger.read() as tx:
        return {row.name: row.refused for row in tx.members.workers() if row.refused}


def test_honest_workers_are_checked_and_never_refused(home: Path, config: Config):
    with stepped(home, config.with_settings(train__steps=36), "honest", ("honest",)) as run:
        run.play()
        assert run.finished
        assert run.validators[0].done >= 12
        assert failed(run) == {}
        assert not events(run, "excluded")
        with run.run.ledger.read() as tx:
            assert {row.unexplained for row in tx.members.workers()} == {0.0}


def test_a_free_rider_is_found_by_scores(home: Path, config: Config):
    with stepped(home, config, "unchanged", ("honest",)) as run:
        run.play()
        assert run.finished
        assert failed(run).keys() == {"d"}
        (excluded,) = events(run, "excluded")
        assert excluded.startswith("d:")


@pytest.mark.parametrize(("plan", "codec"), [("shrunk", "sparse"), ("wrong-text", "none")])
def test_a_worker_that_sends_something_else_is_found_by_replays(
    home: Path, config: Config, plan: str, codec: str
):
    with stepped(home, config.with_settings(swarm__codec=codec), plan, ("honest",)) as run:
        run.play()
        (excluded,) = events(run, "excluded")
        assert excluded.startswith("d:")
        assert [detail for detail in events(run, "checked") if detail.startswith("replay: ")]
        with run.run.ledger.read() as tx:
            workers = [row for row in tx.members.workers() if row.role == "train"]
        assert all(row.replayed >= 2 for row in workers if row.name != "d")
        assert {row.name for row in workers if row.suspicion >= SUSPECTED} == {"d"}


def test_a_validator_that_lies_is_overruled_by_two_others(home: Path, config: Config):
    short, validators = config.with_settings(train__steps=36), ("lying", "honest", "honest")
    with stepped(home, short, "honest", validators) as run:
        run.play()
        assert run.finished
        (excluded,) = events(run, "excluded")
        assert excluded.startswith("validator-0:")
        assert failed(run) == {}


def children(running: Running) -> set[int]:
    """The processes that a process has started."""
    tasks = Path(f"/proc/{running.process.pid}/task").glob("*/children")
    return {int(child) for task in tasks for child in task.read_text().split()}


def is_alive(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
def test_a_coordinator_has_a_validator_which_is_replaced_and_scores_the_run(
    home: Path, tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
):
    """The run cannot end without it: updates wait until they are checked."""
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(home / "cache"))
    small = config.with_settings(train__steps=24, swarm__most_steps=12)
    CoordinatorFolder(home / "run").open_or_create(small).ledger.close()
    with Processes(tmp_path) as processes:
        coordinator = processes.coordinator(home / "run", free_port(), checks=())
        processes.wait_for("the invite", lambda: b"\n" in coordinator.log.read_bytes())
        invite = json.loads(coordinator.log.read_text().splitlines()[0])["invite"]
        processes.wait_for("a validator", lambda: bool(children(coordinator)))
        (first,) = children(coordinator)
        os.kill(first, signal.SIGKILL)
        worker = processes.worker(invite, "worker")
        processes.wait_for("the end of the run", lambda: worker.code is not None, RUN_SECONDS)
        assert worker.code == 0
        with closing(client_of(invite)) as client:
            status = client.status()
        assert status.state == "finished"
        processes.wait_for("the validator ends", lambda: not children(coordinator))
        with closing(client_of(invite)) as client:
            scored = client.status()
        assert scored.ce is not None and scored.ce < 5.0  # of the final versions
        assert scored.checking is not None
        assert scored.checking.scored == tuple(block.version for block in scored.blocks)
        assert all(block.ce is not None for block in scored.blocks)
        with closing(CoordinatorFolder(home / "run").open().ledger) as ledger, ledger.read() as tx:
            by_role = {each.role: each for each in tx.members.workers()}
        assert by_role["validate"].checks >= 4
        assert by_role["train"].replayed >= 1  # it has sent files while it trained on
        assert by_role["train"].suspicion == by_role["train"].unexplained == 0.0
        coordinator.process.terminate()
        coordinator.process.wait(RUN_SECONDS)
        log = coordinator.log.read_text()
        assert "validator 0 ended with code -9; starting it again" in log


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
def test_a_validator_ends_with_a_coordinator_that_was_killed(
    home: Path, tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(home / "cache"))
    CoordinatorFolder(home / "run").open_or_create(config).ledger.close()
    with Processes(tmp_path) as processes:
        coordinator = processes.coordinator(home / "run", free_port(), checks=())
        processes.wait_for("a validator", lambda: bool(children(coordinator)))
        (validator,) = children(coordinator)
        coordinator.kill()
        processes.wait_for("its end", lambda: not is_alive(validator))
