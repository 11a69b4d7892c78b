"""From a run directory to a model in memory, ready to score or to generate."""

from collections.abc import Sequence

import torch
from torch import nn

from blocktrain.errors import RunError
from blocktrain.model.stack import Stack, assemble, new_block
from blocktrain.storage.run_dir import RunDir, Tensors
from blocktrain.train.device import Compute


def load_stack(run: RunDir, compute: Compute) -> Stack:
    return assemble(run.config, load_units(run, range(run.config.units), compute))


def load_units(run: RunDir, units: Sequence[int], compute: Compute) -> list[nn.Module]:
    """Some of a run's blocks, on the device; the others are not read."""
    blocks: list[nn.Module] = []
    for unit, weights in zip(units, run.weights(units), strict=True):
        module = new_block(run.config, unit)
        load_block(module, weights, str(run.path))
        module.compute_dtype = compute.dtype
        blocks.append(module.to(compute.device))
    return blocks


def load_block(module: nn.Module, weights: Tensors, origin: str) -> None:
    """Copy weights into a module; a name or shape that differs is an error that names it."""
    expected = dict(module.named_parameters())
    if differing := sorted(set(expected) ^ set(weights)):
        raise RunError(f"{origin} does not fit this model: {differing[0]} is on one side only")
    for name, parameter in expected.items():
        stored = torch.from_numpy(weights[name])
        if stored.shape != parameter.shape:
            raise RunError(
                f"{origin} does not fit this model: {name} is {tuple(stored.shape)},"
                f" not {tuple(parameter.shape)}"
            )
        with torch.no_grad():
            parameter.copy_(stored)
