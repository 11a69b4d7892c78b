"""Blocks from files: what does not fit is named, and no more than a tensor is held beside them."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.models import awake_block
from tests.support.training import CPU

from blocktrain.config import Config
from blocktrain.errors import RunError
from blocktrain.storage.run_dir import RunDir, Snapshot, Tensors
from blocktrain.train.assemble import load_stored_block


def weights_of(config: Config) -> Tensors:
    return {
        name: parameter.detach().numpy()
        for name, parameter in awake_block(config).named_parameters()
    }


def saved(folder: Path, config: Config, weights: Tensors) -> RunDir:
    run = RunDir.create(folder, config)
    run.block(0).save(Snapshot(1, 1, None, weights, {}, {}))
    return run


def without(weights: Tensors, name: str) -> Tensors:
    return {other: tensor for other, tensor in weights.items() if other != name}


@pytest.mark.parametrize("held", ["full", "int8"])
@pytest.mark.parametrize(
    "change",
    [
        lambda weights: without(weights, "layers.0.qkv.weight"),
        lambda weights: {**weights, "layers.0.qkv.bias": np.zeros(3, np.float32)},
        lambda weights: {**weights, "layers.0.qkv.weight": np.zeros((3, 3), np.float32)},
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, config: Config, held: str, change):
    run = saved(tmp_path / "run", config, change(weights_of(config)))
    with pytest.raises(RunError, match=r"layers\.0\.qkv"):
        load_stored_block(run, 0, CPU, torch.float32, held)


def test_a_block_is_never_in_memory_twice(tmp_path: Path, config: Config):
    large = config.with_settings(model__width=256, model__layers=8, model__depths=[7, 1])
    weights = weights_of(large)
    whole, largest = (f(each.nbytes for each in weights.values()) for f in (sum, max))
    run = saved(tmp_path / "run", large, weights)
    tracemalloc.start()
    try:
        load_stored_block(run, 0, CPU, torch.bfloat16, "int8")  # nothing is kept of what is read
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < min(3 * largest, whole / 2)
