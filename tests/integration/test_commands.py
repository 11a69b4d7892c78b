"""The commands as a user runs them: exit codes and what they print.

Real processes where signals, a terminal or the start matter; the others run here, faster."""

import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from tests.support.commands import run_here
from tests.support.terminal import seen

from blocktrain import __version__

ROOT = Path(__file__).resolve().parents[2]
BLOCKTRAIN = [sys.executable, "-m", "blocktrain.cli.main"]
SMALL = ["model.layers=2", "model.blocks=2", "model.width=32", "model.window=32",
         "train.batch=4", "train.warmup=2", "train.precision=fp32", "train.device=cpu"]  # fmt: skip

AT_ONCE = ["swarm.quorum=1", "swarm.grace_seconds=0"]  # each update becomes a version


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text corpus and a cache of its own."""
    folder = tmp_path_factory.mktemp("home")
    words = (ROOT / "LICENSE").read_bytes()
    (folder / "corpus.txt").write_bytes(words * 8)
    return folder


def run(home: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return run_here([*map(str, arguments)], home, environment(home))


def run_process(
    home: Path, *arguments: object, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*BLOCKTRAIN, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=home,
        env=environment(home),
        check=False,
    )


def shown(home: Path, columns: int, *arguments: object) -> str:
    """The same on a terminal."""
    return seen([*BLOCKTRAIN, *map(str, arguments)], columns, home, environment(home))


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "BLOCKTRAIN_CACHE": str(home / "cache"), "OMP_NUM_THREADS": "1"}


def training(home: Path, out: str, *extra: str) -> list[str]:
    settings = [*SMALL, f"data.source=text:{home}/corpus.txt", "train.steps=20", *extra]
    flags = [part for setting in settings for part in ("--set", setting)]
    return ["train", "--config", "tiny", "--out", out, *flags]


@pytest.fixture(scope="module")
def trained(home: Path) -> Path:
    done = run_process(home, *training(home, "trained"))
    assert done.returncode == 0, done.stderr
    return home / "trained"


def weights(run_dir: Path, block: int) -> dict[str, bytes]:
    newest = sorted((run_dir / f"block-{block}").glob("v*.safetensors"))[-1]
    return {name: array.tobytes() for name, array in load_file(newest).items()}


def test_help_answers_in_a_fifth_of_a_second(home: Path):
    """Of processor time, because the machine may be busy."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = run_process(home, "--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0
    assert statistics.median(seconds) < 0.2
    for verb in ("train", "eval", "generate", "export", "info", "estimate", "simulate", "demo"):
        assert f"  {verb} " in done.stdout
    assert __version__ in run(home, "--version").stdout


