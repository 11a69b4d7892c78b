"""What a block learns by: the same next-byte target, through a loss of its own.

An objective turns a batch of target bytes into a loss for one block. Its randomness (noise
levels, noise, hidden context) comes from a seed per step, so that a step can be repeated
anywhere. Knows nothing of optimizers, files or clocks.
"""

from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktrain.config import Config
from blocktrain.core.noise import mean_weight, precondition
from blocktrain.core.vocabulary import BYTES, MASK
from blocktrain.data.corpus import Bytes
from blocktrain.data.windows import Ids, shifted
from blocktrain.model.block import NoiseLevel
from blocktrain.model.targets import target_table

WRONG_BYTES_RATE = 0.3  # of the bytes after the cut, in a sequence whose context is corrupted


class Loss(NamedTuple):
    value: Tensor  # what is minimised
    ce: Tensor  # the unweighted cross entropy beside it; for denoising it sees the noisy target


class Objective(Protocol):
    def loss(self, module: nn.Module, targets: Bytes, seed: int) -> Loss: ...


class EndToEnd:
    def __init__(self, config: Config, device: torch.device) -> None:
        self.device = device

    def loss(self, module: nn.Module, targets: Bytes, seed: int) -> Loss:
        ids = to_device(shifted(targets), self.device)
        logits = module(ids)
        ce = F.cross_entropy(logits.flatten(0, 1), to_device(targets, self.device).flatten())
        return Loss(ce, ce.detach())


class Denoise:
    def __init__(self, config: Config, block: int, device: torch.device) -> None:
        self.device = device
        self.block = block
        self.settings = config.objective
        self.partition = config.partition()
        self.table = target_table(config.train.seed, self.settings.target_dim).to(device)
        self.mean_weight = mean_weight(self.partition, block, self.settings.sigma_data)

    def loss(self, module: nn.Module, targets: Bytes, seed: int) -> Loss:
        draws = np.random.Generator(np.random.Philox(seed))
        sigmas = self.partition.sample(self.block, draws.random(len(targets)).tolist())
        context = hide_context(shifted(targets), draws, self.settings.hidden_share)
        return self.loss_at(module, context, targets, sigmas)

    def loss_at(
        self, module: nn.Module, context: Ids, targets: Bytes, sigmas: list[float]
    ) -> Loss:
        """The loss at given noise levels; the noise itself comes from torch's generator."""
        level = NoiseLevel.of(
            [precondition(s, self.settings.sigma_data) for s in sigmas], self.device
        )
        y_BT = to_device(targets, self.device)
        e_BTE = self.table[y_BT]
        z_BTE = e_BTE + level.sigma_B11 * torch.randn_like(e_BTE)
        logits = module(to_device(context, self.device), z_BTE, level, self.table)
        ce_BT = F.cross_entropy(logits.flatten(0, 1), y_BT.flatten(), reduction="none")
        ce_B = ce_BT.view(y_BT.shape).mean(dim=1)
        weighted = (ce_B * level.weight_B).mean() / self.mean_weight
        return Loss(weighted, ce_B.detach().mean())


def new_objective(config: Config, block: int, device: torch.device) -> Objective:
    if config.objective.kind == "end_to_end":
        return EndToEnd(config, device)
    return Denoise(config, block, device)


def hide_context(context: Ids, draws: np.random.Generator, share: float) -> Ids:
    """After a random cut, in a share of the sequences: MASK, or bytes with errors, half each."""
    if share == 0.0:
        return context
    count, length = context.shape
    chosen = draws.random(count) < share
    cuts = draws.integers(1, length, count)
    after = chosen[:, None] & (np.arange(length) >= cuts[:, None])
    masked = draws.random(count)[:, None] < 0.5
    wrong = draws.random(context.shape) < WRONG_BYTES_RATE
    noise = draws.integers(0, BYTES, context.shape)
    context = np.where(after & masked, MASK, context)
    return np.where(after & ~masked & wrong, noise, context)


def to_device(ids: Ids | Bytes, device: torch.device) -> Tensor:
    tensor = torch.tensor(ids)  # a copy: corpora are read-only memory maps
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True).long()
