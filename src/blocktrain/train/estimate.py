"""What a run will need, before anything runs: parameters, memory, arithmetic, bytes, time.

Counts are exact where they can be (parameters come from the modules themselves, built without
memory); activations and times are estimates, and say so by being named that.
"""

from dataclasses import dataclass

import torch
from torch import nn

from blocktrain.config import Config
from blocktrain.core.vocabulary import BYTES
from blocktrain.model.stack import new_block

# Sustained bf16 FLOP/s in training at these widths, not the datasheet's peak.
DEVICES = {
    "laptop-cpu": 1.0e11,
    "server-cpu": 1.0e12,
    "rtx-3060": 1.2e13,
    "rtx-4090": 6.0e13,
    "a100": 1.2e14,
    "h100": 2.5e14,
    "h200": 2.5e14,
}
ADAM_BYTES_PER_PARAMETER = 16  # fp32 weight, gradient and two moments


@dataclass(frozen=True)
class Estimate:
    parameters: int
    parameters_per_block: int
    end_to_end_parameters: int
    fixed_bytes_per_worker: int
    activation_bytes_per_worker: int
    flops_per_step: float
    wire_bytes_per_round: int
    steps: int
    bytes_per_block: int

    def seconds(self, flops_per_s: float) -> float:
        """Time for one worker to train one block to the end."""
        return self.flops_per_step * self.steps / flops_per_s

    @property
    def memory_per_worker(self) -> int:
        return self.fixed_bytes_per_worker + self.activation_bytes_per_worker


def estimate(config: Config) -> Estimate:
    block = _on_meta(config)
    per_block = _count(block)
    end_to_end = _count(_on_meta(config.with_settings(objective__kind="end_to_end")))
    return Estimate(
        parameters=per_block * config.units,
        parameters_per_block=per_block,
        end_to_end_parameters=end_to_end,
        fixed_bytes_per_worker=per_block * ADAM_BYTES_PER_PARAMETER,
        activation_bytes_per_worker=_activation_bytes(config, per_block),
        flops_per_step=_flops_per_step(config, block),
        wire_bytes_per_round=2 * 4 * per_block,  # a version down and an update up, raw fp32
        steps=config.train.steps,
        bytes_per_block=config.train.steps * config.train.batch * config.model.window,
    )


def _on_meta(config: Config) -> nn.Module:
    with torch.device("meta"):
        return new_block(config)


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _positions(config: Config) -> int:
    return config.train.batch // config.train.accumulate * config.model.window


def stream_layers(config: Config) -> int:
    """Layers times streams that run in full: two streams, but in the last layer only one."""
    layers = config.unit_layers
    return layers if config.objective.kind == "end_to_end" else 2 * layers - 1


def _activation_bytes(config: Config, parameters: int) -> int:
    """What the backward pass keeps: about 12 + 3 x mlp_ratio widths per stream and layer.

    With layers recomputed, only their inputs stay, and one layer at a time in full.
    """
    model = config.model
    element = 4 if config.train.precision == "fp32" else 2
    streams = stream_layers(config)
    widths = streams * (12 + 3 * model.mlp_ratio)
    if config.train.checkpoint_layers:
        at_once = 1 if config.objective.kind == "end_to_end" else 2
        widths = streams + at_once * (12 + 3 * model.mlp_ratio)
    logits = 4 * BYTES * 4
    weights_in_bf16 = parameters * 2 if element == 2 else 0
    return int(_positions(config) * (widths * model.width * element + logits)) + weights_in_bf16


def _flops_per_step(config: Config, block: nn.Module) -> float:
    """Forward and backward of one optimizer step: 6 per weight of a product and position."""
    model = config.model
    positions = _positions(config) * config.train.accumulate
    streams = stream_layers(config)
    per_layer = _count(block.layers) / config.unit_layers  # type: ignore[arg-type]
    # Keys and values are computed by the clean stream alone.
    kv = 2 * model.width**2
    weights = streams * (per_layer - kv) + config.unit_layers * kv
    attention = streams * model.width * model.window  # causal: half of T keys, two products
    return float(6 * positions * (weights + attention + _outside_layers(config)))


def _outside_layers(config: Config) -> int:
    """Weights of the products around the layers: the head, or z in and F out with the table."""
    width = config.model.width
    if config.objective.kind == "end_to_end":
        return BYTES * width
    return 2 * BYTES * width + 3 * BYTES * config.objective.target_dim