def test_an_interrupt_during_the_first_import_prints_no_traceback(tmp_path: Path):
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt")
    done = subprocess.run(
        [sys.executable, "-c", "from blocktrain.cli import run; run()"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, b"")


def test_train_then_everything_else(home: Path, trained: Path):
    info = json.loads(run(home, "info", "trained", "--json").stdout)
    assert [block["finished"] for block in info["blocks"]] == [True, True]
    assert len({block["versions"][-1]["bytes_seen"] for block in info["blocks"]}) == 1
    assert "block 1: finished, at step 20, 2.6 kB seen" in run(home, "info", "trained").stdout

    scored = json.loads(run(home, "eval", "trained", "--json", "--windows", 8).stdout)
    assert scored["ce"] < 5.0
    assert scored["windows"]["count"] == 8
    assert {s["readout"] for s in scored["scores"]} >= {"final", "product", "block 0", "block 1"}

    exported = run(home, "export", "trained", "--out", "out", "--json")
    assert exported.returncode == 0, exported.stderr
    again = json.loads(run(home, "eval", "out", "--json", "--windows", 8).stdout)
    assert again["ce"] == scored["ce"]
    assert again["windows"]["digest"] == scored["windows"]["digest"]

    twice = run(home, "export", "trained", "--out", "out")
    assert twice.returncode == 4
    assert "contains a model already" in twice.stderr

    made = run(home, "generate", "out", "--prompt", "def ", "--bytes", 40, "--seed", 3)
    assert made.stdout.startswith("def ")
    assert len(made.stdout.encode()) >= 44
    same = run(home, "generate", "trained", "--prompt", "def ", "--bytes", 40, "--seed", 3)
    assert same.stdout == made.stdout

    resumed = run(home, *training(home, "trained"))
    assert resumed.returncode == 0
    assert "block" not in resumed.stdout.replace("blocktrain", "")
    assert resumed.stderr == "already finished: block 0, 1\n"


def test_side_by_side_gives_the_same_weights(home: Path, trained: Path):
    done = run(home, *training(home, "parallel"), "--parallel", "2")
    assert done.returncode == 0, done.stderr
    for block in range(2):
        assert weights(home / "parallel", block) == weights(trained, block)


def test_one_block_alone_gives_the_same_weights(home: Path, trained: Path):
    assert run(home, *training(home, "alone"), "--block", "1").returncode == 0
    assert weights(home / "alone", 1) == weights(trained, 1)
    missing = run(home, "eval", "alone", "--windows", 4)
    assert missing.returncode == 4
    assert missing.stderr.startswith("error: block 0 has no version")


def test_a_bar_says_done_at_the_end_alone(home: Path):
    frames = shown(home, 80, *training(home, "bar", "train.steps=30"), "--block", "0")
    assert "30/30" in frames
    told = [frame for frame in re.split(r"[\r\n]+", frames) if "done" in frame]
    assert told and all("30/30" in frame for frame in told)


def test_eval_shows_a_bar_on_a_terminal_and_marks_the_score(home: Path, trained: Path):
    asked = ["eval", "trained", "--windows", 8]
    assert "scoring windows" in shown(home, 80, *asked)
    piped = run(home, *asked)
    assert piped.stderr == ""
    assert "product *" in piped.stdout and "* the model's score: product" in piped.stdout
    assert "block 1 (final)" in piped.stdout and "noise │" not in piped.stdout
    assert "noise │ product, 2 draws" in run(home, *asked, "--draws", 2).stdout
    quiet = shown(home, 80, *asked, "--json")
    assert json.loads(quiet)["readout"] == "product"


CASCADE = ["objective.kind=cascade", "objective.tail=1"]


@pytest.fixture(scope="module")
def cascade(home: Path) -> Path:
    done = run(home, *training(home, "cascade", *CASCADE))
    assert done.returncode == 0, done.stderr
    return home / "cascade"


def built_on(run_dir: Path, block: int) -> list[int | None] | None:
    manifest = json.loads((run_dir / f"block-{block}" / "manifest.json").read_text())
    assert manifest["finished"]
    return manifest["counters"].get("built_on")


def test_a_cascade_is_trained_in_turn_then_everything_else(home: Path, cascade: Path):
    assert built_on(cascade, 0) is None
    assert built_on(cascade, 1) == [20]

    scored = json.loads(run(home, "eval", "cascade", "--json", "--windows", 8).stdout)
    assert scored["ce"] < 5.0
    assert [(s["start"], s["readout"]) for s in scored["scores"]] == [
        ("none", "block 0"), ("none", "block 1"), ("none", "final"), ("none", "product"),
    ]  # fmt: skip

    exported = run(home, "export", "cascade", "--out", "cascade-out", "--json")
    assert exported.returncode == 0, exported.stderr
    again = json.loads(run(home, "eval", "cascade-out", "--json", "--windows", 8).stdout)
    assert again == scored


@pytest.mark.parametrize("verb", ["eval", "generate"])
def test_more_blocks_than_there_are_cannot_be_used(home: Path, cascade: Path, verb: str):
    done = run(home, verb, "cascade", "--blocks", 9)
    assert done.returncode == 2
    assert (
        done.stderr
        == "error: cannot exit after 9 blocks: the model has only 2; use --blocks 2 or less\n"
    )


@pytest.mark.parametrize("readout", ["final", "product"])
def test_a_cascade_generates_from_its_last_head_or_from_all(
    home: Path, cascade: Path, readout: str
):
    asked = ["generate", "cascade", "--prompt", "def ", "--bytes", 40, "--readout", readout]
    made = run(home, *asked)  # 40 bytes: past the window of 32
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith("def ")
    assert len(made.stdout.encode()) >= 44
    assert run(home, *asked).stdout == made.stdout


def test_a_cascade_trains_side_by_side_on_what_has_been_saved(home: Path, cascade: Path):
    """Block 0 is what it is in turn; block 1 read whatever versions of it there were."""
    often = ["train.save_every=5", "objective.refresh_every=5"]
    done = run(home, *training(home, "cascade-2", *CASCADE, *often), "--parallel", "2")
    assert done.returncode == 0, done.stderr
    assert weights(home / "cascade-2", 0) == weights(cascade, 0)
    before = built_on(home / "cascade-2", 1)
    assert before is not None and len(before) == 1
    assert before[0] in (5, 10, 15, 20)  # not None: it waited until block 0 had its lead
    scored = json.loads(run(home, "eval", "cascade-2", "--json", "--windows", 8).stdout)
    assert scored["ce"] < 5.0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_resumes_bit_for_bit(home: Path, how: signal.Signals):
    longer = ["train.steps=150", "train.save_every=10"]
    straight = run(home, *training(home, f"straight-{how.name}", *longer), "--block", "0")
    assert straight.returncode == 0
    out = home / f"killed-{how.name}"
    process = start(home, *training(home, out.name, *longer), "--block", "0")
    manifest = out / "block-0" / "manifest.json"
    wait_for_process(
        process, lambda: manifest.exists() and not json.loads(manifest.read_text())["finished"]
    )
    process.send_signal(how)
    _, errors = process.communicate(timeout=60)
    assert json.loads(manifest.read_text())["finished"] is False
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert "resumes" in errors
    stood_at = json.loads(manifest.read_text())["versions"][-1]["step"]
    resumed = run(home, *training(home, out.name, *longer), "--block", "0")
    assert resumed.returncode == 0
    assert f"block 0 resumes at step {stood_at}" in resumed.stderr
    assert weights(out, 0) == weights(home / f"straight-{how.name}", 0)
    steps = [
        json.loads(x)["step"] for x in (out / "block-0/metrics.jsonl").read_text().splitlines()
    ]
    assert steps == sorted(set(steps))
    assert steps[-1] == 150


def start(home: Path, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*BLOCKTRAIN, *arguments], cwd=home, env=environment(home), text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def wait_for_process(
    process: "subprocess.Popen[str]", condition: Callable[[], bool], seconds: float = 60
) -> None:
    """Wait for what a process brings about; one that ended first says why."""
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"it never came; the command said: {process.communicate()[1]}")
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["train", "--config", "nowhere.toml", "--out", "x"], 2, "nowhere.toml"),
        (["train", "--config", "tiny", "--out", "x", "--set", "model.wdth=3"], 2, "model.wdth"),
        (["train", "--config", "tiny", "--out", "x", "--block", "9"], 2, "--block 9"),
        (["train", "--config", "tiny", "--out", "x", "--set", "data.source=text:no/*"], 3, "no/*"),
        (["train", "--config", "tiny", "--out", "x", "--set", "train.device=cuda:7"], 6, "cuda:7"),
        (["eval", "nowhere"], 4, "nowhere"),
        (["generate", "nowhere"], 4, "nowhere"),
        (["export", "nowhere", "--out", "y"], 4, "nowhere"),
        (["info", "."], 4, "config.toml"),
        (["estimate", "--config", "tiny", "--on", "abacus"], 2, "abacus"),
        (["simulate", "--config", "tiny", "--sweep", "swarm.quorum"], 2, "swarm.quorum"),
        (["simulate", "--config", "tiny", "--sweep", "swarm.qorum=1,2"], 2, "swarm.qorum"),
        (["train", "--config", "tiny", "--out", "corpus.txt"], 2, "is a file"),
        (["train", "--config", "tiny", "--out", "x", "--set", "train.device=meta"], 6, "meta"),
        (["eval", "nowhere", "--fit-weights"], 2, "--split test"),
        (["generate", "nowhere", "--temperature", "nan"], 2, "--temperature"),
        (["fly"], 2, "fly"),
        (["evl"], 2, "Did you mean 'eval'?"),
        (["train", "--config", "tny", "--out", "x"], 2, "did you mean tiny? The presets are "),
        (["train", "--config", "tiny", "--out", "x", "--set", "train.stps=3"], 2, "mean steps?"),
        (["serve", "nowhere", "--listen", "foo"], 2, "--listen"),
        (["stage", "nowhere", "--block", "1", "--listen", "foo"], 2, "--listen"),
        (["serve", "nowhere", "--stages", "host:7101, foo"], 2, "--stages"),
        (
            ["restore", "corpus.txt", "--data-dir", "new"],
            4,
            "give a file made by `blocktrain backup`",
        ),
        (["worker", "bt1_x", "--evaluate", "--idle-only"], 2, "do not apply to --evaluate"),
    ],
)
def test_a_mistake_is_one_clear_line(home: Path, arguments: list[str], code: int, says: str):
    done = run(home, *arguments)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_stage_without_a_key_says_how_to_make_one_or_do_without(home: Path, trained: Path):
    done = run(home, "stage", "trained", "--block", 1)
    assert done.returncode == 2
    assert "blocktrain keys FOLDER --name NAME" in done.stderr
    assert "--plain-tcp" in done.stderr


