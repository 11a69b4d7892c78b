"""Estimates before a run starts: parameters; memory, FLOPs and traffic per worker.

All numbers follow from settings, without torch and without allocating anything, so that a model far
too large for this machine is estimated in milliseconds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from blocktrain.codec import delta_codec, update_codec
from blocktrain.codec.frames import largest_encoded_size
from blocktrain.config import Config
from blocktrain.config.compute import (
    end_to_end_steps,
    flops_per_step,
    stream_layers,
    total_flops,
)
from blocktrain.config.sizes import CHUNK_LOGITS, BlockSize, block_sizes, needs_chunks
from blocktrain.storage.run_dir import RunDir

FP32_BYTES = 4
FEATURE_BYTES = 2  # of a number in the feature cache
FROZEN_BYTES = {"bf16": 2, "int8": 1}
# Sustained bf16 FLOP/s for models of this size, not the data sheet's peak.
FLOPS = {
    "laptop-cpu": 1.0e11,
    "server-cpu": 1.0e12,
    "rtx-3060": 1.2e13,
    "rtx-4090": 6.0e13,
    "a100": 1.2e14,
    "h100": 2.5e14,
    "h200": 2.5e14,
}
LOGITS_IN_CHUNK = 3  # fp32 arrays as large as a chunk's logits; there is one more in compute dtype


@dataclass(frozen=True)
class Estimate:
    parameters: int
    parameters_per_block: int
    vocabulary_parameters: int  # those of a block's parameters in the embedding and the head
    end_to_end_parameters: int
    fixed_bytes_per_worker: int
    activation_bytes_per_worker: int
    logits_bytes: int  # the share of activations for logits and the head's gradient
    feature_cache_bytes: int  # in RAM or on disk, not in the memory of the device
    frozen_bytes: int  # of all frozen blocks that a block trains with, in memory or on disk
    flops_per_step: int
    total_flops: int  # of all blocks and steps
    end_to_end_steps: float  # that cost as much as the whole run
    wire_bytes_per_round: int
    steps: int
    tokens_per_block: int
    bytes_per_block: int  # of text

    def seconds(self, flops_per_s: float) -> float:
        """Time that one worker takes to train one block to the end."""
        return self.flops_per_step * self.steps / flops_per_s

    @property
    def memory_per_worker(self) -> int:
        return self.fixed_bytes_per_worker + self.activation_bytes_per_worker


def estimate(config: Config) -> Estimate:
    """The largest needs of any block's worker; in a cascade blocks differ."""
    sizes = list(block_sizes(config))
    largest = max(sizes, key=lambda size: size.parameters)
    steps = config.train.steps
    indices = range(len(sizes))
    return Estimate(
        parameters=sum(size.parameters for size in sizes),
        parameters_per_block=largest.parameters,
        vocabulary_parameters=largest.vocabulary,
        end_to_end_parameters=sum(size.parameters for size in block_sizes(config.end_to_end())),
        fixed_bytes_per_worker=max(_fixed_bytes(config, sizes)),
        activation_bytes_per_worker=max(
            _activation_bytes(config, sizes[index], index) for index in indices
        ),
        logits_bytes=max(_logits_bytes(config, index) for index in indices),
        feature_cache_bytes=cache_bytes(config),
        frozen_bytes=FROZEN_BYTES[config.objective.frozen]
        * max(
            sum(_trunks_before(config, sizes, index) + _blocks_after(config, sizes, index))
            for index in indices
        ),
        flops_per_step=max(flops_per_step(config, index) for index in indices),
        total_flops=total_flops(config),
        end_to_end_steps=end_to_end_steps(config),
        wire_bytes_per_round=_wire_bytes(config, largest.parameters),
        steps=steps,
        tokens_per_block=steps * config.train.batch * config.model.window,
        bytes_per_block=steps * config.bytes_per_step,
    )


def memory_by_block(config: Config, activations: float = 1.0) -> list[int]:
    """Memory of a worker that trains a block, by block; in a cascade blocks differ. `activations`:
    a factor of the memory for activations."""
    sizes = list(block_sizes(config))
    return [
        fixed + int(activations * _activation_bytes(config, size, index))
        for index, (size, fixed) in enumerate(zip(sizes, _fixed_bytes(config, sizes), strict=True))
    ]


def update_bytes(config: Config) -> list[int]:
    """Memory of a worker for a downloaded version and, with a codec, for an update while it is
    encoded, by block."""
    copies = 1 if config.swarm.codec == "none" else 3
    return [copies * FP32_BYTES * size.parameters for size in block_sizes(config)]


def serving_bytes(config: Config, blocks: Sequence[int], element: int, weights: str) -> int:
    """Memory to serve blocks to one request of a whole window: weights, and keys and values.
    `element`: bytes per number; `weights` int8 stores the layers' matrices in 8 bits."""
    model, sizes = config.model, list(block_sizes(config))
    matrix = 1 if weights == "int8" else element
    total = 0
    for size in (sizes[index] for index in blocks):
        total += matrix * size.matrices + element * (size.parameters - size.matrices)
        cached = 2 * model.key_heads * model.head_width * model.window
        total += element * cached * (size.layers + size.tail)
    return total


