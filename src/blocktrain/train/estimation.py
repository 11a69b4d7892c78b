"""What a run needs, before it starts: parameters, memory, arithmetic and traffic per worker."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from blocktrain.codec.frames import largest_encoded_size
from blocktrain.codec.registry import delta_codec, update_codec
from blocktrain.config import Config
from blocktrain.model.block import layer_class
from blocktrain.model.stack import new_block
from blocktrain.train.cascade import cache_bytes
from blocktrain.train.optimizer import moment_shapes

# Sustained bf16 FLOP/s of devices at these widths, not the peak of their data sheets.
FLOPS = {
    "laptop-cpu": 1.0e11,
    "server-cpu": 1.0e12,
    "rtx-3060": 1.2e13,
    "rtx-4090": 6.0e13,
    "a100": 1.2e14,
    "h100": 2.5e14,
    "h200": 2.5e14,
}


FP32_BYTES = 4
FROZEN_BYTES = {"bf16": 2, "int8": 1}


@dataclass(frozen=True)
class Estimate:
    parameters: int
    parameters_per_block: int
    end_to_end_parameters: int
    fixed_bytes_per_worker: int
    activation_bytes_per_worker: int
    feature_cache_bytes: int  # in RAM or on disk, not in the memory of the device
    flops_per_step: float
    wire_bytes_per_round: int
    steps: int
    bytes_per_block: int

    def seconds(self, flops_per_s: float) -> float:
        """Time in which one worker trains one block to the end."""
        return self.flops_per_step * self.steps / flops_per_s

    @property
    def memory_per_worker(self) -> int:
        return self.fixed_bytes_per_worker + self.activation_bytes_per_worker


def estimate(config: Config) -> Estimate:
    """For the worker with the most to do; in a cascade blocks differ."""
    blocks = [_on_meta(config, index) for index in range(config.block_count)]
    end_to_end = _on_meta(config.end_to_end(), 0)
    largest = max(map(_count, blocks))
    return Estimate(
        parameters=sum(map(_count, blocks)),
        parameters_per_block=largest,
        end_to_end_parameters=_count(end_to_end),
        fixed_bytes_per_worker=max(
            _fixed_bytes(config, blocks, index) for index in range(len(blocks))
        ),
        activation_bytes_per_worker=max(
            _activation_bytes(config, index, _count(block)) for index, block in enumerate(blocks)
        ),
        feature_cache_bytes=cache_bytes(config),
        flops_per_step=max(_flops_per_step(config, blocks, index) for index in range(len(blocks))),
        wire_bytes_per_round=_wire_bytes(config, largest),
        steps=config.train.steps,
        bytes_per_block=config.train.steps * config.bytes_per_step,
    )


def _wire_bytes(config: Config, numbers: int) -> int:
    """Bytes of an update up and a version's delta down, if a quorum's updates make the version."""
    swarm = config.swarm
    codecs = (update_codec(swarm), delta_codec(swarm, swarm.quorum))
    return sum(largest_encoded_size(codec, numbers) if codec else 4 * numbers for codec in codecs)


def memory_of(config: Config, index: int) -> int:
    """Memory of a worker that trains this block; in a cascade blocks differ."""
    blocks = [_on_meta(config, index) for index in range(config.block_count)]
    return _fixed_bytes(config, blocks, index) + _activation_bytes(
        config, index, _count(blocks[index])
    )


def _on_meta(config: Config, index: int) -> nn.Module:
    with torch.device("meta"):
        return new_block(config, index)


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _per_layer(block: nn.Module) -> float:
    layers = block.layers
    return _count(layers) / len(layers)  # type: ignore[arg-type]


def _positions(config: Config) -> int:
    return config.train.batch // config.train.accumulate * config.model.window


def _before(config: Config, index: int) -> int:
    """Frozen layers that run before a worker's own."""
    return sum(config.depths[:index]) if config.kind.reads_predecessors else 0


def _fixed_bytes(config: Config, blocks: list[nn.Module], index: int) -> int:
    """Weights, gradients and moments of the block, and the weights of frozen blocks before it."""
    moments = sum(
        math.prod(shape) for shape in moment_shapes(blocks[index], config.train).values() if shape
    )
    own = (2 * _count(blocks[index]) + moments) * FP32_BYTES
    if not config.kind.reads_predecessors or config.objective.feature_cache != "off":
        return own
    frozen = sum(_trunk_parameters(block) for block in blocks[:index])
    return own + frozen * FROZEN_BYTES[config.objective.frozen]


def _trunk_parameters(block: nn.Module) -> int:
    private = ("tail.", "head.")
    return sum(p.numel() for name, p in block.named_parameters() if not name.startswith(private))


def stream_layers(config: Config, index: int) -> int:
    """Layers times streams that are trained; in the last layer only one stream runs in full."""
    layers = config.depths[index] + config.tail_layers(index)
    return config.kind.streams * (layers - 1) + 1


def _activation_bytes(config: Config, index: int, parameters: int) -> int:
    """What the backward pass keeps of each stream and layer, logits, and weights in bf16.

    If layers are recomputed, only their inputs stay, and one layer at a time in full; a second
    stream, which has no keys and values of its own, adds about half of that.
    """
    model = config.model
    element = 4 if config.train.precision == "fp32" else 2
    streams = stream_layers(config, index)
    per_layer = layer_class(model).costs(model).activations
    numbers = streams * per_layer
    if config.train.checkpoint_layers:
        at_once = 1.5 if config.kind.streams > 1 else 1.0
        numbers = streams * model.width + at_once * per_layer
    logits = 4 * config.vocabulary.size * 4
    weights_in_bf16 = parameters * 2 if element == 2 else 0
    return int(_positions(config) * (numbers * element + logits)) + weights_in_bf16


def _flops_per_step(config: Config, blocks: list[nn.Module], index: int) -> float:
    """Forward and backward of one optimizer step: 6 per weight of a product and position; layers
    that only run forward count a third."""
    model = config.model
    positions = _positions(config) * config.train.accumulate
    streams = stream_layers(config, index)
    layers = config.depths[index] + config.tail_layers(index)
    per_layer = _per_layer(blocks[index])
    costs = layer_class(model).costs(model)
    own = streams * (per_layer - costs.context + costs.attention) + layers * costs.context
    frozen = _before(config, index) * (per_layer + costs.attention) / 3
    return float(6 * positions * (own + frozen + _outside_layers(config)))


def _outside_layers(config: Config) -> int:
    """Weights of the products around the layers: the head, or z in and F out with the table."""
    width, tokens = config.model.width, config.vocabulary.size
    if not config.kind.denoises:
        return tokens * width
    return 2 * tokens * width + 3 * tokens * config.objective.target_dim
