"""What the serving bench makes of its measurements."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.models import awake_stack

from blocktrain.config import load_config
from blocktrain.training.device import resolve

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "bench"))  # the benches import each other by name

serving = importlib.import_module("serving")
quality = importlib.import_module("serving_quality")
wan = importlib.import_module("serving_wan")
limit = importlib.import_module("serving_limit")


@pytest.mark.parametrize("computed", [0.1, 1.1])
def test_an_answer_is_rated_by_what_hardware_and_network_allow(computed: float) -> None:
    """Not by the time that we computed."""
    cost = {"traversals": 4, "stage_seconds": {"block 0": computed, "block 1": 0.2}}
    answer = {"cost": cost, "seconds": 2.0, "moments": [0.5, 2.0]}
    hardware = limit.Hardware(bytes_per_second=4e9, flops=1e12)
    bound = limit.Limit(0.2, 100.0, hardware, weight_bytes=1e8, parameters=2.5e7)
    found = wan.rated(answer, written=100, sent=1_250_000, bound=bound)
    assert found["hardware_seconds"] == pytest.approx(4 * 0.025)
    assert found["limit_seconds"] == pytest.approx(4 * 0.2 + 0.1 + 0.1)
    assert found["of_limit"] == pytest.approx(0.5)
    assert (found["bytes_per_second"], found["bytes_per_traversal"]) == (50.0, 25.0)


def test_many_positions_are_bounded_by_arithmetic() -> None:
    hardware = limit.Hardware(bytes_per_second=4e9, flops=1e12)
    assert hardware.seconds(1e8, 2.5e7, positions=1) == pytest.approx(0.025)
    assert hardware.seconds(1e8, 2.5e7, positions=2000) == pytest.approx(0.1)
    assert (measured := limit.Hardware.measured(resolve("cpu", "fp32"))).flops > 0
    assert measured.bytes_per_second > 0


def test_every_block_after_the_first_is_on_one_stage() -> None:
    assert wan.shares(4) == ["1-1", "2-2", "3-3"]
    assert wan.shares(6) == ["1-2", "3-4", "5-5"]


def test_the_crossing_is_where_the_wan_takes_as_long_as_home() -> None:
    rows = [
        {"mode": "sweep", "temperature": 0.0, "round_trip_ms": trip, "seconds": 0.1 + 0.002 * trip}
        for trip in (10.0, 50.0, 100.0)
    ]
    (found,) = serving.crossings(rows, home_seconds=0.4)
    assert found["round_trip_ms"] == pytest.approx(150.0)
    (never,) = serving.crossings(rows, home_seconds=0.05)
    assert never["round_trip_ms"] == 0.0


def test_prompts_are_spread_over_the_text() -> None:
    text = np.arange(100, dtype=np.uint8)
    assert quality.fixed_prompts(text, 4, 2) == [b"\x00\x01", b"\x19\x1a", b"23", b"KL"]


def test_repetition_is_seen() -> None:
    assert quality.distinct_share([b"aaaaaaaa"]) == pytest.approx(1 / 5)
    assert quality.distinct_share([b"abcdefgh"]) == 1.0


def test_a_judge_reads_every_byte_once_with_half_a_window_before_it() -> None:
    judge = awake_stack(load_config(ROOT / "configs/tiny.toml", ["objective.kind=end_to_end"]))
    half = judge.config.model.window // 2
    draws = np.random.default_rng(0)
    prompt, *halves = (draws.integers(0, 256, half, np.uint8).tobytes() for _ in range(3))
    found = quality.judged(judge, [prompt], [b"".join(halves)])
    expected = 0.0
    for before, after in ((prompt, halves[0]), (halves[0], halves[1])):
        window = [*before, *after]
        log_probs = judge.log_probs(torch.tensor([[judge.config.vocabulary.bos, *window[:-1]]]))[
            -1
        ][0]
        expected -= sum(float(log_probs[at, window[at]]) for at in range(half, 2 * half))
    assert found == pytest.approx(expected / (2 * half), rel=1e-5)
