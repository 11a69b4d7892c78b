"""Models for tests: awake (no zero-initialised path is silent) and deliberately leaky."""

from types import MethodType

import torch
from torch import nn

from blocktrain.config import Config
from blocktrain.model.layer import Context, Layer
from blocktrain.model.stack import Stack, assemble, new_block


def awake_block(config: Config, index: int = 0) -> nn.Module:
    """A block whose every parameter is random, so that no part of it multiplies by zero."""
    torch.manual_seed(index)
    block = new_block(config, index)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return block


def awake_stack(config: Config) -> Stack:
    return assemble(config, [awake_block(config, index) for index in range(config.block_count)])


def untrained_stack(config: Config) -> Stack:
    torch.manual_seed(0)
    return assemble(config, [new_block(config, index) for index in range(config.block_count)])


def leak(stack: Stack) -> Stack:
    """Remove the causal mask from every layer: the positive control of the perturbation test."""
    for block in stack.blocks:
        for layer in block.layers:  # type: ignore[union-attr]
            layer.context = MethodType(_open_context, layer)
    return stack


def _open_context(layer: Layer, *arguments: object) -> Context:
    context = Layer.context(layer, *arguments)  # type: ignore[arg-type]
    return context._replace(cached=context.cached._replace(causal=False))
