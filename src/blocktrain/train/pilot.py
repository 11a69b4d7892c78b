"""The adaptive partition: a pilot block measures where the range of sigma should be cut.

The pilot trains for a few steps on all sigmas, its loss is measured on a grid of them, and the
cuts are placed so that the loss changes by the same amount over each block's range. The result is
an ordinary config with explicit bounds, so that every machine of a run agrees on it.
"""

import math

import torch

from blocktrain.config import Config
from blocktrain.data.corpus import Corpus
from blocktrain.data.windows import evaluation_windows, shifted
from blocktrain.numerics.noise import LogNormal, fitted_partition
from blocktrain.numerics.sampling import mixed_seed
from blocktrain.train.device import Compute
from blocktrain.train.objective import Denoise
from blocktrain.train.trainer import BlockTrainer

GRID_POINTS = 13
GRID_WINDOWS = 16
GRID_STREAM = 4


def with_fitted_bounds(config: Config, corpus: Corpus, compute: Compute) -> Config:
    """The config with the cuts of a pilot; unchanged unless the partition is adaptive."""
    objective = config.objective
    if not config.kind.denoises or objective.partition != "adaptive" or objective.bounds:
        return config
    sigmas, losses = loss_by_sigma(config, corpus, compute)
    partition = fitted_partition(
        config.model.blocks,
        sigmas,
        losses,
        objective.overlap,
        LogNormal(objective.p_mean, objective.p_std),
    )
    return config.with_settings(objective__bounds=partition.bounds)


def loss_by_sigma(
    config: Config, corpus: Corpus, compute: Compute
) -> tuple[list[float], list[float]]:
    """Train a pilot on the whole range; its loss on held-out text, on an even grid of ln(sigma)."""
    pilot_config = _pilot_config(config)
    trainer = BlockTrainer(pilot_config, 0, corpus, compute, store=None)
    trainer.train(lambda progress: None)
    objective = trainer.objective
    assert isinstance(objective, Denoise)
    window = config.model.window
    targets = evaluation_windows(corpus.split("valid", window), window, GRID_WINDOWS)
    low, high = math.log(config.objective.sigma_min), math.log(config.objective.sigma_max)
    sigmas = [
        math.exp(low + (high - low) * point / (GRID_POINTS - 1)) for point in range(GRID_POINTS)
    ]
    sigmas[0], sigmas[-1] = config.objective.sigma_min, config.objective.sigma_max
    losses = []
    trainer.module.eval()
    for sigma in sigmas:
        torch.manual_seed(mixed_seed(config.train.seed, GRID_STREAM))
        with torch.no_grad():
            batch = objective.batch_at(
                targets, shifted(targets, config.vocabulary), [sigma] * len(targets)
            )
            loss = objective.loss(trainer.module, batch.to(compute.device))
        losses.append(float(loss.ce))
    return sigmas, losses


def _pilot_config(config: Config) -> Config:
    """One block as deep as the run's, over all sigmas, for a few steps."""
    steps = config.objective.pilot_steps
    return config.with_settings(
        model__layers=max(config.depths),
        model__blocks=1,
        model__depths=(),
        objective__partition="lognormal",
        train__steps=steps,
        train__warmup=min(config.train.warmup, max(1, steps // 10)),
        train__eval_every=0,
        train__keep="last",
        train__warm_start="",
        train__compile=False,
    )
