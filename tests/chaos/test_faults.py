"""Processes die at the worst moments and come back; the run ends as if nothing had happened:
every batch of every block is merged exactly once, and the model has learned."""

import math
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import ROOT
from tests.support.blobs import whole
from tests.support.postgres import private_server
from tests.support.processes import Processes, Running, free_port, full_disk

from blocktrain.codec.dense import Int8
from blocktrain.config import Config, load_config
from blocktrain.coordinator.folder import CoordinatorFolder
from blocktrain.coordinator.members import Operator
from blocktrain.coordinator.merger import MergedAs
from blocktrain.coordinator.run import Run
from blocktrain.coordinator.updates import signed_claim
from blocktrain.data.corpus import evaluation_windows, load_corpus
from blocktrain.ledger.schema import leases, updates
from blocktrain.numerics.merge import MergeRule
from blocktrain.protocol.identity import WorkerKey
from blocktrain.protocol.invite import Invite
from blocktrain.protocol.messages import Blob
from blocktrain.protocol.status_messages import Status
from blocktrain.storage.blobs import Blobs
from blocktrain.storage.merging import Compression, MergeInput, merge_blobs
from blocktrain.storage.run_dir import RunDir
from blocktrain.storage.weights_file import follow_blobs
from blocktrain.swarm import merging_rules
from blocktrain.swarm.state import PendingUpdate
from blocktrain.training.device import resolve
from blocktrain.training.evaluate import evaluate
from blocktrain.training.stored_models import load_stack
from blocktrain.worker.client import Client
from blocktrain.worker.downloads import fetch_model

STEPS = 30
LEARNED = 4.0  # nats per byte; knowing nothing is ln 256 = 5.5
RUN_SECONDS = 45.0
INVITE_SECONDS = 1e6
OUTAGE_SECONDS = 1.0


