"""From several updates of a block to its next version: a weighted mean, then an outer step.

All updates start from `current`, or from an older version; then what they learned since is added
to `current` (`Contribution.start`). Sums are float64, in the order of the updates' ids, so that the
result does not depend on which update came first. The outer step is DiLoCo's (SGD with Nesterov
momentum on the mean change), written so that rate 1 without momentum is the mean, bit for bit.
Works on any part of a block's numbers, since every number is merged by itself; knows no files, no
weights' names, no clock.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from blocktrain.errors import ConfigError, DivergedError
from blocktrain.numerics.quantization import Floats

Array = npt.NDArray[Any]
Doubles = npt.NDArray[np.float64]

_UNWARNED = np.errstate(over="ignore", invalid="ignore")  # the result is checked instead


@dataclass(frozen=True)
class Contribution:
    """Numbers of an update: weights after training, or with `is_delta` their change.

    `start`: the weights before training, unless those are `current`. `share`: how much of the
    change is taken. A late update is discounted by its share, not by its weight: merged alone, it
    would count in full whatever its weight.
    """

    id: str
    values: Floats
    weight: float
    start: Floats | None = None
    share: float = 1.0
    is_delta: bool = False

    @_UNWARNED
    def end(self, current: Floats) -> Array:
        """Where this update alone leads to from `current`."""
        if self.is_delta:
            return self.share * self.values.astype(np.float64) + current
        if self.start is None:
            return self.values
        return caught_up(self.values, self.start, current, self.share)


class MergeSettings(Protocol):
    """What a run says of its merges: `config.SwarmConfig`."""

    @property
    def outer_rate(self) -> float: ...
    @property
    def outer_momentum(self) -> float: ...


@dataclass(frozen=True)
class MergeRule:
    """How updates become a version. `rate`: how far a version follows the mean of its updates;
    `momentum`: how much it keeps its direction. For another mean, override `mean`."""

    rate: float = 1.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.rate < math.inf:
            raise ConfigError(f"the outer rate must be 0 or more: {self.rate}")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"the outer momentum must be 0 or more and below 1: {self.momentum}")

    def combine(
        self, current: Floats, updates: Iterable[Contribution], velocity: Floats | None
    ) -> tuple[Doubles, Floats | None]:
        """Where the next version should be (see `finite_floats`), and the next velocity; without
        momentum there is none. The order of the updates does not matter."""
        ordered = sorted(updates, key=lambda update: update.id)
        ends = [update.end(current) for update in ordered]
        mean = self.mean(ends, [update.weight for update in ordered])
        return self._outer_step(current, mean, velocity)

    @_UNWARNED
    def mean(self, values: Sequence[Array], weights: Sequence[float]) -> Doubles:
        if not values or not all(0 < weight < math.inf for weight in weights):
            raise ValueError(f"a mean needs values with weights above 0, not {weights}")
        # Not 0 + the first one: that would turn -0 into 0.
        total, total_weight = np.multiply(values[0], weights[0], dtype=np.float64), weights[0]
        for value, weight in zip(values[1:], weights[1:], strict=True):
            total += np.multiply(value, weight, dtype=np.float64)
            total_weight += weight
        return total / total_weight

    @_UNWARNED
    def _outer_step(
        self, current: Floats, mean: Doubles, velocity: Floats | None
    ) -> tuple[Doubles, Floats | None]:
        """g = current - mean;  v' = momentum v + g;  next = current - rate (g + momentum v')"""
        target, speed = mean, None
        # current - rate g is mean + (1 - rate) g. Terms of 0 are left out: they turn -0 into 0.
        if self.rate != 1:
            target = target + (1 - self.rate) * (current - mean)
        if self.momentum != 0:
            speed = current - mean
            if velocity is not None:
                speed = speed + self.momentum * velocity.astype(np.float64)
            target = target - self.rate * self.momentum * speed
        return target, None if speed is None else finite_floats(speed)


def merge_rule(settings: MergeSettings) -> MergeRule:
    """The rule of a run. To add one: a subclass of MergeRule, a setting, and a choice here."""
    return MergeRule(settings.outer_rate, settings.outer_momentum)


@_UNWARNED
def caught_up(end: Floats, start: Floats, current: Floats, share: float = 1.0) -> Doubles:
    """A late update as if it had started from `current`; if it did, exactly its end."""
    learned = np.subtract(end, start, dtype=np.float64)
    if share == 1.0:
        return np.where(start == current, end, current + learned)
    return current + share * learned


@_UNWARNED
def finite_floats(values: Array) -> Floats:
    """The nearest float32; DivergedError if one is not finite."""
    floats: Floats = np.asarray(values, np.float32)
    if not np.isfinite(floats).all():
        raise DivergedError("merging these updates gives numbers that are not finite")
    return floats
