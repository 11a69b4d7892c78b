"""The assembled model: blocks in inference order, scored or stepped as one.

A stack turns context into one distribution per block; `core.readout` makes one of them. An
end-to-end model is a stack of one causal block. Whole windows (`log_probs`) and cached steps
(`advance`) go through the same layers and agree.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from blocktrain.config import Config
from blocktrain.core.noise import Partition, euler_step, precondition
from blocktrain.model.block import (
    BlockContext,
    CausalBlock,
    DenoisingBlock,
    NoiseLevel,
)
from blocktrain.model.kv_cache import BlockCache
from blocktrain.model.targets import target_table


def new_block(config: Config) -> CausalBlock | DenoisingBlock:
    """One untrained unit of the run, randomly initialised."""
    if config.objective.kind == "end_to_end":
        return CausalBlock(config.model, config.unit_layers)
    return DenoisingBlock(config.model, config.unit_layers, config.objective)


@dataclass
class Stack:
    config: Config
    blocks: list[nn.Module]
    table_VE: Tensor
    partition: Partition

    @classmethod
    def assemble(cls, config: Config, blocks: list[nn.Module]) -> "Stack":
        for block in blocks:
            block.eval()
        device = next(blocks[0].parameters()).device
        table = target_table(config.train.seed, config.objective.target_dim).to(device)
        return cls(config, blocks, table, config.partition())

    @property
    def device(self) -> torch.device:
        return self.table_VE.device

    @property
    def parameters(self) -> int:
        return sum(p.numel() for block in self.blocks for p in block.parameters())

    def starting_point(self, start: str, shape_BT: torch.Size, seed: int = 0) -> Tensor:
        """z before the first block; it never depends on the targets."""
        shape = (*shape_BT, self.config.objective.target_dim)
        if start == "mean":
            return torch.zeros(shape, device=self.device)
        draws = torch.Generator(self.device).manual_seed(seed)
        noise = torch.randn(shape, generator=draws, device=self.device)
        return self.partition.sigma_max * noise

    def read_contexts(self, ids_BT: Tensor) -> list[BlockContext]:
        """Every denoising block's clean stream, to be reused for several starts."""
        return [block.read_context(ids_BT) for block in self._denoising()]

    @torch.no_grad()
    def log_probs(self, ids_BT: Tensor, start: str = "mean", seed: int = 0) -> list[Tensor]:
        """Every block's log-probabilities of the next byte at every position, in block order."""
        if self.config.objective.kind == "end_to_end":
            return [torch.log_softmax(self.blocks[0](ids_BT), dim=-1)]
        contexts = self.read_contexts(ids_BT)
        return self.traverse(contexts, self.starting_point(start, ids_BT.shape, seed))

    @torch.no_grad()
    def traverse(self, contexts: list[BlockContext], z_BTE: Tensor) -> list[Tensor]:
        """One traversal: each block reads z once, guesses, and moves z down to the next sigma."""
        result = []
        blocks = list(self._denoising())
        for sigma, sigma_next in self.partition.inference_sigmas():
            owner = self.partition.block_of(sigma)
            block, context = blocks[owner], contexts[owner]
            level = precondition(sigma, self.config.objective.sigma_data)
            noise_level = NoiseLevel.constant(level, z_BTE.size(0), self.device)
            logits = block.denoise(context, z_BTE, noise_level, self.table_VE)
            log_probs = torch.log_softmax(logits, dim=-1)
            result.append(log_probs)
            z_BTE = euler_step(z_BTE, log_probs.exp() @ self.table_VE, sigma, sigma_next)
        return result

    def new_caches(self) -> list[BlockCache]:
        return [block.new_cache() for block in self.blocks]  # type: ignore[operator]

    @torch.no_grad()
    def advance(
        self, ids_BT: Tensor, caches: list[BlockCache], z_BTE: Tensor | None = None
    ) -> list[Tensor]:
        """Append ids to the caches; every block's log-probabilities at the new positions.

        z starts from the mean where none is given.
        """
        if self.config.objective.kind == "end_to_end":
            return [torch.log_softmax(self.blocks[0](ids_BT, caches[0]), dim=-1)]
        contexts = [
            block.read_context(ids_BT, cache)
            for block, cache in zip(self._denoising(), caches, strict=True)
        ]
        if z_BTE is None:
            z_BTE = self.starting_point("mean", ids_BT.shape)
        return self.traverse(contexts, z_BTE)

    def _denoising(self) -> Iterator[DenoisingBlock]:
        for block in self.blocks:
            assert isinstance(block, DenoisingBlock)
            yield block
