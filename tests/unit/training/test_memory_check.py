import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from blocktrain.config import Config, load_config
from blocktrain.errors import DeviceError
from blocktrain.memory import FreeMemory, is_out_of_memory
from blocktrain.training import memory_check
from blocktrain.training.memory_check import (
    PROCESS_BYTES,
    check_serving,
    check_training,
    gigabytes,
)

DEMO = Path(__file__).parents[3] / "configs" / "demo.toml"
GB = 10**9
SUGGESTION = re.compile(r"(\w+\.\w+)=(\S+) \(")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch):
    def set_free(count: int) -> None:
        memory = FreeMemory(count, "this machine")
        monkeypatch.setattr(memory_check, "free_memory", lambda: memory)

    set_free(16 * GB)
    return set_free


def refusal(config: Config, **options: object) -> str:
    with pytest.raises(DeviceError) as caught:
        check_training(config, "cpu", **options)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize(
    ("named", "overrides"),
    [
        ("model.width", ["model.width=65536", "model.heads=512"]),
        ("model.layers", ["model.layers=1000000", "model.blocks=10"]),
        ("model.blocks", ["model.layers=1024", "model.blocks=1", "model.width=2048"]),
        ("model.window", ["model.window=100000000"]),
        ("train.accumulate", ["train.batch=65536", "model.width=512"]),
        ("train.batch", ["train.batch=1000000"]),
        (
            "train.checkpoint_layers",
            ["train.batch=4", "model.layers=96", "model.blocks=1", "model.window=2048"],
        ),
        ("objective.tail", ["objective.kind=cascade", "objective.tail=1000000"]),
    ],
)
def test_the_setting_that_is_too_large_is_named_and_the_suggested_value_fits(
    named: str, overrides: list[str], free
):
    config = load_config(DEMO, overrides)
    message = refusal(config)
    assert "more than is free on this machine (16.0 GB)" in message
    assert "--force" in message
    suggested = dict(SUGGESTION.findall(message))
    assert named in suggested
    for name, value in suggested.items():
        if name != "model.width":  # halves the heads too
            check_training(load_config(DEMO, [*overrides, f"{name}={value}"]), "cpu")


def test_if_no_setting_is_enough_those_that_save_most_are_named(free):
    free(PROCESS_BYTES + 10**6)
    message = refusal(load_config(DEMO, ["model.width=4096", "model.heads=32"]))
    assert "no setting is enough by itself; change several, such as model.width=2048 (saves" in (
        message
    )


def test_blocks_that_are_trained_at_the_same_time_add_up(free):
    config = load_config(DEMO)
    one = max(memory_check.Device.named("cpu").training_bytes(config))
    free(3 * one)
    check_training(config, "cpu", processes=3)
    assert "training 4 blocks at the same time" in refusal(config, processes=4)


def test_serving_adds_up_the_blocks_of_this_machine(free):
    config = load_config(DEMO, ["model.width=4096", "model.heads=32"])
    free(2 * GB + PROCESS_BYTES)
    check_serving(config, "cpu", "fp32", "full", range(1, 2), 1)
    with pytest.raises(DeviceError, match=r"serving 4 blocks needs .* use --weights int8 \("):
        check_serving(config, "cpu", "fp32", "full", range(4), 1)


def test_sizes_are_shown_with_about_three_digits():
    sizes = [gigabytes(count) for count in (0, 99.94e6, 999.4e6, 1e9, 764e9, 999.6e9, 4.5e15)]
    assert sizes == ["0.0 MB", "99.9 MB", "999 MB", "1.0 GB", "764 GB", "1.0 TB", "4,500 TB"]


def test_an_oversized_run_is_refused_at_once_without_loading_torch(tmp_path: Path):
    """bench/oversized.py measures 20 of them."""
    program = [sys.executable, "-X", "importtime", "-m", "blocktrain.cli.main", "train"]
    settings = ["--set", "model.width=1048576", "--set", "train.device=cpu"]
    started = time.perf_counter()
    command = [*program, "--config", str(DEMO), *settings, "--out", str(tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == DeviceError.exit_code
    assert "it would fit with model.width=" in ended.stderr
    assert not re.search(r"\| +torch$", ended.stderr, re.MULTILINE)
    assert not (tmp_path / "run").exists()
    assert time.perf_counter() - started < 10.0  # usually below 1


def test_a_failed_allocation_of_torch_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    assert is_out_of_memory(caught.value)
