"""The assembled model: blocks in inference order, run on whole windows.

A stack computes one distribution per block; a readout (`final` or `product`) combines them into
one. What flows from block to block is features in a cascade, and a noisy guess z between denoising
blocks. An end-to-end model is a cascade of one block. Generation, with a cache, is in `serve`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktrain.config import Config
from blocktrain.errors import ConfigError
from blocktrain.model.block import CausalBlock, LogitsAt, run_targets
from blocktrain.model.denoising import BlockContext, DenoisingBlock, Modulation, NoiseLevel
from blocktrain.model.linear import chunks
from blocktrain.numerics.noise import euler_step, precondition
from blocktrain.numerics.sampling import mixed_seed

INIT_STREAM = 1
READOUTS = ("final", "product")
NEWTON_STEPS, NEWTON_TOLERANCE = 20, 1e-8


def new_block(config: Config, index: int) -> CausalBlock | DenoisingBlock:
    """An untrained block of the run, randomly initialised."""
    return DenoisingBlock(config, index) if config.kind.denoises else CausalBlock(config, index)


def initial_block(config: Config, index: int) -> CausalBlock | DenoisingBlock:
    """The untrained block that every machine of a run starts from."""
    torch.manual_seed(mixed_seed(config.train.seed, index, INIT_STREAM))
    return new_block(config, index)


def assemble(config: Config, blocks: Sequence[nn.Module]) -> "Stack":
    """The model that these blocks form, in eval mode."""
    for block in blocks:
        block.eval()
    return as_stack(config, blocks)


def as_stack(config: Config, blocks: Sequence[nn.Module]) -> "Stack":
    """The model that these blocks form, each in its own mode."""
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
        """The model of the first `count` blocks only (early exit). None: all blocks."""
        if count is not None and count > len(self.blocks):
            raise ConfigError(
                f"cannot exit after {count} blocks: the model has only {len(self.blocks)};"
                f" use --blocks {len(self.blocks)} or less"
            )
        if count is not None and not self.config.has_head(count - 1):
            raise ConfigError(
                "cannot exit early: only the last block of this model predicts; leave out --blocks"
            )
        return replace(self, blocks=self.blocks[:count])

    @abstractmethod
    def predictions(self, ids_BT: Tensor, start: str = "mean", seed: int = 0) -> list[LogitsAt]:
        """Every block's logits of the next token, in block order."""

    @torch.no_grad()
    def log_probs(self, ids_BT: Tensor, start: str = "mean", seed: int = 0) -> list[Tensor]:
        """Every block's log-probabilities of the next token at every position, in block order."""
        predictions = self.predictions(ids_BT, start, seed)
        return [torch.log_softmax(logits(slice(None)), dim=-1) for logits in predictions]


@dataclass
class CausalStack(Stack):
    """Features flow from block to block; every block predicts through its own tail and head."""

    def predictions(self, ids_BT: Tensor, start: str = "mean", seed: int = 0) -> list[LogitsAt]:
        result = []
        x = ids_BT
        for block in cast("list[CausalBlock]", self.blocks):
            x = block.features(x)
            if block.norm is not None:  # only blocks with a head predict
                result.append(block.logits_of(x))
        return result


def starting_point(
    config: Config, start: str, shape_BT: Sequence[int], seed: int, device: torch.device
) -> Tensor:
    """z for the first block: zeros ("mean"), or noise drawn from a seed ("noise")."""
    shape = (*shape_BT, config.objective.target_dim)
    if start == "mean":
        return torch.zeros(shape, device=device)
    draws = torch.Generator(device).manual_seed(seed)
    return config.objective.sigma_max * torch.randn(shape, generator=draws, device=device)


