"""What a block learns by: the next token as the target, through a loss of its own.

An objective turns a batch of target tokens into a loss for one block. Its randomness (noise
levels, noise, hidden context) comes from a seed per step, so that a step can be repeated
anywhere. Knows nothing of optimizers, files or clocks.
"""

from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktrain.config import Config
from blocktrain.data.corpus import Bytes
from blocktrain.data.windows import Ids, shifted
from blocktrain.model.block import run_targets
from blocktrain.model.denoising import NoiseLevel
from blocktrain.numerics.noise import mean_weight, precondition
from blocktrain.vocabulary import Vocabulary

WRONG_RATE = 0.3  # share of wrong tokens after the cut, in a sequence with a corrupted context


class Loss(NamedTuple):
    value: Tensor  # what is minimised
    ce: Tensor  # the unweighted cross entropy beside it; for denoising it sees the noisy target


class Batch(NamedTuple):
    """A step's inputs, drawn on the host: all a loss needs beyond torch's own generator."""

    targets_BT: Tensor
    inputs: (
        Tensor  # what the block reads: ids (B x T), or features of the blocks before (B x T x D)
    )
    levels_BC: Tensor  # EDM coefficients; no columns where the objective has no noise

    def to(self, device: torch.device) -> "Batch":
        if device.type != "cuda":
            return Batch(*(part.to(device) for part in self))
        return Batch(*(part.pin_memory().to(device, non_blocking=True) for part in self))

    def rows(self, start: int, end: int) -> "Batch":
        return Batch(*(part[start:end] for part in self))


class Objective(Protocol):
    def prepare(self, targets: Bytes, seed: int) -> Batch:
        """Draw a step's inputs on the host."""
        ...

    def loss(self, module: nn.Module, batch: Batch) -> Loss:
        """Only work on the device, nothing that waits for the host: a CUDA graph can contain it."""
        ...


class NextByte:
    """The plain cross entropy, for end-to-end training and every block of a cascade."""

    def __init__(self, config: Config) -> None:
        self.vocabulary = config.vocabulary

    def prepare(self, targets: Bytes, seed: int) -> Batch:
        context = shifted(targets, self.vocabulary)
        return Batch(torch.tensor(targets), torch.tensor(context), torch.empty(0))

    def loss(self, module: nn.Module, batch: Batch) -> Loss:
        logits = module(batch.inputs)
        ce = F.cross_entropy(logits.flatten(0, 1), batch.targets_BT.long().flatten())
        return Loss(ce, ce.detach())


class Denoise:
    """The cross entropy of a noisy target at random noise levels of the block's range."""

    def __init__(self, config: Config, block: int, device: torch.device) -> None:
        self.block = block
        self.settings = config.objective
        self.partition = config.partition()
        self.vocabulary = config.vocabulary
        self.table = run_targets(config, device)
        self.mean_weight = mean_weight(self.partition, block, self.settings.sigma_data)

    def prepare(self, targets: Bytes, seed: int) -> Batch:
        draws = np.random.Generator(np.random.Philox(seed))
        sigmas = self.partition.sample(self.block, draws.random(len(targets)).tolist())
        context = shifted(targets, self.vocabulary)
        context = hide_context(context, draws, self.settings.hidden_share, self.vocabulary)
        return self.batch_at(targets, context, sigmas)

    def batch_at(self, targets: Bytes, context: Ids, sigmas: list[float]) -> Batch:
        levels = [precondition(sigma, self.settings.sigma_data) for sigma in sigmas]
        return Batch(torch.tensor(targets), torch.tensor(context), torch.tensor(levels))

    def loss(self, module: nn.Module, batch: Batch) -> Loss:
        level = NoiseLevel.of(batch.levels_BC)
        y_BT = batch.targets_BT.long()
        e_BTE = self.table[y_BT]
        z_BTE = e_BTE + level.sigma_B11 * torch.randn_like(e_BTE)
        logits = module(batch.inputs, z_BTE, level, self.table)
        ce_BT = F.cross_entropy(logits.flatten(0, 1), y_BT.flatten(), reduction="none")
        ce_B = ce_BT.view(y_BT.shape).mean(dim=1)
        weighted = (ce_B * level.weight_B).mean() / self.mean_weight
        return Loss(weighted, ce_B.detach().mean())


def new_objective(config: Config, block: int, device: torch.device) -> Objective:
    if config.kind.denoises:
        return Denoise(config, block, device)
    return NextByte(config)


def hide_context(
    context: Ids, draws: np.random.Generator, share: float, vocabulary: Vocabulary
) -> Ids:
    """In a share of the sequences, replace the context after a random cut: by masks in half of
    them, by tokens of which some are wrong in the others."""
    if share == 0.0:
        return context
    count, length = context.shape
    chosen = draws.random((count, 1)) < share
    cuts = draws.integers(1, length, (count, 1))
    after = chosen & (np.arange(length) >= cuts)
    masked = draws.random((count, 1)) < 0.5
    wrong = draws.random(context.shape) < WRONG_RATE
    noise = draws.integers(0, vocabulary.size, context.shape)
    hidden = np.where(after & masked, vocabulary.mask, context)
    return np.where(after & ~masked & wrong, noise, hidden).astype(context.dtype)
