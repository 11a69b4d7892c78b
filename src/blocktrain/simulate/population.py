"""Draws workers and what befalls them; the same for the same seed."""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from blocktrain.simulate.scenario import MEGABYTE, SimulateConfig
from blocktrain.simulate.virtual_worker import VirtualWorker

Draws = npt.NDArray[np.float64]

DRAWN_AT_ONCE = 4096


def draw_workers(settings: SimulateConfig) -> list[VirtualWorker]:
    """Each trait from a stream of its own: one setting changes nothing but its own draws."""

    def normal(stream: int) -> Draws:
        return np.random.default_rng([settings.seed, stream]).normal(size=settings.workers)

    def uniform(stream: int) -> Draws:
        return np.random.default_rng([settings.seed, stream]).random(settings.workers)

    network = settings.network_spread
    traits = (
        settings.steps_per_second * np.exp(settings.speed_spread * normal(0)),
        settings.down_megabytes * MEGABYTE * np.exp(network * normal(1)),
        settings.up_megabytes * MEGABYTE * np.exp(network * normal(2)),
        settings.latency_seconds * np.exp(network * normal(3)),
        settings.join_seconds * uniform(4),
        uniform(5) < settings.lost_share,
        uniform(6) < settings.straggler_share,
    )
    return [
        VirtualWorker(str(number), *numbers, lost=lost, straggles=straggles)
        for number, (*numbers, lost, straggles) in enumerate(
            zip(*(trait.tolist() for trait in traits), strict=True)
        )
    ]


class Chance:
    """Draws for what happens on the way, made many at a time."""

    def __init__(self, seed: int) -> None:
        draws = np.random.default_rng([seed, 7])
        self._exponential = _one_by_one(lambda: draws.exponential(size=DRAWN_AT_ONCE))
        others = np.random.default_rng([seed, 8])
        self._uniform = _one_by_one(lambda: others.random(DRAWN_AT_ONCE))

    def seconds(self, mean: float) -> float:
        """A time that is as likely to end at one moment as at any other."""
        return mean * next(self._exponential)

    def within(self, most: float) -> float:
        return most * next(self._uniform)

    def happens(self, share: float) -> bool:
        return next(self._uniform) < share


def _one_by_one(draw: Callable[[], Draws]) -> Iterator[float]:
    while True:
        yield from draw().tolist()
