"""The frozen blocks that a block trains with: it reads the features of those before it, and its
gradient passes through those after it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from blocktrain.config import Config
from blocktrain.model.block import CausalBlock, LogitsAt, Trunk
from blocktrain.model.linear import Int8Linear, in_8_bits
from blocktrain.model.stack import initial_block
from blocktrain.storage.tensor_file import Array
from blocktrain.training.device import Compute

Weights = Mapping[str, Tensor | Array]


class Published(Protocol):
    """A source of the newest version of every block."""

    def version(self, block: int) -> int | None:
        """The step of the newest version; None if the block is still untrained."""
        ...

    def weights(self, block: int) -> Weights: ...


class FrozenBlocks(nn.Module):
    """Consecutive blocks without gradients of their own; untrained until `refresh` is called."""

    def __init__(self, config: Config, indices: Sequence[int], compute: Compute) -> None:
        super().__init__()
        self.indices = indices
        self.trunks = nn.ModuleList(_initial_trunk(config, block, compute) for block in indices)
        self.versions: list[int | None] = [None] * len(indices)

    def refresh(self, published: Published) -> None:
        """Load the weights of blocks that have a newer version."""
        for place, block in enumerate(self.indices):
            version = published.version(block)
            if version != self.versions[place]:
                take_weights(cast("Trunk", self.trunks[place]), published.weights(block))
                self.versions[place] = version


class Prefix(FrozenBlocks):
    """The trunks of blocks 0 to count - 1, whose features a block reads."""

    def __init__(self, config: Config, count: int, compute: Compute) -> None:
        super().__init__(config, range(count), compute)
        self._compute, self._compiles = compute, config.train.compile

    def forward(self, context_BT: Tensor) -> Tensor:
        x = context_BT
        for trunk in self.trunks:
            x = cast("Trunk", trunk).features(x)
        return x

    @torch.no_grad()
    def features(self, context_BT: Tensor) -> Tensor:
        forward = self._compute.compiled(self) if self._compiles else self
        features: Tensor = forward(context_BT)
        return features


class Suffix(FrozenBlocks):
    """The blocks after a block, through which it predicts. Gradients pass to their input."""

    def __init__(self, config: Config, block: int, compute: Compute) -> None:
        super().__init__(config, range(block + 1, config.block_count), compute)

    def forward(self, features_BTD: Tensor, *targets: Tensor) -> Tensor:
        """Logits or, with targets, their cross entropy, as of a `CausalBlock`."""
        last, x = self._run(features_BTD)
        out: Tensor = last(x, *targets)
        return out

    def logits_of(self, features_BTD: Tensor) -> LogitsAt:
        last, x = self._run(features_BTD)
        return last.logits_of(last.features(x))

    def _run(self, x: Tensor) -> tuple[CausalBlock, Tensor]:
        """The last block, and the features of the blocks before it."""
        *between, last = self.trunks
        for trunk in between:
            x = cast("Trunk", trunk).features(x)
        return cast("CausalBlock", last), x


class Inside(nn.Module):
    """A block inside the complete model: it predicts through the frozen blocks after it."""

    def __init__(self, block: Trunk, suffix: Callable[..., Tensor]) -> None:
        super().__init__()
        self.block, self.suffix = block, suffix

    def forward(self, inputs: Tensor, *targets: Tensor) -> Tensor:
        out: Tensor = self.suffix(self.block.features(inputs), *targets)
        return out


def suffix_of(config: Config, block: int, compute: Compute) -> Suffix | None:
    """The frozen blocks after a block, if it is trained inside the complete model."""
    return Suffix(config, block, compute) if has_successors(config, block) else None


def has_successors(config: Config, block: int) -> bool:
    return any(frozen > block for frozen in config.frozen_blocks(block))


def _initial_trunk(config: Config, block: int, compute: Compute) -> Trunk:
    start = initial_block(config, block)
    trunk = _new_trunk(config, block, compute)
    take_weights(trunk, dict(start.named_parameters()))
    return in_bf16(trunk).to(compute.device)


def in_bf16(trunk: Trunk) -> Trunk:
    """Round the parameters, but not the buffers: scales and rotary tables stay exact."""
    for parameter in trunk.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return trunk


def empty_trunk(config: Config, block: int, compute: Compute) -> Trunk:
    """A frozen block without memory for its weights, but with its rotary tables."""
    with torch.device("meta"):
        trunk = _new_trunk(config, block, compute)
    for name, table in list(trunk.named_buffers(recurse=False)):
        trunk.register_buffer(name, table.to(compute.device), persistent=False)
    return trunk


def _new_trunk(config: Config, block: int, compute: Compute) -> Trunk:
    predicts = config.kind.reads_successors and config.has_head(block)
    trunk = CausalBlock(config, block) if predicts else Trunk(config, block)
    if config.objective.frozen == "int8":
        in_8_bits(trunk.layers)
    trunk.compute_dtype, trunk.recompute = compute.dtype, config.train.checkpoint_layers
    return trunk.requires_grad_(False).eval()


@torch.no_grad()
def take_weights(trunk: Trunk, weights: Weights) -> None:
    """Copy a block's weights to its frozen copy, in the copy's dtype. The copy may lack the tail
    and the head."""
    for name, parameter in trunk.named_parameters():
        parameter.copy_(torch.as_tensor(weights[name]))
    for name, module in trunk.named_modules():
        if isinstance(module, Int8Linear):
            module.take(torch.as_tensor(weights[f"{name}.weight"]))