@pytest.fixture(scope="module")
def founded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run nobody has worked for yet; every test gets a copy."""
    folder = tmp_path_factory.mktemp("founded") / "run"
    _found(folder)
    return folder


def _found(folder: Path, db: str | None = None, *more: str) -> None:
    CoordinatorFolder(folder, db).open_or_create(_config(folder.parent, *more)).ledger.close()


def _config(folder: Path, *more: str) -> Config:
    text = folder / "text.txt"
    text.write_text("the cat sat on the mat; a dog lay in the sun and slept. " * 400)
    return load_config(
        ROOT / "configs" / "tiny.toml",
        ["model.layers=2", "model.blocks=2", "model.width=32", "model.window=32",
         f"train.steps={STEPS}", "train.batch=4", "train.warmup=2", "train.lr=1e-2",
         "train.precision=fp32", "train.device=cpu", f"data.source=text:{text.as_posix()}",
         "swarm.first_steps=5", "swarm.most_steps=10", "swarm.quorum=1",
         "swarm.grace_seconds=0", "swarm.shortest_deadline=3", "swarm.deadline_factor=1",
         "swarm.lease_seconds=3", *more],
    )  # fmt: skip


class Swarm:
    """A run's folder, its processes, and what must be true of it in the end."""

    def __init__(self, folder: Path, processes: Processes, db: str | None = None) -> None:
        self.folder, self.processes, self.db = folder, processes, db
        self.ports = ports = (free_port(), free_port())
        self.run = CoordinatorFolder(folder, db).open()
        secret = Operator(self.run.ledger, self.run.clock).invite("train", 100, INVITE_SECONDS)
        addresses = tuple(f"https://127.0.0.1:{port}" for port in ports)
        self.invite = Invite(addresses, secret, self.run.authority.fingerprint, self.run.id)

    def coordinator(self, faults: str = "", number: int = 0) -> Running:
        elsewhere = ("--db", self.db) if self.db else ()
        return self.processes.coordinator(self.folder, self.ports[number], faults, *elsewhere)

    def worker(self, name: str, faults: str = "") -> Running:
        return self.processes.worker(self.invite.encode(), name, faults)

    def versions_made(self, more: int = 1) -> None:
        """Wait until so many more versions are there."""
        before = self._merges()
        self.processes.wait_for("a version", lambda: self._merges() >= before + more)

    def leases(self) -> Sequence[Any]:
        """What somebody works on now."""
        with self.run.ledger.read() as tx:
            return tx.leases.active()

    def _merges(self) -> int:
        with self.run.ledger.read() as tx:
            return sum(state.version for state in tx.blocks.states())

    def status(self) -> Status:
        with closing(self._client()) as client:
            return client.status()

    def finishes(self, out: Path) -> None:
        """The run ends, nothing is lost or counted twice, and the model is there and good."""
        self.processes.wait_for("the end of the run", self._finished, RUN_SECONDS)
        status = self.status()
        assert [block.progress for block in status.blocks] == [1.0, 1.0]
        with closing(self._client()) as client:
            fetched = fetch_model(client, out)
        assert fetched.versions == [block.version for block in status.blocks]
        self._check_ledger()
        assert _ce(fetched.run) < LEARNED

    def _finished(self) -> bool:
        with self.run.ledger.read() as tx:
            row = tx.run()
        return row is not None and row.finished is not None

    def _client(self) -> Client:
        return Client(self.invite, WorkerKey.create())

    def _check_ledger(self) -> None:
        with self.run.ledger.read() as tx:
            states, versions = tx.blocks.states(), tx.versions.all()
            given = tx.connection.execute(leases.select()).all()
            sent = {row.lease: row for row in tx.connection.execute(updates.select())}
        counted: Counter[tuple[int, int]] = Counter()
        for lease in given:
            if lease.id in sent and sent[lease.id].state == "merged":
                batches = range(lease.first_batch, lease.first_batch + lease.steps)
                counted.update((lease.block, batch) for batch in batches)
        everything = {(state.index, batch) for state in states for batch in range(STEPS)}
        assert set(counted) == everything
        assert set(counted.values()) == {1}
        assert all(state.finished and state.merged_batches == STEPS for state in states)
        assert not [row.state for row in sent.values() if row.state == "pending"]
        for version in versions:
            _read_whole(self.run.blobs, version.weights)


def _read_whole(blobs: Blobs, blob: Blob) -> None:
    assert len(whole(blobs, blob)) == blob.size


def _ce(run: RunDir) -> float:
    config = run.config
    corpus = load_corpus(config.data)
    windows = evaluation_windows(corpus.split("valid", config.model.window), config.model.window, 8)
    ce = evaluate(load_stack(run, resolve("cpu", "fp32")), windows, draws=1).default.ce
    assert math.isfinite(ce)
    return ce


@pytest.fixture
def frugal(tmp_path: Path, processes: Processes) -> Iterator[Swarm]:
    """Updates are so small that each is sent whole."""
    _found(tmp_path / "run", None, "swarm.codec=int8")
    swarm = Swarm(tmp_path / "run", processes)
    with closing(swarm.run.ledger):
        with swarm.run.ledger.read() as tx:
            assert tx.versions.get(0).weights.size < swarm.run.description.whole_bytes
        yield swarm


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path) as started:
        yield started


@pytest.fixture
def swarm(founded: Path, tmp_path: Path, processes: Processes) -> Iterator[Swarm]:
    folder = tmp_path / "run"
    shutil.copytree(founded, folder)
    swarm = Swarm(folder, processes)
    with closing(swarm.run.ledger):
        yield swarm


@pytest.mark.parametrize(
    "fault", ["claimed@3", "chunk-stored@2", "settled@2", "merge-written@2", "published@2"]
)
def test_a_coordinator_is_killed_and_comes_back(swarm: Swarm, tmp_path: Path, fault: str):
    _survives_its_coordinator(swarm, fault, tmp_path / "model")


