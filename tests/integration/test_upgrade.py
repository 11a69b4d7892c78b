"""What an earlier release left on disk goes on working: its runs, its coordinators, its workers.

The folders were written by the release itself (`tests/fixtures/make_release.py`); every test works
on a copy.
"""

import json
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file
from tests.conftest import ROOT
from tests.support.processes import Processes, free_port

from blocktrain.cli.main import cli
from blocktrain.config import load_config
from blocktrain.protocol.invite import Invite

RELEASE = ROOT / "tests" / "fixtures" / "release-0.1"
PRESETS = ["tiny", "tiny-cascade"]
SECONDS = 60.0  # processes that load torch on a busy machine take their time
PROMPT = "the cat "
RENAMED = {"kept": "top_k_per_4096", "kept_down": "top_k_per_4096_down"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, which is also the working folder: the runs name their text relative to it."""
    folder = tmp_path / "release"
    shutil.copytree(RELEASE, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(folder / "cache"))
    return folder


def call(*arguments: object) -> str:
    done = CliRunner().invoke(cli, [*map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def call_apart(*arguments: object) -> str:
    """In a process of its own, whose connections end with it."""
    command = [sys.executable, "-m", "blocktrain.cli.main", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def expected(home: Path) -> dict[str, Any]:
    return json.loads((home / "expected.json").read_text())


def newest(block: Path) -> dict[str, np.ndarray]:
    return load_file(sorted(block.glob("v*.safetensors"))[-1])


# Settings


def test_its_settings_are_read_as_they_were(home: Path):
    """Settings that came later may stand beside them."""
    settings = json.loads((home / "settings.json").read_text())
    assert len(settings) == 6
    for name, sections in settings.items():
        now = json.loads(json.dumps(load_config(home / name).to_dict()))
        for section, values in sections.items():
            if section == "train":  # a switch that became a choice
                assert (now["train"]["log_to"] == "tensorboard") == values.pop("tensorboard")
            current = {key: now[section][RENAMED.get(key, key)] for key in values}
            assert current == values, (name, section)


# Runs on one machine


@pytest.mark.parametrize("preset", PRESETS)
def test_a_run_that_was_stopped_goes_on_to_the_same_end(home: Path, preset: str):
    """Weights, optimizer state, learning rate and place in the text are taken over: what comes out
    is what the release itself would have made of it."""
    half, whole = home / preset / "half", home / preset / "finished"
    said = call("train", "--config", half / "config.toml", "--out", half)
    assert "already finished: block 0" in said
    assert "block 1 resumes at step 10" in said
    for block in ("block-0", "block-1"):
        found, wanted = newest(half / block), newest(whole / block)
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            np.testing.assert_allclose(found[name], tensor, atol=2e-3, err_msg=name)
    metrics = (half / "block-1" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(metrics[-1])["step"] == 20


@pytest.mark.parametrize("preset", PRESETS)
def test_a_finished_run_is_told_scored_and_generates(home: Path, preset: str):
    told = json.loads(call("info", f"{preset}/finished", "--json"))
    assert [block["finished"] for block in told["blocks"]] == [True, True]
    assert [block["versions"][-1]["step"] for block in told["blocks"]] == [20, 20]
    was = expected(home)["runs"][preset]
    for model in ("finished", "export"):
        run = f"{preset}/{model}"
        scored = json.loads(call("eval", run, "--windows", 8, "--json"))
        assert scored["windows"]["digest"] == was["digest"]
        assert scored["ce"] == pytest.approx(was["ce"], abs=1e-4)
        made = call("generate", run, "--prompt", PROMPT, "--bytes", 24, "--temperature", 0)
        assert made == was["generated"]


def answered(processes: Processes, address: str, model: str) -> str:
    """What a server says, once it is there."""

    def ready() -> bool:
        try:
            return httpx.get(f"http://{address}/health").status_code == 200
        except httpx.TransportError:
            return False

    processes.wait_for("the server answers", ready, SECONDS)
    question = {"model": model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    answer = httpx.post(f"http://{address}/v1/completions", json=question, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_a_finished_run_is_served(home: Path, tmp_path: Path):
    address = f"127.0.0.1:{free_port()}"
    with Processes(tmp_path) as processes:
        processes.serve(home / "tiny" / "finished", address)
        text = answered(processes, address, "finished")
    assert PROMPT + text + "\n" == expected(home)["runs"]["tiny"]["generated"]


def test_an_export_is_served_by_a_router_and_a_stage_with_their_old_keys(
    home: Path, tmp_path: Path
):
    stage, address = (f"127.0.0.1:{free_port()}" for _ in range(2))
    model, keys = home / "tiny-cascade" / "export", home / "keys"
    with Processes(tmp_path) as processes:
        processes.stage(model, "stage-1", "1", stage, keys)
        processes.serve(model, address, "--stages", stage, "--keys", keys)
        text = answered(processes, address, "export")
    assert PROMPT + text + "\n" == expected(home)["runs"]["tiny-cascade"]["generated"]
    assert "kept" in call("keys", keys, "--stages", 1)


# Runs of many machines


def rows(folder: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(folder / "ledger.db")) as ledger:
        return ledger.execute(query).fetchall()


@pytest.mark.parametrize("name", ["int8", "none"])
def test_a_coordinator_and_its_worker_go_on_and_end_their_run(
    home: Path, tmp_path: Path, name: str
):
    """The worker is who it was, finds the run's text in its cache, and its lost lease is trained
    again: in the end every batch is merged once."""
    folder = home / name / "coordinator"
    ((worker,),) = rows(folder, "SELECT id FROM workers")
    ((lost, block),) = rows(folder, "SELECT id, block FROM leases WHERE state = 'open'")
    merged = dict(rows(folder, "SELECT block, max(version) FROM versions GROUP BY block"))
    texts = {path: path.stat().st_mtime_ns for path in (home / "cache" / "splits").iterdir()}
    assert sum(merged.values()) == 4 and len(texts) == 3
    (home / name / "worker").rename(tmp_path / "old")  # where `Processes` looks for it
    with Processes(tmp_path) as processes:
        coordinator = processes.coordinator(folder, free_port())
        processes.wait_for("the invite", lambda: b"}\n" in coordinator.log.read_bytes(), SECONDS)
        lines = coordinator.log.read_text().splitlines()  # the log is in the same file
        invite = json.loads(next(line for line in lines if line.startswith("{")))["invite"]
        before, now = Invite.decode(expected(home)["invites"][name]), Invite.decode(invite)
        assert (now.run, now.fingerprint) == (before.run, before.fingerprint)
        old = processes.worker(invite, "old")
        processes.wait_for("the worker ends", lambda: old.code is not None, SECONDS)
        assert old.code == 0, old.log.read_text()
        status = json.loads(call_apart("status", invite, "--json"))
        call_apart("fetch", invite, "--out", "fetched")
    assert status["state"] == "finished"
    assert [block["progress"] for block in status["blocks"]] == [1.0, 1.0]
    assert [told["worker"] for told in status["workers"]] == [worker]
    assert status["blocks"][block]["version"] > merged[block]
    ((state,),) = rows(folder, f"SELECT state FROM leases WHERE id = '{lost}'")
    assert state == "expired"
    for block in (0, 1):
        batches = rows(
            folder,
            "SELECT leases.first_batch, leases.steps FROM leases"
            " JOIN updates ON updates.lease = leases.id"
            f" WHERE leases.block = {block} AND updates.state = 'merged'",
        )
        assert sorted(b for first, count in batches for b in range(first, first + count)) == [
            *range(40)
        ]
    found = {path: path.stat().st_mtime_ns for path in (home / "cache" / "splits").glob("*.bin")}
    assert found == texts  # nothing was fetched again
    scored = json.loads(
        call("eval", "fetched", "--data", "text:corpus.txt", "--windows", 8, "--json")
    )
    assert scored["ce"] < 4.5
