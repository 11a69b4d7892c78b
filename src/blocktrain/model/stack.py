"""The assembled model: blocks in inference order, scored on whole windows.

A stack turns context into one distribution per block; `model.readout` makes one of them. Blocks
are joined in one of two ways: features flow from block to block (a cascade; end-to-end is a
cascade of one), or a noisy guess z does (denoising). Generation, with a cache, is in `serve`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, cast

import torch
from torch import Tensor, nn

from blocktrain.config import Config
from blocktrain.errors import ConfigError
from blocktrain.model.block import run_targets
from blocktrain.model.causal import CausalBlock
from blocktrain.model.denoising import BlockContext, DenoisingBlock, Modulation, NoiseLevel
from blocktrain.numerics.noise import euler_step, precondition
from blocktrain.numerics.sampling import mixed_seed

INIT_STREAM = 1


def new_block(config: Config, index: int) -> CausalBlock | DenoisingBlock:
    """An untrained block of the run, randomly initialised."""
    return DenoisingBlock(config, index) if config.kind.denoises else CausalBlock(config, index)


def initial_block(config: Config, index: int) -> CausalBlock | DenoisingBlock:
    """The untrained block that every machine of a run starts from."""
    torch.manual_seed(mixed_seed(config.train.seed, index, INIT_STREAM))
    return new_block(config, index)


def assemble(config: Config, blocks: Sequence[nn.Module]) -> "Stack":
    for block in blocks:
        block.eval()
    if config.kind.denoises:
        device = next(blocks[0].parameters()).device
        return DenoisingStack(config, list(blocks), run_targets(config, device))
    return CausalStack(config, list(blocks))


@dataclass
class Stack(ABC):
    config: Config
    blocks: list[nn.Module]

    @property
    def device(self) -> torch.device:
        return next(self.blocks[0].parameters()).device

    @property
    def parameters(self) -> int:
        return sum(p.numel() for block in self.blocks for p in block.parameters())

    def first(self, count: int | None) -> Self:
        """An early exit: the model that the first `count` blocks make. None: all blocks."""
        if count is not None and count > len(self.blocks):
            raise ConfigError(
                f"the model has {len(self.blocks)} blocks; it cannot exit after {count}"
            )
        return replace(self, blocks=self.blocks[:count])

    @abstractmethod
    def log_probs(self, ids_BT: Tensor, start: str = "mean", seed: int = 0) -> list[Tensor]:
        """Every block's log-probabilities of the next token at every position, in block order."""


@dataclass
class CausalStack(Stack):
    """Features flow from block to block; every block predicts through its own tail and head."""

    @torch.no_grad()
    def log_probs(self, ids_BT: Tensor, start: str = "mean", seed: int = 0) -> list[Tensor]:
        result = []
        x = ids_BT
        for block in cast("list[CausalBlock]", self.blocks):
            x = block.features(x)
            result.append(torch.log_softmax(block.logits(x), dim=-1))
        return result


def starting_point(
    config: Config, start: str, shape_BT: Sequence[int], seed: int, device: torch.device
) -> Tensor:
    """z before the first block: zeros ("mean"), or noise from a seed."""
    shape = (*shape_BT, config.objective.target_dim)
    if start == "mean":
        return torch.zeros(shape, device=device)
    draws = torch.Generator(device).manual_seed(seed)
    return config.objective.sigma_max * torch.randn(shape, generator=draws, device=device)


@dataclass(frozen=True)
class Descent:
    """A denoising block's part in a traversal: it reads z at one sigma and moves it to the next."""

    block: DenoisingBlock
    table_VE: Tensor
    level: NoiseLevel
    modulations: list[Modulation]
    sigma: float
    sigma_next: float

    @classmethod
    @torch.no_grad()
    def of(cls, config: Config, index: int, block: DenoisingBlock, table_VE: Tensor) -> Self:
        partition = config.partition()
        sigma, sigma_next = partition.inference_sigmas()[index]
        assert partition.block_of(sigma) == index
        level = precondition(sigma, config.objective.sigma_data)
        constant = NoiseLevel.constant(level, 1, table_VE.device)  # broadcasts over sequences
        modulations = block.modulations(constant)
        return cls(block, table_VE, constant, modulations, sigma, sigma_next)

    def __call__(self, context: BlockContext, z_BTE: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the next token, and z as the next block reads it."""
        logits = self.block.denoise(context, z_BTE, self.level, self.table_VE, self.modulations)
        log_probs = torch.log_softmax(logits, dim=-1)
        guess_BTE = log_probs.exp() @ self.table_VE
        return log_probs, euler_step(z_BTE, guess_BTE, self.sigma, self.sigma_next)


@dataclass
class DenoisingStack(Stack):
    """A guess z is handed from block to block, each moving it down to the next sigma."""

    table_VE: Tensor

    def starting_point(self, start: str, shape_BT: torch.Size, seed: int = 0) -> Tensor:
        return starting_point(self.config, start, shape_BT, seed, self.device)

    def read_contexts(self, ids_BT: Tensor) -> list[BlockContext]:
        """Every block's clean stream, which several starts can share."""
        return [block.read_context(ids_BT) for block in self._typed()]

    @torch.no_grad()
    def log_probs(self, ids_BT: Tensor, start: str = "mean", seed: int = 0) -> list[Tensor]:
        contexts = self.read_contexts(ids_BT)
        return self.traverse(contexts, self.starting_point(start, ids_BT.shape, seed))

    @torch.no_grad()
    def traverse(self, contexts: list[BlockContext], z_BTE: Tensor) -> list[Tensor]:
        """One traversal: each block reads z once, guesses, and moves z down to the next sigma."""
        result = []
        for index, block in enumerate(self._typed()):
            descent = Descent.of(self.config, index, block, self.table_VE)
            log_probs, z_BTE = descent(contexts[index], z_BTE)
            result.append(log_probs)
        return result

    def _typed(self) -> list[DenoisingBlock]:
        return cast("list[DenoisingBlock]", self.blocks)
