"""What training costs in arithmetic: FLOPs of steps and of whole runs.

The only source of these numbers. They follow from settings alone, so that the status of a run needs
no torch.
"""

from collections.abc import Sequence

from blocktrain.config.run_config import Config
from blocktrain.config.sizes import layer_size, needs_chunks

# FLOPs of a multiplication and addition with a weight that is trained (forward, and backward to
# the input and to the weight), frozen before the trained layers (forward only), or frozen after
# them (forward, and backward to the input).
TRAINED, FROZEN, PASSED_THROUGH = 6, 2, 4


def stream_layers(config: Config, layers: int) -> int:
    """How often a full layer runs in a block of this many layers: once per stream, but in the last
    layer for one stream only."""
    return config.kind.streams * (layers - 1) + 1


def flops_per_step(config: Config, block: int) -> int:
    """FLOPs of one optimizer step of this block, frozen layers included."""
    layer, layers = layer_size(config.model), config.depths[block] + config.tail_layers(block)
    own = stream_layers(config, layers) * (layer.parameters - layer.context + layer.attention)
    own += layers * layer.context
    frozen = config.frozen_blocks(block)
    before = sum(config.depths[index] for index in frozen if index < block)
    after = sum(config.depths[index] for index in frozen if index > block)
    per_position = (
        TRAINED * own
        + FROZEN * before * (layer.parameters + layer.attention)
        # The backward pass of attention has two factors whatever is trained.
        + after * (PASSED_THROUGH * layer.parameters + TRAINED * layer.attention)
        + _outside_layers(config, block)
    )
    return config.train.batch * config.model.window * per_position


def forward_flops(config: Config) -> float:
    """FLOPs of the assembled model per position, without training it: about those of the model
    trained end to end."""
    positions = config.train.batch * config.model.window
    return flops_per_step(config.end_to_end(), 0) * FROZEN / TRAINED / positions


def total_flops(config: Config, steps: Sequence[int] | None = None) -> int:
    """FLOPs of all workers together, of the whole run or after these numbers of steps by block."""
    steps = [config.train.steps] * config.block_count if steps is None else steps
    return sum(count * flops_per_step(config, block) for block, count in enumerate(steps))


def end_to_end_steps(config: Config) -> float:
    """How many steps of end-to-end training cost as much as the run. At equal steps per block, this
    divided by train.steps is the run's cost relative to end-to-end training."""
    return total_flops(config) / flops_per_step(config.end_to_end(), 0)


def _outside_layers(config: Config, block: int) -> int:
    """FLOPs per position outside the layers: the head; or the maps of z and F, and products with
    the target table, which is not trained."""
    tokens, width, target = config.vocabulary.size, config.model.width, config.objective.target_dim
    if not config.kind.denoises:
        own_head = config.has_head(block)
        later_head = not own_head and config.kind.reads_successors
        return tokens * width * (TRAINED * own_head + PASSED_THROUGH * later_head)
    if needs_chunks(tokens):
        return TRAINED * 2 * target * width + PASSED_THROUGH * tokens * target
    return TRAINED * (2 * tokens * width + 3 * tokens * target)
