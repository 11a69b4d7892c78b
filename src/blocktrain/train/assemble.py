"""From a run directory to a model in memory, ready to score or to generate."""

import torch
from torch import nn

from blocktrain.errors import RunError
from blocktrain.model.stack import Stack, assemble, new_block
from blocktrain.storage.run_dir import RunDir, Tensors
from blocktrain.train.device import Compute


def load_stack(run: RunDir, compute: Compute) -> Stack:
    blocks = [_loaded(run, unit, held, compute) for unit, held in enumerate(run.weights())]
    return assemble(run.config, blocks)


def _loaded(run: RunDir, unit: int, weights: Tensors, compute: Compute) -> nn.Module:
    module = new_block(run.config, unit)
    load_block(module, weights, str(run.path))
    module.compute_dtype = compute.dtype
    return module.to(compute.device)


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
