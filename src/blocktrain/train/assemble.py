"""From a run directory to a model in memory, ready to score or to generate."""

import torch
from torch import nn

from blocktrain.errors import RunError
from blocktrain.model import loading
from blocktrain.model.stack import Stack, assemble
from blocktrain.storage.run_dir import RunDir, Tensors
from blocktrain.train.device import Compute


def load_stack(run: RunDir, compute: Compute) -> Stack:
    indices = range(run.config.block_count)
    return assemble(
        run.config, [load_stored_block(run, index, compute, torch.float32) for index in indices]
    )


def load_stored_block(
    run: RunDir, index: int, compute: Compute, dtype: torch.dtype, held: str = "full"
) -> nn.Module:
    """One of a run's blocks, on the device; the others are not read, and of this one no more than
    a tensor is held beside it at a time."""
    block, origin = loading.meta_init_block(run.config, index, held), str(run.path)
    missing = loading.shapes(block)
    for name, weight in run.read_block(index):
        stored = torch.from_numpy(weight)
        _check_shape(name, stored.shape, missing.pop(name, None), origin)
        loading.put(block, name, stored.to(compute.device), dtype)
    for name in missing:
        _check_shape(name, None, missing[name], origin)
    return loading.settle(block, compute.device, compute.dtype)


def load_block(module: nn.Module, weights: Tensors, origin: str) -> None:
    """Copy weights into a module; a name or shape that differs is an error that names it."""
    expected = dict(module.named_parameters())
    for name in sorted({*expected, *weights}):
        here = weights[name].shape if name in weights else None
        there = expected[name].shape if name in expected else None
        _check_shape(name, here, there, origin)
    for name, parameter in expected.items():
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(weights[name]))


def _check_shape(
    name: str, here: tuple[int, ...] | None, there: tuple[int, ...] | None, origin: str
) -> None:
    if here is None or there is None:
        raise RunError(f"{origin} does not fit this model: {name} is on one side only")
    if tuple(here) != tuple(there):
        raise RunError(
            f"{origin} does not fit this model: {name} is {tuple(here)}, not {tuple(there)}"
        )
