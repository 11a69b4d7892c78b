"""The learning rate as a pure function of the step: linear warm-up, then a cosine to a floor."""

import math

from blocktrain.config import TrainConfig


def learning_rate(step: int, settings: TrainConfig, course: float = 1.0) -> float:
    """`course`: the share of the steps in which it runs its course; then it stays at the floor."""
    warm = min(1.0, (step + 1) / settings.warmup) if settings.warmup else 1.0
    progress = min(1.0, step / (settings.steps * course))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.lr * warm * (settings.lr_floor + (1.0 - settings.lr_floor) * cosine)
