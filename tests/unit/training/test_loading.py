"""Blocks from stored weights: filled one weight at a time; a weight that does not fit is named."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.models import awake_block
from tests.support.training import CPU
from torch import nn

from blocktrain.config import Config
from blocktrain.errors import RunError
from blocktrain.model.stack import assemble
from blocktrain.storage.block_dir import Snapshot
from blocktrain.storage.run_dir import RunDir
from blocktrain.storage.tensor_file import Tensors
from blocktrain.training.stored_models import (
    finish_loading,
    load_stored_block,
    meta_init_block,
    put_weight,
    weight_shapes,
)


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


def filled(
    block: nn.Module, config: Config, index: int, held: str, dtype: torch.dtype
) -> nn.Module:
    block_without_weights = meta_init_block(config, index, held)
    for name, parameter in block.named_parameters():
        put_weight(block_without_weights, name, parameter.detach().clone(), dtype)
    return finish_loading(block_without_weights, CPU.device, dtype)


@pytest.fixture(params=["denoise", "cascade"])
def kind(request: pytest.FixtureRequest, config: Config) -> Config:
    return config.with_settings(objective__kind=request.param, objective__tail=1)


@pytest.mark.parametrize(("held", "tolerance"), [("full", 0.0), ("int8", 0.02)])
def test_filled_blocks_say_what_the_whole_ones_say(kind: Config, held: str, tolerance: float):
    blocks = [awake_block(kind, index) for index in range(kind.block_count)]
    hollow = [filled(block, kind, n, held, torch.float32) for n, block in enumerate(blocks)]
    ids = torch.tensor([list(b"some bytes of text")])
    exact, found = (assemble(kind, each).log_probs(ids) for each in (blocks, hollow))
    for ours, theirs in zip(found, exact, strict=True):
        assert (ours - theirs).std() <= tolerance * theirs.std()


@pytest.mark.parametrize("held", ["full", "int8"])
def test_it_asks_for_every_weight_and_no_other(kind: Config, held: str):
    for index in range(kind.block_count):
        wanted = {name: p.shape for name, p in awake_block(kind, index).named_parameters()}
        assert weight_shapes(meta_init_block(kind, index, held)) == wanted


def test_nothing_takes_memory_before_it_is_put_in(kind: Config):
    large = kind.with_settings(model__width=1 << 16)  # tens of gigabytes, were they there
    for held in ("full", "int8"):
        assert all(each.is_meta for each in meta_init_block(large, 0, held).parameters())


def test_int8_is_for_the_matrices_of_layers_alone(kind: Config):
    block = filled(awake_block(kind, 0), kind, 0, "int8", torch.bfloat16)
    levels = [name for name, held in block.named_buffers() if held.dtype == torch.int8]
    assert all(name.split(".")[0] in ("layers", "tail") for name in levels)
    assert len(levels) == 4 * (kind.depths[0] + kind.tail_layers(0))
    assert {parameter.dtype for parameter in block.parameters()} == {torch.bfloat16}
    assert {s.dtype for name, s in block.named_buffers() if name.endswith("scale")} == {
        torch.float32
    }
