"""The commands of docs/HOSTS.md as they stand, on one machine: scripts that make a run of hosts."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.processes import free_port

ROOT = Path(__file__).resolve().parents[2]
SMALL = "train.steps=20 train.precision=fp32"

pytestmark = pytest.mark.skipif(
    not (ROOT / ".venv/bin/blocktrain").exists(), reason="blocktrain is not installed in .venv"
)


def environment(folder: Path) -> dict[str, str]:
    words = folder / "words.txt"
    words.write_bytes((ROOT / "LICENSE").read_bytes() * 8)
    return {
        **os.environ,
        "CONFIG": "tiny",
        "DATA": str(words),
        "DEVICE": "cpu",
        "FOLDER": str(folder / "coordinator"),
        "BLOCKTRAIN_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }


def script(name: str, *arguments: str) -> list[str]:
    return [str(ROOT / "scripts" / f"{name}.sh"), *arguments]


@pytest.fixture(params=["three-hosts", "six-workers"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def settings(name: str) -> str:
    """The script's own, and fewer steps."""
    own = re.search(r"SETTINGS:-'(.*)'", (ROOT / "scripts" / f"{name}.sh").read_text())
    assert own
    return f"{own[1]} {SMALL}"


@pytest.fixture
def invite(name: str, settings: str, tmp_path: Path) -> Iterator[str]:
    log = tmp_path / "coordinator.log"
    with log.open("wb") as out:
        coordinator = subprocess.Popen(
            script(name, "coordinator", f"127.0.0.1:{free_port()}"),
            env={**environment(tmp_path), "SETTINGS": settings}, stdout=out, stderr=out,
        )  # fmt: skip
    try:
        ends = time.monotonic() + 60
        while not (printed := re.search(r"bt1_\S+", log.read_text())):
            assert coordinator.poll() is None and time.monotonic() < ends, log.read_text()
            time.sleep(0.1)
        yield printed[0]
    finally:
        coordinator.send_signal(signal.SIGTERM)
        coordinator.wait(30)


def test_three_commands_are_a_run(name: str, invite: str, tmp_path: Path):
    def done(*arguments: str) -> str:
        finished = subprocess.run(
            script(name, *arguments), env=environment(tmp_path), capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        assert finished.returncode == 0, finished.stderr
        return finished.stdout

    done("worker", invite)
    assert "product" in done("score", invite, str(tmp_path / "model"))


def test_who_says_nothing_is_told_the_commands(name: str, tmp_path: Path):
    told = subprocess.run(
        script(name), env=environment(tmp_path), capture_output=True, text=True, check=False
    )
    assert told.returncode == 2
    for command in ("coordinator HOST", "worker INVITE", "score INVITE OUT"):
        assert f"{name}.sh {command}" in told.stderr
