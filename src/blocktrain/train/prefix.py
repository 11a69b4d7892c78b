"""The blocks before this one, frozen: bytes in, features out, forward only.

Held in bf16 or int8 without gradients, optimizer state, tails or heads. They are snapshots: newer
versions are taken over when the trainer looks for them, and in between the block trains on
features that are some steps stale.
"""

from collections.abc import Mapping
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from blocktrain.config import Config
from blocktrain.model.causal import Trunk
from blocktrain.model.int8 import Int8Linear, in_8_bits
from blocktrain.model.stack import initial_block
from blocktrain.train.device import Compute


class Published(Protocol):
    """Where the newest version of every block is to be had."""

    def version(self, block: int) -> int | None:
        """The step it stands at; None where there is nothing but what the seed gives."""
        ...

    def weights(self, block: int) -> Mapping[str, Tensor]: ...


class Prefix(nn.Module):
    """Blocks 0 to count - 1; untrained until they are refreshed."""

    def __init__(self, config: Config, count: int, compute: Compute) -> None:
        super().__init__()
        self.trunks = nn.ModuleList(_frozen_trunk(config, unit, compute) for unit in range(count))
        self.versions: list[int | None] = [None] * count
        self._compute, self._compiles = compute, config.train.compile

    def refresh(self, published: Published) -> None:
        """Take over what is published, where it is another version than what is held."""
        for block, trunk in enumerate(self.trunks):
            version = published.version(block)
            if version != self.versions[block]:
                take_weights(cast("Trunk", trunk), published.weights(block))
                self.versions[block] = version

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


@torch.no_grad()
def take_weights(trunk: Trunk, weights: Mapping[str, Tensor]) -> None:
    """Copy what the trunk needs of a block's weights, in the number type it holds."""
    for name, parameter in trunk.named_parameters():
        parameter.copy_(weights[name])
    for name, module in trunk.named_modules():
        if isinstance(module, Int8Linear):
            module.take(weights[f"{name}.weight"])


def _frozen_trunk(config: Config, block: int, compute: Compute) -> Trunk:
    start = initial_block(config, block)
    trunk = Trunk(config.model, config.depths[block], reads_bytes=block == 0)
    if config.objective.frozen == "int8":
        in_8_bits(trunk)
    trunk.requires_grad_(False)
    take_weights(trunk, dict(start.named_parameters()))
    trunk.compute_dtype = compute.dtype
    trunk.eval()
    return _rounded(trunk).to(compute.device)


def _rounded(trunk: Trunk) -> Trunk:
    """Parameters to bf16; scales and rotary tables stay exact."""
    for parameter in trunk.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return trunk