def _survives_its_coordinator(swarm: Swarm, fault: str, model: Path) -> None:
    coordinator = swarm.coordinator(f"{fault}=kill")
    workers = [swarm.worker("a"), swarm.worker("b")]
    swarm.processes.wait_for_kill(coordinator)
    swarm.coordinator()
    swarm.finishes(model)
    assert all(worker.code in (None, 0) for worker in workers)


@pytest.mark.parametrize("fault", ["chunk-stored@2", "settled@2", "merge-written@2", "published@2"])
def test_a_coordinator_of_compressed_updates_is_killed_and_comes_back(
    frugal: Swarm, tmp_path: Path, fault: str
):
    _survives_its_coordinator(frugal, fault, tmp_path / "model")
    _check_versions_follow(frugal.run)


@pytest.mark.parametrize("fault", ["chunk-sent@1", "sent@2"])
def test_a_worker_is_killed_around_a_whole_update(frugal: Swarm, tmp_path: Path, fault: str):
    frugal.coordinator()
    frugal.processes.wait_for_kill(frugal.worker("a", f"{fault}=kill"))
    frugal.worker("b")
    frugal.finishes(tmp_path / "model")


def pending_of(run: Run, rows: Sequence[Any]) -> list[PendingUpdate]:
    """Merged updates as they waited."""
    with run.ledger.read() as tx:
        found = [(row, tx.leases.get(row.lease)) for row in rows]
    return [
        PendingUpdate(
            row.lease, row.worker, row.base_version, row.steps, row.committed, lease.continues
        )
        for row, lease in found
        if lease is not None
    ]


def clip_of(row: Any) -> Sequence[float] | None:
    """The recorded factors by which a merged update was clipped, by tensor."""
    merged_as = MergedAs.of(row)
    assert merged_as is not None
    return merged_as.clip


def _check_versions_follow(run: Run) -> None:
    """Merged again, every version and what it owes is what the one before it and its updates
    give; and differences lead there."""
    with run.ledger.read() as tx:
        versions = {(item.block, item.version): item for item in tx.versions.all()}
        differences = {block: tx.versions.deltas(block) for block in range(run.config.block_count)}
        sent = tx.connection.execute(updates.select().where(updates.c.state == "merged")).all()
    assert len(versions) > 4
    for (block, number), made in versions.items():
        if number == 0:
            continue
        before = versions[block, number - 1]
        waited = pending_of(run, [r for r in sent if (r.block, r.merged_into) == (block, number)])
        factors = merging_rules.chain_factors(waited)
        merged = [
            MergeInput(
                row.lease,
                signed_claim(row).recipe,
                row.steps * run.config.bytes_per_step,
                share=factors[row.lease]
                * merging_rules.update_weight(run.config.swarm, number - 1, row.base_version),
                encoded=True,
                clip=clip_of(row),
            )
            for row in sent
            if (row.block, row.merged_into) == (block, number)
        ]
        final = made.merged_batches == run.config.train.steps
        compression = Compression(None if final else Int8(), before.residual)
        again = merge_blobs(run.blobs, before.weights, merged, None, MergeRule(), compression)
        if final:
            assert (again.weights, made.residual) == (made.weights, None)
            assert number not in differences[block]
            continue
        difference = differences[block][number]
        assert (again.weights, again.residual) == (made.weights, made.residual)
        assert again.delta == difference
        assert follow_blobs(run.blobs, before.weights, [difference]) == made.weights


@pytest.mark.parametrize("fault", ["downloaded@1", "step@8", "chunk-sent@1", "sent@2"])
def test_a_worker_is_killed_and_another_finishes(swarm: Swarm, tmp_path: Path, fault: str):
    swarm.coordinator()
    unlucky = swarm.worker("a", f"{fault}=kill")
    swarm.processes.wait_for_kill(unlucky)
    swarm.worker("b")
    swarm.finishes(tmp_path / "model")


def test_a_killed_worker_comes_back(swarm: Swarm, tmp_path: Path):
    swarm.coordinator()
    swarm.processes.wait_for_kill(swarm.worker("a", "step@8=kill"))
    swarm.processes.wait_for_end(swarm.worker("a"))
    swarm.finishes(tmp_path / "model")
    assert len(swarm.status().workers) == 1