def training_flops(run: RunDir) -> float | None:
    """FLOPs of the training of all blocks so far; None if they were trained elsewhere."""
    if run.exported:
        return None
    steps = [run.block(index).current().step for index in range(run.config.block_count)]
    return total_flops(run.config, steps)


def cache_bytes(config: Config) -> int:
    """Size of one worker's feature cache."""
    reads = config.kind.reads_predecessors and config.block_count > 1
    if not reads or config.objective.feature_cache == "off":
        return 0
    return FEATURE_BYTES * math.prod(feature_cache_shape(config))


def feature_cache_shape(config: Config) -> tuple[int, int, int, int]:
    """The number of steps between refreshes, then the shape of one step's features."""
    steps = min(config.objective.refresh_every, config.train.steps)
    return steps, config.train.batch, config.model.window, config.model.width


def _wire_bytes(config: Config, numbers: int) -> int:
    """Bytes of one update sent and one delta received; a version merges `swarm.quorum` updates."""
    swarm = config.swarm
    codecs = (update_codec(swarm), delta_codec(swarm, swarm.quorum))
    return sum(
        largest_encoded_size(codec, numbers) if codec else FP32_BYTES * numbers for codec in codecs
    )


def _fixed_bytes(config: Config, sizes: list[BlockSize]) -> list[int]:
    """Weights, gradients and moments of each block, weights of the frozen blocks it trains with,
    and the target table."""
    table = config.vocabulary.size * config.objective.target_dim if config.kind.denoises else 0
    by_muon = config.train.optimizer == "muon"  # keeps one moment of a matrix; AdamW keeps two
    own = [4 * size.parameters - (size.matrices if by_muon else 0) + table for size in sizes]
    frozen = [_frozen_parameters(config, sizes, index) for index in range(len(sizes))]
    each = FROZEN_BYTES[config.objective.frozen]
    return [FP32_BYTES * mine + each * theirs for mine, theirs in zip(own, frozen, strict=True)]


def _frozen_parameters(config: Config, sizes: list[BlockSize], index: int) -> int:
    """Parameters of the frozen blocks that are in memory. A feature cache replaces the blocks
    before the trained one. From disk, one block at a time is read."""
    before = _trunks_before(config, sizes, index)
    after = _blocks_after(config, sizes, index)
    if config.train.frozen_in == "disk":
        return max([*before, *after], default=0)
    return sum(after) + (0 if config.objective.feature_cache != "off" else sum(before))


def _trunks_before(config: Config, sizes: list[BlockSize], index: int) -> list[int]:
    """Parameters of each frozen block before a block."""
    return [sizes[other].trunk for other in config.frozen_blocks(index) if other < index]


def _blocks_after(config: Config, sizes: list[BlockSize], index: int) -> list[int]:
    """Parameters of each frozen block after a block."""
    return [sizes[other].parameters for other in config.frozen_blocks(index) if other > index]


def _activation_bytes(config: Config, size: BlockSize, index: int) -> int:
    """Activations for the backward pass, logits, and a bf16 copy of the weights.

    If layers are recomputed, only their inputs are kept, and one layer at a time in full. A second
    stream has no keys and values of its own and adds about half of a layer.
    """
    element = _element_bytes(config)
    streams = stream_layers(config, size.layers + size.tail)
    if config.kind.reads_successors:  # the gradient passes through the layers after it
        after = config.depths[index + 1 :]
        # Blocks on disk are recomputed, one at a time.
        streams += max(after, default=0) if config.train.frozen_in == "disk" else sum(after)
    per_layer = size.layer.activations
    numbers = float(streams * per_layer)
    if config.train.checkpoint_layers:
        at_once = 1.5 if config.kind.streams > 1 else 1.0
        numbers = streams * config.model.width + at_once * per_layer
    weights_in_bf16 = 2 * size.parameters if element == 2 else 0
    activations = int(_positions_at_once(config) * numbers * element)
    return activations + weights_in_bf16 + _logits_bytes(config, index)


def _logits_bytes(config: Config, index: int) -> int:
    """Logits and their gradient at all positions. With a large vocabulary they are computed in
    chunks, and the head's gradient takes memory too before it is added to the other gradients."""
    tokens, positions = config.vocabulary.size, _positions_at_once(config)
    if not (config.has_head(index) or config.kind.reads_successors):
        return 0
    if not needs_chunks(tokens):
        return 4 * tokens * positions * FP32_BYTES
    element = _element_bytes(config)
    chunk = CHUNK_LOGITS["cpu" if config.train.device == "cpu" else "cuda"]
    in_chunk = (LOGITS_IN_CHUNK * FP32_BYTES + element) * min(chunk, tokens * positions)
    head = 0 if config.kind.denoises else tokens * config.model.width  # the table is frozen
    return in_chunk + (FP32_BYTES + element) * head


def _element_bytes(config: Config) -> int:
    return FP32_BYTES if config.train.precision == "fp32" else 2


def _positions_at_once(config: Config) -> int:
    return config.train.batch // config.train.accumulate * config.model.window
