"""blocktrain doctor, completion and info; and commands that blocktrain suggests."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.commands import run_here

import blocktrain as bt
from blocktrain.cli import doctor_command as doctor
from blocktrain.cli.terminal import command
from blocktrain.config import Config
from blocktrain.environment import PROGRAM
from blocktrain.memory import FreeMemory


def findings(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    done = run_here(["doctor", "--json", "--device", "cpu", *arguments], tmp_path, os.environ)
    return done.returncode, {each["subject"]: each for each in json.loads(done.stdout)}


@pytest.fixture(autouse=True)
def _briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MEASURED_SECONDS", 0.2)


def test_a_good_machine_and_a_good_run(tmp_path: Path, config: Config):
    code, found = findings(tmp_path)
    assert (code, [f for f in found.values() if f["state"] == "problem"]) == (0, [])
    assert "a block of the preset demo: " in found["training"]["text"]
    with bt.Swarm.start(config, tmp_path / "swarm", {"data.source": _text(tmp_path)}) as swarm:
        code, found = findings(tmp_path, swarm.invite)
        assert (code, [f for f in found.values() if f["state"] == "problem"]) == (0, [])
        assert "answers in" in found["coordinator"]["text"]
        assert "0 s" in found["clocks"]["text"] or "1 s" in found["clocks"]["text"]
        assert "/s" in found["storage"]["text"]
        assert "a block of this run: " in found["training"]["text"]
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(doctor, "REQUEST_SECONDS", 0.5)
        code, found = findings(tmp_path, swarm.invite)
    assert (code, found["coordinator"]["state"]) == (1, "problem")
    assert "curl -k https://127.0.0.1:" in found["coordinator"]["remedy"]
    assert "storage" not in found


def test_every_problem_has_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(blocked / "cache"))
    monkeypatch.setattr(
        "blocktrain.memory.free_memory", lambda: FreeMemory(1 << 20, "this machine")
    )
    monkeypatch.setattr(
        "blocktrain.training.memory_check.free_memory", lambda: FreeMemory(1, "here")
    )
    monkeypatch.setattr("time.time", lambda: 0.0)
    code, found = findings(tmp_path)
    assert code == 1
    problems = {name for name, each in found.items() if each["state"] == "problem"}
    assert problems == {"memory", "disk", "clock", "training"}
    assert all(found[name]["remedy"] for name in problems)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_and_completes(tmp_path: Path, shell: str):
    done = run_here(["completion", shell], tmp_path, os.environ)
    assert "BLOCKTRAIN_COMPLETE" in done.stdout
    assert "demo-cascade" in completed(shell, "train", "--config", "de")
    assert "doctor" in completed(shell, "doc")


def completed(shell: str, *words: str) -> str:
    """What the shell's script gets for these words."""
    place = words[-1] if shell == "fish" else str(len(words))
    words_typed = {"COMP_WORDS": " ".join(("blocktrain", *words)), "COMP_CWORD": place}
    env = {**os.environ, "BLOCKTRAIN_COMPLETE": f"{shell}_complete", **words_typed}
    return subprocess.run(PROGRAM, env=env, text=True, capture_output=True, check=True).stdout


def test_suggested_commands_work_outside_the_environment(tmp_path: Path):
    script = Path(sys.executable).with_name("blocktrain")
    bare = {**os.environ, "PATH": "/usr/bin:/bin"}
    code = f"import sys; sys.argv[0] = {str(script)!r}\n"
    code += "from blocktrain.cli.terminal import command; print(command('info', 'a b'))"
    shown = subprocess.run(
        [sys.executable, "-c", code], env=bare, text=True, capture_output=True, check=True
    )
    assert shlex.split(shown.stdout) == [str(script), "info", "a b"]
    help_text = subprocess.run(f"{shlex.quote(str(script))} info --help", shell=True, env=bare,
                               capture_output=True, check=True)  # fmt: skip
    assert b"Usage: blocktrain info" in help_text.stdout
    assert command("eval", "run").endswith(" eval run")


def test_info_on_any_run(tmp_path: Path, config: Config):
    settings = {"data.source": _text(tmp_path), "train.eval_every": 6}
    run = bt.train(config, tmp_path / "run", settings, progress=False)
    count = sum(parameter.numel() for parameter in bt.load(run, device="cpu").parameters())
    run_here(["export", "run", "--out", "exported"], tmp_path, os.environ)
    for folder in ("run", "exported"):
        shown = run_here(["info", folder], tmp_path, os.environ).stdout
        assert f"{count / 1e6:.2f}M parameters" in shown
        assert "a token is a byte" in shown
        assert "12" in shown
        assert "valid CE" in shown
    exported = json.loads(run_here(["info", "exported", "--json"], tmp_path, os.environ).stdout)
    assert exported["trained"]["steps"] == [12, 12]
    assert exported["parameters"] == count


def _text(folder: Path) -> str:
    path = folder / "text.txt"
    path.write_text("It was the best of times, it was the worst of times. " * 200)
    return f"text:{path}"