def test_everybody_is_gone_for_a_while(swarm: Swarm, tmp_path: Path):
    coordinator = swarm.coordinator()
    workers = [swarm.worker("a", "step@12=kill"), swarm.worker("b", "step@12=kill")]
    for worker in workers:
        swarm.processes.wait_for_kill(worker)
    coordinator.kill()
    swarm.coordinator()
    for worker in [swarm.worker("a"), swarm.worker("b")]:
        swarm.processes.wait_for_end(worker)
    swarm.finishes(tmp_path / "model")


def test_two_coordinators_share_a_run(swarm: Swarm, tmp_path: Path):
    """Both hand out and merge; one dies while it merges, and the other goes on."""
    first = swarm.coordinator("merge-written@2=kill", number=0)
    assert swarm.status().state == "running"  # it has written its certificate
    swarm.coordinator(number=1)
    workers = [swarm.worker("a"), swarm.worker("b")]
    swarm.processes.wait_for_kill(first)
    for worker in workers:
        swarm.processes.wait_for_end(worker)
    swarm.finishes(tmp_path / "model")


def test_a_worker_never_answers_again(swarm: Swarm, tmp_path: Path):
    """Its connections stay open; it hears of the end when it wakes up long after."""
    swarm.coordinator()
    frozen = swarm.worker("a")
    swarm.processes.wait_for("a lease", lambda: bool(swarm.leases()))
    frozen.freeze()
    swarm.processes.wait_for_end(swarm.worker("b"))
    swarm.finishes(tmp_path / "model")
    frozen.thaw()
    swarm.processes.wait_for_end(frozen)


def test_the_database_is_restarted(tmp_path: Path, processes: Processes):
    with private_server() as server:
        _found(tmp_path / "run", server.url)
        swarm = Swarm(tmp_path / "run", processes, server.url)
        with closing(swarm.run.ledger):
            coordinator = swarm.coordinator()
            workers = [swarm.worker("a"), swarm.worker("b")]
            for _ in range(2):
                swarm.versions_made()
                server.crash()
                time.sleep(OUTAGE_SECONDS)
                server.start()
            swarm.finishes(tmp_path / "model")
            for worker in workers:
                processes.wait_for_end(worker)
    told = coordinator.log.read_text()
    assert "the ledger's database does not answer" in told  # somebody had asked meanwhile
    assert "Traceback" not in told


HOLD = """
import sqlite3, sys, time
ledger = sqlite3.connect(sys.argv[1], isolation_level=None)
ledger.execute("PRAGMA busy_timeout=30000")
ledger.execute("BEGIN EXCLUSIVE")
time.sleep(float(sys.argv[2]))
"""


def test_another_process_keeps_the_ledger_locked(swarm: Swarm, tmp_path: Path):
    coordinator = swarm.coordinator()
    workers = [swarm.worker("a"), swarm.worker("b")]
    for _ in range(2):
        swarm.versions_made()
        ledger = str(swarm.folder / "ledger.db")
        subprocess.run([sys.executable, "-c", HOLD, ledger, "2"], check=True)
    swarm.finishes(tmp_path / "model")
    for worker in workers:
        swarm.processes.wait_for_end(worker)
    assert "Traceback" not in coordinator.log.read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="no process can limit another here")
def test_the_disk_is_full_for_a_while(swarm: Swarm, tmp_path: Path):
    coordinator = swarm.coordinator()
    workers = [swarm.worker("a"), swarm.worker("b")]
    for _ in range(2):
        swarm.versions_made()
        with full_disk(coordinator):
            time.sleep(OUTAGE_SECONDS)
    swarm.finishes(tmp_path / "model")
    for worker in workers:
        swarm.processes.wait_for_end(worker)
    assert (
        "the ledger's database answers again" in coordinator.log.read_text()
    )  # so it did not meanwhile