def test_a_run_that_failed_before_its_first_version_can_be_corrected(home: Path, trained: Path):
    failed = run(home, *training(home, "warm", "train.warm_start=nowhere"), "--block", "0")
    assert failed.returncode == 4 and "nowhere" in failed.stderr
    corrected = training(home, "warm", f"train.warm_start={trained}")
    assert run(home, *corrected, "--block", "0").returncode == 0
    other = run(home, *training(home, "warm"), "--block", "0")
    assert other.returncode == 4 and "train.warm_start" in other.stderr


def test_an_altered_checkpoint_is_named(home: Path, trained: Path):
    copy = home / "altered"
    assert run(home, *training(home, "altered")).returncode == 0
    newest = sorted((copy / "block-0").glob("v*.safetensors"))[-1]
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    done = run(home, "eval", "altered", "--windows", 4)
    assert done.returncode == 4
    assert newest.name in done.stderr


def test_simulate_shows_what_settings_lead_to(home: Path):
    swarm = ["simulate", "--config", "simulate", "--set", "simulate.workers=40"]
    swarm += ["--set", "train.steps=300"]
    shown = run(home, *swarm)
    assert shown.returncode == 0, shown.stderr
    for words in ("40 workers, 16 blocks: finished", "4,800 of 4,800", "met in time"):
        assert words in shown.stdout
    told = json.loads(run(home, *swarm, "--json").stdout)
    assert told["finished"] and told["merged_batches"] == [300] * 16
    sweep = [*swarm, "--sweep", "simulate.availability=1.0, 0.5"]
    assert "simulate.availability" in run(home, *sweep).stdout
    rows = json.loads(run(home, *sweep, "--json").stdout)
    assert [row["simulate.availability"] for row in rows] == ["1.0", "0.5"]
    assert rows[0]["utilisation"]["gone"] < rows[1]["utilisation"]["gone"]


