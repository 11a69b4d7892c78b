"""One block as a stage runs it: cached positions in, state and log-probabilities out.

The two kinds of block differ in what travels between them, and in nothing else that a stage would
have to know.

Shapes: B rows, Q positions, N = B x Q, R positions read, D width, E target dimensions, V bytes.
"""

from typing import Protocol, cast

import torch
from torch import Tensor, nn

from blocktrain.config import Config
from blocktrain.errors import ProtocolError
from blocktrain.model.causal import CausalBlock
from blocktrain.model.denoising import DenoisingBlock
from blocktrain.model.kv_cache import BlockMemory
from blocktrain.model.stack import Descent
from blocktrain.model.targets import target_table


class Unit(Protocol):
    def advance(
        self,
        ids_BQ: Tensor,
        state_BQW: Tensor,
        memory: BlockMemory,
        read_R: Tensor | None,
        *,
        head: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The next block's state, and the log-probabilities (R x V) of the positions that `read_R`
        names among the B x Q (None: of all); without `head` they are left out."""
        ...

    def read(self, ids_BQ: Tensor, memory: BlockMemory) -> None:
        """Take in context that nothing is predicted from; needs no state."""
        ...


def new_unit(config: Config, unit: int, block: nn.Module, device: torch.device) -> Unit:
    if config.objective.kind == "denoise":
        table = target_table(config.train.seed, config.objective.target_dim).to(device)
        typed = cast("DenoisingBlock", block)
        return DenoisingUnit(Descent.of(config, unit, typed, table))
    return CausalUnit(cast("CausalBlock", block))


def shape(config: Config, unit: int) -> tuple[int, int]:
    """A unit's layers and private layers."""
    return config.depths[unit], config.tail_layers(unit)


def state_width(config: Config) -> int:
    denoises = config.objective.kind == "denoise"
    return config.objective.target_dim if denoises else config.model.width


class CausalUnit:
    """Features of every position flow from block to block."""

    def __init__(self, block: CausalBlock) -> None:
        self.block = block

    def advance(
        self,
        ids_BQ: Tensor,
        state_BQW: Tensor,
        memory: BlockMemory,
        read_R: Tensor | None,
        *,
        head: bool,
    ) -> tuple[Tensor, Tensor | None]:
        inputs = state_BQW if self.block.embed is None else ids_BQ
        features = self.block.features(inputs, memory)
        if not head:
            return features, None
        private = _chosen(self.block.private(features, memory), read_R)
        return features, torch.log_softmax(self.block.predict(private), dim=-1)

    def read(self, ids_BQ: Tensor, memory: BlockMemory) -> None:
        raise ProtocolError("a block of a cascade reads features, not bytes")


class DenoisingUnit:
    """A guess z flows from block to block; each reads the context by itself."""

    def __init__(self, descent: Descent) -> None:
        self.descent = descent

    def advance(
        self,
        ids_BQ: Tensor,
        state_BQW: Tensor,
        memory: BlockMemory,
        read_R: Tensor | None,
        *,
        head: bool,
    ) -> tuple[Tensor, Tensor | None]:
        context = self.descent.block.read_context(ids_BQ, memory)
        log_probs, z = self.descent(context, state_BQW)
        return z, _chosen(log_probs, read_R) if head else None

    def read(self, ids_BQ: Tensor, memory: BlockMemory) -> None:
        self.descent.block.read_context(ids_BQ, memory)


def _chosen(values_BQX: Tensor, which_R: Tensor | None) -> Tensor:
    flat = values_BQX.reshape(-1, values_BQX.size(-1))
    return flat if which_R is None else flat[which_R]
