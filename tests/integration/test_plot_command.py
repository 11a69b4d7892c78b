"""blocktrain plot: pictures of a run, of any state."""

import os
from pathlib import Path

import pytest
from tests.support.commands import run_here

import blocktrain as bt
from blocktrain.config import Config
from blocktrain.storage.run_dir import RunDir

PNG = b"\x89PNG"


@pytest.fixture
def trained(tmp_path: Path, cascade: Config) -> Path:
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 200)
    settings = {"data.source": f"text:{text}", "train.eval_every": 6}
    return bt.train(cascade, tmp_path / "run", settings, progress=False)


def test_a_run_is_drawn(tmp_path: Path, trained: Path):
    done = run_here(["plot", "run", "--windows", "4", "--device", "cpu"], tmp_path, os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["run/plots/loss.png", "run/plots/latency.png"]
    assert {path.read_bytes()[:4] for path in (trained / "plots").iterdir()} == {PNG}


def test_what_cannot_be_drawn_is_left_out_or_explained(tmp_path: Path, trained: Path):
    RunDir.open(trained).block(1).clear()
    done = run_here(["plot", "run", "--out", "half"], tmp_path, os.environ)
    assert done.stdout.split() == ["half/loss.png"]
    RunDir.open(trained).block(0).clear()
    done = run_here(["plot", "run"], tmp_path, os.environ)
    assert (done.returncode, "not trained yet" in done.stderr) == (4, True)
