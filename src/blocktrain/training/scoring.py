"""Measures a block's loss on given windows, so that the losses of two sets of weights compare.

The noise follows from a seed and is drawn on the host: every device draws the same.
"""

from typing import cast

import numpy as np
import torch
from torch import Tensor

from blocktrain.config import Config
from blocktrain.data.corpus import Corpus, TrainingWindows
from blocktrain.data.tokenizer import Tokens
from blocktrain.model.block import Trunk
from blocktrain.model.stack import new_block
from blocktrain.numerics import Doubles
from blocktrain.numerics.sampling import mixed_seed
from blocktrain.storage.tensor_file import Tensors
from blocktrain.training.device import Compute
from blocktrain.training.frozen import Inside, Prefix, Published, suffix_of
from blocktrain.training.objective import new_objective
from blocktrain.training.stored_models import load_block
from blocktrain.training.trainer import DATA_STREAM, GENERATOR_LOCK

GROUPS = 8  # of windows, to estimate the error of a mean


class BlockScorer:
    """One block in memory, of which different weights are scored."""

    def __init__(self, config: Config, block: int, corpus: Corpus, compute: Compute) -> None:
        self.config, self.block, self.corpus, self.compute = config, block, corpus, compute
        reads = config.kind.reads_predecessors and block > 0
        with GENERATOR_LOCK:
            self._module = new_block(config, block)
            self.prefix = Prefix(config, block, compute) if reads else None
            self.suffix = suffix_of(config, block, compute)
        self._module.compute_dtype = compute.dtype
        self._module.requires_grad_(False).eval().to(compute.device)
        self._objective = new_objective(config, block, compute.device, noise=_host_noise)
        self._forward = (
            Inside(cast("Trunk", self._module), self.suffix) if self.suffix else self._module
        )

    def build_on(self, published: Published) -> None:
        """From now on, use these versions of the frozen blocks."""
        for part in (self.prefix, self.suffix):
            if part:
                part.refresh(published)

    def losses(self, weights: Tensors, windows: Tokens, seed: int) -> Doubles:
        """The mean loss of each group of windows, in nats per token. Equal seeds give equal noise,
        also to other windows."""
        load_block(self._module, weights, f"block {self.block}")
        groups = np.array_split(windows, min(GROUPS, len(windows)))
        means = [self._mean(group, mixed_seed(seed, n)) for n, group in enumerate(groups)]
        return np.array(means)

    @torch.no_grad()
    def _mean(self, windows: Tokens, seed: int) -> float:
        with GENERATOR_LOCK:
            batch = self._objective.prepare(windows, seed).to(self.compute.device)
            if self.prefix:
                batch = batch._replace(inputs=self.prefix.features(batch.inputs))
            torch.default_generator.manual_seed(seed)
            return float(self._objective.loss(self._forward, batch).value)


def hidden_windows(corpus: Corpus, window: int, count: int, seed: int) -> Tokens:
    """Windows at random places of the valid split."""
    text = corpus.split("valid", window)
    starts = np.random.default_rng(seed).integers(0, len(text) - window + 1, count)
    return np.asarray(text[starts[:, None] + np.arange(window)])


def leased_windows(
    config: Config, block: int, corpus: Corpus, batches: range, count: int, seed: int
) -> Tokens:
    """At most `count` of the windows of these batches, chosen at random."""
    window, batch = config.model.window, config.train.batch
    text = corpus.split("train", window, windows=2)
    windows = TrainingWindows(
        text, window, batch, mixed_seed(config.train.seed, block, DATA_STREAM)
    )
    rows = len(batches) * batch
    chosen = np.random.default_rng(seed).permutation(rows)[:count]
    return np.stack([windows[batches[row // batch]][row % batch] for row in chosen])


def _host_noise(like: Tensor) -> Tensor:
    return torch.randn(like.shape).to(like)