def test_a_narrow_terminal_shows_fewer_columns_of_a_sweep_never_half_a_value(home: Path):
    sweep = ["simulate", "--config", "tiny", "--sweep", "simulate.availability=1.0,0.5"]
    narrow, wide = shown(home, 80, *sweep), shown(home, 140, *sweep)
    for table in (narrow, wide):
        assert "│ 1.0 " in table and "│ 0.5 " in table
        assert "…" not in table
    assert "no room for: " in narrow and "no room for: " not in wide


def test_simulate_shows_what_is_learned_where_something_is(home: Path):
    tiny = ["train.steps=12", "train.batch=2", "model.window=16", "simulate.score_windows=4"]
    swarm = ["simulate", "--config", "simulate-learn"]
    swarm += [part for setting in tiny for part in ("--set", setting)]
    shown = run(home, *swarm, "--sweep", "swarm.quorum=1,3")
    assert shown.returncode == 0, shown.stderr
    assert " CE " in shown.stdout
    told = json.loads(run(home, *swarm, "--json").stdout)
    assert told["finished"] and told["ce"] < told["samples"][0]["ce"]


def test_estimate_prints_what_a_run_needs(home: Path):
    needs = json.loads(run(home, "estimate", "--config", "wikitext2-38m", "--json").stdout)
    assert needs["parameters"] / needs["end_to_end_parameters"] < 1.15
    assert needs["seconds_per_block"] > 0
    shown = run(home, "estimate", "--config", "wikitext2-38m").stdout
    assert "network traffic" in shown
    assert "per block" in shown