@dataclass(frozen=True)
class Descent:
    """A denoising block's step of a traversal: it reads z at one sigma and moves it to the next."""

    block: DenoisingBlock
    table_VE: Tensor
    level: NoiseLevel
    modulations: list[Modulation]
    sigma: float
    sigma_next: float

    @classmethod
    def of(cls, config: Config, index: int, block: DenoisingBlock, table_VE: Tensor) -> Self:
        partition = config.partition()
        sigma, sigma_next = partition.inference_sigmas()[index]
        assert partition.block_of(sigma) == index
        level = precondition(sigma, config.objective.sigma_data)
        constant = NoiseLevel.constant(level, 1, table_VE.device)  # broadcasts over sequences
        modulations = block.modulations(constant)
        return cls(block, table_VE, constant, modulations, sigma, sigma_next)

    def __call__(self, context: BlockContext, z_BTE: Tensor) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities of the next token, and z for the next block."""
        logits = self.block.logits(self.answer(context, z_BTE), self.level, self.table_VE)
        log_probs = torch.log_softmax(logits, dim=-1)
        return log_probs, self.moved(z_BTE, log_probs.exp() @ self.table_VE)

    def answer(self, context: BlockContext, z_BTE: Tensor) -> Tensor:
        return self.block.denoise(context, z_BTE, self.level, self.table_VE, self.modulations)

    def moved(self, z_BTE: Tensor, guess_BTE: Tensor) -> Tensor:
        return euler_step(z_BTE, guess_BTE, self.sigma, self.sigma_next)


@dataclass
class DenoisingStack(Stack):
    """A guess z passes from block to block; each moves it down to the next sigma."""

    table_VE: Tensor

    def starting_point(self, start: str, shape_BT: torch.Size, seed: int = 0) -> Tensor:
        return starting_point(self.config, start, shape_BT, seed, self.device)

    def predictions(self, ids_BT: Tensor, start: str = "mean", seed: int = 0) -> list[LogitsAt]:
        z_BTE = self.starting_point(start, ids_BT.shape, seed)
        return self.traverse(self.read_contexts(ids_BT), z_BTE)

    def read_contexts(self, ids_BT: Tensor) -> list[BlockContext]:
        """Run every block's clean stream; traversals from several starts can share the result."""
        return [block.read_context(ids_BT) for block in self._typed()]

    def traverse(self, contexts: list[BlockContext], z_BTE: Tensor) -> list[LogitsAt]:
        """One traversal: each block reads z once, guesses, and moves z down to the next sigma."""
        result: list[LogitsAt] = []
        for index, block in enumerate(self._typed()):
            descent = Descent.of(self.config, index, block, self.table_VE)
            answer_BTE = descent.answer(contexts[index], z_BTE)
            result.append(block.logits_of(answer_BTE, descent.level, self.table_VE))
            if index + 1 < len(self.blocks):
                z_BTE = descent.moved(z_BTE, self._guess(result[-1], z_BTE))
        return result

    def _guess(self, logits: LogitsAt, z_BTE: Tensor) -> Tensor:
        guess_BTE = torch.empty_like(z_BTE)
        batch, positions, _ = z_BTE.shape
        for at in chunks(positions, batch * len(self.table_VE), self.device):
            probabilities = torch.log_softmax(logits(at), dim=-1).exp()
            guess_BTE[:, at] = probabilities @ self.table_VE
        return guess_BTE

    def _typed(self) -> list[DenoisingBlock]:
        return cast("list[DenoisingBlock]", self.blocks)


def read_out(readout: str, log_probs: Sequence[Tensor]) -> Tensor:
    """Combine the blocks' log-probabilities: take the last block's (`final`), or the `product`.
    Both are normalised, so their mean negative log-likelihood is a true cross entropy."""
    return log_probs[-1] if readout == "final" else product(log_probs)


def product(log_probs: Sequence[Tensor], weights: Sequence[float] | None = None) -> Tensor:
    """The (weighted) geometric mean of the blocks' distributions, renormalised."""
    if weights is None:
        weights = [1.0 / len(log_probs)] * len(log_probs)
    total = torch.zeros_like(log_probs[0])
    for weight, block_log_probs in zip(weights, log_probs, strict=True):
        total = total + weight * block_log_probs
    return torch.log_softmax(total, dim=-1)


Parts = Callable[[], Iterable[tuple[Tensor, Tensor]]]


@torch.no_grad()
def fit_weights(blocks: int, parts: Parts) -> list[float]:
    """Product weights that minimise the cross entropy of the targets, by Newton's method. They need
    not sum to 1: a larger sum sharpens the distribution.

    `parts` is called for every set of weights that is tried. Each call reads the whole text in
    parts: log-probabilities of all blocks (blocks x N x V), and the targets (N).
    """
    weights = torch.full((blocks,), 1.0 / blocks, dtype=torch.float64)
    loss, slope, curvature = _fit(weights, parts())
    for _ in range(NEWTON_STEPS):
        step = torch.linalg.pinv(curvature, hermitian=True) @ slope
        is_last = float(slope @ step) < NEWTON_TOLERANCE
        while not is_last and (fit := _fit(weights - step, parts()))[0] > loss:
            step = step / 2
        weights = weights - step
        if is_last:
            break
        loss, slope, curvature = fit
    return [float(weight) for weight in weights]


def _fit(weights: Tensor, parts: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, Tensor, Tensor]:
    """The cross entropy of the weighted product, and its gradient and Hessian by the weights."""
    blocks = len(weights)
    loss, positions = 0.0, 0
    slope, curvature = weights.new_zeros(blocks), weights.new_zeros(blocks, blocks)
    for blocks_CNV, targets_N in parts:
        used = weights.to(blocks_CNV)
        logits_NV = torch.einsum("c,cnv->nv", used, blocks_CNV)
        loss += float(F.cross_entropy(logits_NV, targets_N, reduction="sum"))
        positions += len(targets_N)
        weighted_CNV = blocks_CNV * torch.softmax(logits_NV, dim=-1)
        mean_CN = weighted_CNV.sum(dim=-1)
        target_CN = blocks_CNV[:, torch.arange(len(targets_N)), targets_N]
        slope += (mean_CN - target_CN).sum(dim=1).to(slope)
        square = torch.einsum("cnv,dnv->cd", weighted_CNV, blocks_CNV) - mean_CN @ mean_CN.T
        curvature += square.to(curvature)
    return loss / positions, slope / positions, curvature / positions
