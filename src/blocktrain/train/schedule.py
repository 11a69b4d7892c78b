"""The learning rate as a pure function of the step: linear warm-up, then a cosine to a floor."""

import math

from blocktrain.config import TrainConfig


def learning_rate(step: int, settings: TrainConfig) -> float:
    warm = min(1.0, (step + 1) / settings.warmup) if settings.warmup else 1.0
    progress = min(1.0, step / settings.steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.lr * warm * (settings.lr_floor + (1.0 - settings.lr_floor) * cosine)