def test_a_failing_block_stops_the_others_and_keeps_its_code(home: Path):
    """Block 1's checkpoint is damaged: its message and code, long before block 0 could finish."""
    longer = ["train.steps=100000", "train.save_every=5"]
    process = start(home, *training(home, "hurt", *longer), "--block", "1")
    block = home / "hurt/block-1"
    wait_for_process(process, (block / "manifest.json").exists)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    newest = sorted(block.glob("v*.safetensors"))[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    done = run(home, *training(home, "hurt", *longer), "--parallel", "2")
    assert done.returncode == 4, done.stderr
    assert "error: block 1: " in done.stderr
    assert newest.name in done.stderr


def test_a_leaking_sigma_warns(home: Path):
    leaky = ["objective.sigma_min=0.5", "train.steps=2"]
    done = run(home, *training(home, "leaky", *leaky), "--block", "0")
    assert done.returncode == 0
    assert "objective.sigma_min = 0.5 is below 1" in done.stderr


def test_the_demo_shows_blocks_beside_their_twins(home: Path):
    settings = [*SMALL, *AT_ONCE, f"data.source=text:{home}/corpus.txt", "train.steps=10"]
    flags = [part for setting in settings for part in ("--set", setting)]
    done = run(home, "demo", "--out", "demo", *flags)
    assert done.returncode == 0, done.stderr
    assert "end-to-end, 2 layers" in done.stdout
    assert "2 blocks x 1 layers" in done.stdout
    assert "generated by the assembled blocks" in done.stdout
    again = run(home, "demo", "--out", "demo", *flags, "--json")
    assert again.returncode == 0, again.stderr
    digests = {score["digest"] for score in json.loads(again.stdout)["scores"].values()}
    assert len(digests) == 1


def test_the_demo_shows_a_cascade_beside_its_twins(home: Path):
    """Of unequal blocks, the first trains the most layers: two and a tail of one."""
    settings = ["model.layers=4", "model.blocks=3", "model.depths=[2,1,1]", "model.width=32",
                "model.window=32", "train.batch=4", "train.steps=3", "train.precision=fp32",
                "train.device=cpu", *AT_ONCE, f"data.source=text:{home}/corpus.txt"]  # fmt: skip
    flags = [part for setting in settings for part in ("--set", setting)]
    done = run(home, "demo", "--config", "tiny-cascade", "--out", "demo-cascade", *flags)
    assert done.returncode == 0, done.stderr
    rows = [line.split("│")[1:5] for line in done.stdout.splitlines() if "M │" in line]
    twin, shallow, *readings = [name.strip() for name, *_ in rows]
    assert twin == "end-to-end, 4 layers"
    assert shallow.startswith("end-to-end, 3 layers (")
    assert readings == ["blocks of 2+1+1 layers, product", "blocks of 2+1+1 layers, final"]
    scores = [float(ce) for _, _, ce, _ in rows]
    assert all(4.0 < ce < 5.6 for ce in scores)
    for ce, (*_, gap) in zip(scores[1:], rows[1:], strict=True):
        assert float(gap) == pytest.approx(ce - scores[0], abs=1e-3)
    assert "generated by the assembled blocks" in done.stdout


def test_a_stop_of_the_parent_stops_blocks_side_by_side(home: Path):
    """SIGTERM to the parent alone: its children save and stop, and the rest never start."""
    longer = ["train.steps=2000", "train.save_every=5", "model.layers=4", "model.blocks=4"]
    process = start(home, *training(home, "stopped", *longer), "--parallel", "2")
    manifests = [home / f"stopped/block-{k}/manifest.json" for k in range(4)]
    wait_for_process(process, lambda: manifests[0].exists() and manifests[1].exists())
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "resumes" in errors
    assert [m.exists() for m in manifests] == [True, True, False, False]
    assert not any(json.loads(m.read_text())["finished"] for m in manifests[:2])


@pytest.mark.skipif(sys.platform != "linux", reason="finds the child in /proc")
def test_nobody_waits_for_the_lead_of_a_block_that_was_stopped(home: Path):
    """SIGTERM to the child that trains block 0: the command ends, and can be called again."""
    longer = [*CASCADE, "train.steps=2000", "train.save_every=5"]
    process = start(home, *training(home, "stopped-0", *longer), "--parallel", "2")
    wait_for_process(process, (home / "stopped-0/block-0/manifest.json").exists)
    threads = Path(f"/proc/{process.pid}/task").glob("*/children")
    (child,) = (int(pid) for thread in threads for pid in thread.read_text().split())
    os.kill(child, signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert not (home / "stopped-0/block-1/manifest.json").exists()
