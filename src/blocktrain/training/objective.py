"""The training objectives: every block learns to predict the next token, through its own loss.

An objective turns a batch of target tokens into a loss for one block. Its random numbers (noise
levels, noise, hidden context) come from one seed per step, so that any machine can repeat a step.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktrain.config import Config, Vocabulary
from blocktrain.config.sizes import needs_chunks
from blocktrain.data.corpus import Bytes, Ids, shifted
from blocktrain.data.tokenizer import MASKED_DTYPE, ids_of
from blocktrain.model.block import run_targets
from blocktrain.model.denoising import NoiseLevel
from blocktrain.numerics.noise import mean_weight, precondition

EPSILON = 1e-9  # avoids a division by zero in a batch without any answer
WRONG_RATE = 0.3  # share of wrong tokens after the cut, in a sequence with a corrupted context


class Loss(NamedTuple):
    value: Tensor  # to be minimised
    ce: Tensor  # the unweighted cross entropy; not honest for denoising, which reads the target


class Batch(NamedTuple):
    """A step's inputs, drawn on the host. A loss needs nothing else but torch's generator."""

    targets_BT: Tensor
    inputs: Tensor  # ids (B x T), or features of the blocks before (B x T x D)
    levels_BC: Tensor  # EDM coefficients; empty if the objective has no noise
    weights_BT: Tensor = torch.empty(0)  # of the positions' losses, 1 on average; empty: all 1

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
        """The loss of a block on a batch. It is computed on the device only, without waiting for
        the host, so that a CUDA graph can contain it."""
        ...


class NextToken:
    """The plain cross entropy, for end-to-end training and every block of a cascade."""

    def __init__(self, config: Config) -> None:
        self.vocabulary = config.vocabulary

    def prepare(self, targets: Bytes, seed: int) -> Batch:
        context = torch.tensor(shifted(targets, self.vocabulary))
        batch = Batch(torch.tensor(ids_of(targets)), context, torch.empty(0))
        if targets.dtype != MASKED_DTYPE:
            return batch
        counts = targets >= 0
        return batch._replace(weights_BT=torch.tensor(counts / max(counts.mean(), EPSILON)).float())

    def loss(self, module: nn.Module, batch: Batch) -> Loss:
        y_BT = batch.targets_BT.long()
        if batch.weights_BT.numel():
            ce = self._weighted(module, batch, y_BT)
        elif needs_chunks(self.vocabulary.size):
            ce = module(batch.inputs, y_BT)
        else:
            ce = F.cross_entropy(module(batch.inputs).flatten(0, 1), y_BT.flatten())
        return Loss(ce, ce.detach())

    def _weighted(self, module: nn.Module, batch: Batch, y_BT: Tensor) -> Tensor:
        shares_BT = batch.weights_BT / batch.weights_BT.numel()
        if needs_chunks(self.vocabulary.size):
            ce: Tensor = module(batch.inputs, y_BT, shares_BT)
            return ce
        logits = module(batch.inputs).flatten(0, 1)
        ce_N = F.cross_entropy(logits, y_BT.flatten(), reduction="none")
        return (ce_N * shares_BT.flatten()).sum()


class Denoise:
    """The cross entropy given a noisy target, at random noise levels of the block's range."""

    def __init__(
        self,
        config: Config,
        block: int,
        device: torch.device,
        noise: Callable[[Tensor], Tensor] = torch.randn_like,
    ) -> None:
        self.block, self.noise = block, noise
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
        z_BTE = e_BTE + level.sigma_B11 * self.noise(e_BTE)
        if needs_chunks(self.vocabulary.size):
            shares_BT = (level.weight_B[:, None] / (self.mean_weight * y_BT.numel())).expand(
                y_BT.shape
            )
            return Loss(*module(batch.inputs, z_BTE, level, self.table, (y_BT, shares_BT)).unbind())
        logits = module(batch.inputs, z_BTE, level, self.table)
        ce_BT = F.cross_entropy(logits.flatten(0, 1), y_BT.flatten(), reduction="none")
        ce_B = ce_BT.view(y_BT.shape).mean(dim=1)
        weighted = (ce_B * level.weight_B).mean() / self.mean_weight
        return Loss(weighted, ce_B.detach().mean())


def new_objective(
    config: Config,
    block: int,
    device: torch.device,
    noise: Callable[[Tensor], Tensor] = torch.randn_like,
) -> Objective:
    """`noise`: draws standard normal numbers of a tensor's shape."""
    if config.kind.denoises:
        return Denoise(config, block, device, noise)
    return NextToken(config)


def hide_context(
    context: Ids, draws: np.random.Generator, share: float, vocabulary: Vocabulary
) -> Ids:
    """In a share of the sequences, corrupt the context after a random cut: half of these sequences
    get masks there, the others some wrong tokens."""
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
