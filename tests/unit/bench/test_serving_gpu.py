"""What the GPU serving bench makes of shapes and of its measurements."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from blocktrain.training.device import resolve

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "bench"))  # the benches import each other by name

gpu = importlib.import_module("serving_gpu")
seeded = importlib.import_module("serving_seeded")
quality = importlib.import_module("serving_quality")

CPU = resolve("cpu", "fp32")


@pytest.mark.parametrize(
    ("shape", "billions"), [("1.3B", 1.3), ("7B", 7.0), ("30B", 30.0), ("75.8B", 75.8)]
)
def test_shapes_have_the_parameters_they_are_named_after(shape: str, billions: float):
    source = seeded.SeededBlocks(seeded.config_of(shape), "int8")
    assert source.parameters() / 1e9 == pytest.approx(billions, rel=0.015)
    assert source.resident_bytes(torch.bfloat16) < 1.02 * source.parameters()


@pytest.mark.parametrize("held", seeded.HELD)
def test_what_is_resident_is_what_was_counted(held: str):
    source = seeded.SeededBlocks(seeded.config_of("tiny"), held)
    blocks = [source.load(block, CPU) for block in range(source.config.block_count)]
    held_bytes = sum(
        each.nbytes
        for block in blocks
        for each in (*block.parameters(), *(b for n, b in block.named_buffers() if "_TR" not in n))
    )
    assert held_bytes == source.resident_bytes(torch.float32)
    again = source.load(1, CPU)
    assert all(map(torch.equal, blocks[1].parameters(), again.parameters()))


def test_a_logical_models_layers_are_one():
    config = seeded.config_of("tiny").with_settings(model__layers=8)
    block = seeded.SeededBlocks(config, "logical").load(0, CPU)
    one, other = block.layers
    assert one is other


def test_the_factor_is_that_of_rates_and_the_prediction_that_of_limits():
    ar = {"bytes_per_second": 10.0, "written": 32, "limit_seconds": 3.0}
    sweep = {"bytes_per_second": 200.0, "written": 128, "limit_seconds": 0.5}
    found = gpu.factors(ar, sweep)
    assert found["measured"] == 20.0
    assert found["predicted"] == pytest.approx(24.0)
    assert found["within"] == "yes"
    assert gpu.factors(ar, {**sweep, "bytes_per_second": 180.0})["within"] == "no"


def test_texts_agree_up_to_the_first_byte_that_differs():
    assert quality.agreeing(b"abcd", b"abXd") == 2
    assert quality.agreeing(b"abcd", b"abcd") == 4
