"""How torch's threads wait and how many there are, in the processes that commands start.

The speed next to other busy processes depends on the machine; bench/crowded.py measures it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.commands import run_here

from blocktrain.config import load_config
from blocktrain.environment import SPIN_COUNT, SPINS, THREADS, WAIT_POLICY
from blocktrain.protocol.invite import Invite
from blocktrain.storage.run_dir import RunDir

ROOT = Path(__file__).resolve().parents[2]
WATCH = ROOT / "tests/support/torch_watch"
BLOCKTRAIN = [sys.executable, "-m", "blocktrain.cli.main"]
SMALL = ["model.layers=2", "model.blocks=2", "model.width=32", "model.window=32", "train.steps=2",
         "train.batch=4", "train.warmup=1", "train.precision=fp32", "train.device=cpu",
         "swarm.quorum=1", "swarm.grace_seconds=0"]  # fmt: skip
INVITE = Invite(("http://127.0.0.1:1",), "secret", None, "a1b2c3d4").encode()
COMPUTING = {
    "train": ["train", "--config", "tiny", "--out", "trained", "{settings}"],
    "eval": ["eval", "run"],
    "generate": ["generate", "run"],
    "serve": ["serve", "run", "--listen", "127.0.0.1:0", "--plain-tcp"],
    "stage": ["stage", "run", "--block", "1", "--listen", "127.0.0.1:0", "--plain-tcp"],
    "worker": ["worker", INVITE],
    "demo": ["demo", "--config", "tiny", "--out", "demo", "{settings}"],
    "simulate": ["simulate", "--config", "simulate-learn"],
    "coordinator": ["coordinator", "--config", "tiny", "{settings}", "--data-dir", "coordinator",
                    "--no-validate", "--listen", "127.0.0.1:0"],
}  # fmt: skip


class Watch:
    """A folder to run commands in; their Python processes record what torch finds at its import."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "watched.jsonl"
        text = (ROOT / "LICENSE").read_bytes()
        (folder / "corpus.txt").write_bytes(text * 8)
        self.settings = [*SMALL, f"data.source=text:{folder}/corpus.txt"]
        RunDir.create(folder / "run", load_config(ROOT / "configs/tiny.toml", self.settings))

    def command(self, arguments: list[str]) -> list[str]:
        flags = [part for setting in self.settings for part in ("--set", setting)]
        spread = [flags if text == "{settings}" else [text] for text in arguments]
        return [*BLOCKTRAIN, *(text for texts in spread for text in texts)]

    def environment(self, **more: str) -> dict[str, str]:
        decided = {SPIN_COUNT.name, WAIT_POLICY.name, THREADS.name}
        return {
            **{name: text for name, text in os.environ.items() if name not in decided},
            "PYTHONPATH": os.pathsep.join([str(WATCH), str(ROOT / "src")]),
            "BLOCKTRAIN_CACHE": str(self.folder / "cache"),
            "TORCH_WATCH": str(self.file),
            **more,
        }

    def run(self, arguments: list[str], **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(arguments),
            cwd=self.folder,
            env=self.environment(**more),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def environments(self) -> list[dict[str, str | None]]:
        return [line["environment"] for line in self._lines() if "environment" in line]

    def threads(self, verb: str) -> list[int]:
        """Of every process of this verb that ended by itself and had loaded torch."""
        lines = [line for line in self._lines() if line["argv"][1:2] == [verb]]
        return [line["threads"] for line in lines if "threads" in line]

    def environments_of(self, verb: str) -> list[dict[str, str | None]]:
        lines = [line for line in self._lines() if line["argv"][1:2] == [verb]]
        return [line["environment"] for line in lines if "environment" in line]

    def _lines(self) -> list[dict[str, Any]]:
        text = self.file.read_text() if self.file.exists() else ""
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    return Watch(tmp_path)


def waited(happened: Callable[[], bool], seconds: float = 60.0) -> bool:
    ends = time.monotonic() + seconds
    while not happened() and time.monotonic() < ends:
        time.sleep(0.1)
    return happened()


@pytest.mark.parametrize("verb", COMPUTING)
def test_waiting_threads_sleep_soon_set_before_torch_is_imported(watch: Watch, verb: str):
    watch.run(COMPUTING[verb], TORCH_WATCH_STOP="1")
    spins = {environment["GOMP_SPINCOUNT"] for environment in watch.environments()}
    assert spins == {SPINS}


@pytest.mark.parametrize(
    ("name", "value"), [("GOMP_SPINCOUNT", "77"), ("OMP_WAIT_POLICY", "ACTIVE")]
)
def test_the_users_own_setting_is_kept(watch: Watch, name: str, value: str):
    watch.run(COMPUTING["train"], TORCH_WATCH_STOP="1", **{name: value})
    (environment,) = watch.environments()
    unset: dict[str, str | None] = {"GOMP_SPINCOUNT": None, "OMP_WAIT_POLICY": None}
    assert {each: environment[each] for each in unset} == {**unset, name: value}


def test_train_computes_with_the_threads_it_was_given(watch: Watch):
    done = watch.run([*COMPUTING["train"], "--threads", "3"], MKL_NUM_THREADS="2")
    assert done.returncode == 0, done.stderr
    assert watch.threads("train") == [3]


def test_blocks_side_by_side_share_the_threads(watch: Watch):
    done = watch.run([*COMPUTING["train"], "--threads", "4", "--parallel", "2"])
    assert done.returncode == 0, done.stderr
    assert sorted(watch.threads("train")) == [2, 2, 4]


def test_workers_of_the_demo_share_the_threads(watch: Watch):
    workers = max(2, min(2, os.cpu_count() or 1))
    done = watch.run([*COMPUTING["demo"], "--threads", "4"])
    assert done.returncode == 0, done.stderr
    assert watch.threads("worker") == [4 // workers] * workers


def test_stages_of_serve_share_the_threads(watch: Watch):
    done = watch.run(COMPUTING["train"])
    assert done.returncode == 0, done.stderr
    serve = ["serve", "trained", "--listen", "127.0.0.1:0", "--threads", "6"]
    with subprocess.Popen(
        watch.command(serve),
        cwd=watch.folder,
        env=watch.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            assert waited(lambda: bool(watch.environments_of("stage")))
        finally:
            process.terminate()
            process.communicate()
    assert [each["OMP_NUM_THREADS"] for each in watch.environments_of("stage")] == ["3"]


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5", "100000"])
def test_no_number_of_threads(tmp_path: Path, text: str):
    train = ["train", "--config", "tiny", "--out", "trained", "--threads", text]
    done = run_here(train, tmp_path, {})
    assert done.returncode == 2
    assert "--threads" in done.stderr
    assert "neither auto nor a whole number from 1 to" in done.stderr
