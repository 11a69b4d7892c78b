"""Runs that outlive their plan: they are extended, or their coordinator moves. By the commands that
users type."""

import json
import subprocess
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.support.commands import run_here
from tests.support.processes import COMMAND, Processes, Running, free_port

from blocktrain.coordinator.control import OUTDATED
from blocktrain.coordinator.folder import CoordinatorFolder
from blocktrain.storage.run_dir import RunDir

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["model.layers=2", "model.blocks=2", "model.width=32", "model.window=32", "train.batch=4",
         "train.warmup=2", "train.precision=fp32", "train.device=cpu",
         "swarm.first_steps=5", "swarm.most_steps=7"]  # fmt: skip
SECONDS = 90.0  # that a step may take on a busy machine


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "corpus.txt").write_bytes((ROOT / "LICENSE").read_bytes() * 8)
    return tmp_path


def settings(home: Path, *extra: str) -> list[str]:
    values = [*SMALL, f"data.source=text:{home}/corpus.txt", *extra]
    return ["--config", "tiny", *(part for value in values for part in ("--set", value))]


def call(home: Path, *words: object, code: int = 0) -> str:
    done = run_here([*map(str, words)], home, {"BLOCKTRAIN_CACHE": str(home / "cache")})
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout


def start(processes: Processes, port: int, *options: str) -> tuple[Running, str]:
    """The coordinator of a new run, and its invite."""
    running = processes.coordinator(processes.folder / "coordinator", port, "", *options)
    processes.wait_for("the coordinator starts", lambda: bool(printed(running)), SECONDS)
    return running, str(printed(running)[0]["invite"])


def printed(running: Running) -> list[dict[str, object]]:
    """What a process has printed as JSON, without the lines of its log."""
    lines = running.log.read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def stop(running: Running) -> None:
    running.process.terminate()
    running.process.wait(timeout=30)


def wait_until_trained(processes: Processes, block: int) -> None:
    """Until all of a block's batches are merged, by the coordinator's ledger."""
    home = CoordinatorFolder(processes.folder / "coordinator")
    with closing(home.operator().ledger) as ledger:

        def is_trained() -> bool:
            with ledger.read() as tx:
                state = tx.blocks.states()[block]
            return state.merged_batches == state.total_batches

        processes.wait_for(f"block {block} is trained", is_trained, SECONDS)


def ask(home: Path, *words: str) -> str:
    """A command to a coordinator, in a process of its own."""
    done = subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, cwd=home, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_for_ends(processes: Processes, *workers: Running) -> None:
    processes.wait_for(
        "the workers end", lambda: all(each.code is not None for each in workers), SECONDS
    )
    for worker in workers:
        processes.wait_for_end(worker)


def train_at_once(home: Path, ends: list[int]) -> RunDir:
    former, steps = f"train.extended_at={ends[:-1]}", f"train.steps={ends[-1]}"
    call(home, "train", *settings(home, former, steps), "--out", "at-once")
    return RunDir.open(home / "at-once")


def test_a_finished_run_is_extended_and_trained_further(home: Path):
    first = ["train", *settings(home, "train.steps=20"), "--out", "run"]
    call(home, *first)
    longer = ["train", *settings(home, "train.steps=30"), "--out", "run"]
    assert "`blocktrain extend run --steps 30` extends the run" in call(home, *longer, code=4)
    told = call(home, "extend", "run", "--steps", 30)
    assert "30 steps per block instead of 20   next: " in told
    following = told.split("next: ")[1].split()[1:]
    assert following == ["train", "--config", "run", "--out", "run"]
    assert "20 of 30 steps" in call(home, "info", "run")
    call(home, *following)
    assert "extended at step 20; now 30 steps per block" in call(home, "info", "run")
    assert "30 steps per block already" in call(home, "extend", "run", "--steps", 30, code=2)
    call(home, *first)  # nothing is left to do
    whole = train_at_once(home, [20, 30])
    for block, other in zip(whole.blocks(), RunDir.open(home / "run").blocks(), strict=True):
        expected, weights = block.load_weights(), other.load_weights()
        assert all(np.array_equal(expected[name], weights[name]) for name in expected)
    call(home, "export", "run", "--out", "exported")
    assert "train.warm_start=exported" in call(home, "extend", "exported", "--steps", 40, code=4)


def test_a_swarm_s_run_is_extended_while_a_worker_waits(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    """One block is finished when the run is extended; its worker joins again by itself."""
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(home / "cache"))
    port = free_port()
    with Processes(home) as processes:
        first, invite = start(processes, port, *settings(home, "train.steps=12"))
        waiting = processes.worker(invite, "waiting", "", "--blocks", "0")
        wait_until_trained(processes, 0)
        assert "12" in call(home, "extend", "coordinator", "--steps", 20)
        processes.wait_for("the coordinator ends", lambda: first.code is not None, SECONDS)
        assert first.code == 2
        assert OUTDATED in first.log.read_text()
        processes.coordinator(home / "coordinator", port)
        late = processes.worker(invite, "late", "", "--blocks", "1")
        wait_for_ends(processes, waiting, late)
        kinds = [event["kind"] for event in printed(waiting)]
        assert [kinds.count(kind) for kind in ("joined", "extended", "finished")] == [2, 1, 1]
        ask(home, "fetch", invite, "--out", "fetched")
    fetched = load_file(home / "fetched" / "model.safetensors")
    for index, block in enumerate(train_at_once(home, [12, 20]).blocks()):
        for name, tensor in block.load_weights().items():
            assert np.array_equal(fetched[f"block.{index}.{name}"], tensor), name


def test_workers_follow_a_coordinator_that_moves(home: Path, monkeypatch: pytest.MonkeyPatch):
    """One worker has learned the next address while it was connected, another is given it."""
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(home / "cache"))
    old, new = free_port(), free_port()
    with Processes(home) as processes:
        first, invite = start(processes, old, *settings(home, "train.steps=12"))
        steady = processes.worker(invite, "steady", "", "--blocks", "0")
        wait_until_trained(processes, 0)
        stop(first)
        processes.wait_for(  # it asks for addresses after a lost connection, or minutes later
            "the worker notices",
            lambda: any(event["kind"] == "unreachable" for event in printed(steady)),
            SECONDS,
        )
        both = [f"--advertise=127.0.0.1:{port}" for port in (old, new)]
        announcing = processes.coordinator(home / "coordinator", old, "", *both)
        known = home / "steady" / "addresses.json"
        processes.wait_for(
            "the worker learns", lambda: known.exists() and str(new) in known.read_text(), SECONDS
        )
        stop(announcing)
        processes.coordinator(home / "coordinator", new)
        at = ("--at", f"https://127.0.0.1:{new}")
        assert json.loads(ask(home, "status", invite, "--json", *at))["blocks"][1]["version"] == 0
        late = processes.worker(invite, "late", "", "--blocks", "1", *at)
        wait_for_ends(processes, late, steady)
        kinds = [event["kind"] for event in printed(steady)]
        assert (kinds.count("joined"), kinds[-1]) == (1, "finished")
        ask(home, "fetch", invite, *at, "--out", "fetched")
