"""Merges updates of a block into its next version: a weighted mean, then an outer step.

An update starts from the `current` version or from an older one. If it is an older one, the change
since then is added to `current` (`Contribution.start`). Sums are float64 and in the order of the
updates' ids, so the result does not depend on the order of arrival. The outer step is DiLoCo's: SGD
with Nesterov momentum on the mean change. With rate 1 and no momentum it gives the mean, bit for
bit. Every number is merged independently, so a block can be merged in parts.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from blocktrain.errors import ConfigError, DivergedError
from blocktrain.numerics import Array, Doubles, Floats

_UNWARNED = np.errstate(over="ignore", invalid="ignore")  # finite_floats checks the result instead


@dataclass(frozen=True)
class Contribution:
    """An update's numbers: the weights after training or, with `is_delta`, their change.

    `start`: the weights before training, if they are not `current`. `share`: the fraction of the
    change that counts, of all numbers or of each. A late update is discounted by its share and not
    by its weight, since an update that is merged alone counts in full whatever its weight.
    """

    id: str
    values: Floats
    weight: float
    start: Floats | None = None
    share: float | Doubles = 1.0
    is_delta: bool = False

    @_UNWARNED
    def end(self, current: Floats) -> Array:
        """What `current` becomes by this update alone."""
        if self.is_delta:
            return self.share * self.values.astype(np.float64) + current
        if self.start is None and not isinstance(self.share, np.ndarray):
            return self.values
        start = current if self.start is None else self.start
        return caught_up(self.values, start, current, self.share)


@dataclass(frozen=True)
class WeightedSum:
    """The sum of several updates' numbers times their weights, and the sum of the weights."""

    numbers: Doubles
    weight: float


@dataclass(frozen=True)
class MergeRule:
    """How updates become a version. `rate`: the outer step's learning rate; `momentum`: its
    Nesterov momentum. To add a rule, override `total` in a subclass, add a setting, and choose the
    rule in swarm/merging_rules.py."""

    rate: float = 1.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.rate < math.inf:
            raise ConfigError(f"the outer rate must be 0 or more, not {self.rate}")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"the outer momentum must be in [0, 1), not {self.momentum}")

    def combine(
        self, current: Floats, updates: Iterable[Contribution], velocity: Floats | None
    ) -> tuple[Doubles, Floats | None]:
        """Returns the next version (see `finite_floats`) and the next velocity, which is None
        without momentum. The order of the updates does not matter."""
        return self.outer_step(current, self.total(current, updates), velocity)

    @_UNWARNED
    def total(
        self, current: Floats, updates: Iterable[Contribution], before: WeightedSum | None = None
    ) -> WeightedSum:
        """Add these updates to the sum `before`, whose updates all have smaller ids."""
        for update in sorted(updates, key=lambda update: update.id):
            weight = update.weight
            if not 0 < weight < math.inf:
                raise ValueError(f"the weight of an update must be above 0, not {weight}")
            numbers = np.multiply(update.end(current), weight, dtype=np.float64)
            if before is not None:  # a sum that starts from 0 would turn -0 into 0
                numbers += before.numbers
                weight += before.weight
            before = WeightedSum(numbers, weight)
        if before is None:
            raise ValueError("there are no updates to merge")
        return before

    @_UNWARNED
    def outer_step(
        self, current: Floats, total: WeightedSum, velocity: Floats | None
    ) -> tuple[Doubles, Floats | None]:
        """g = current - mean;  v' = momentum v + g;  next = current - rate (g + momentum v')"""
        mean = total.numbers / total.weight
        target, speed = mean, None
        # current - rate g is mean + (1 - rate) g. Adding a term that is 0 would turn -0 into 0.
        if self.rate != 1:
            target = target + (1 - self.rate) * (current - mean)
        if self.momentum != 0:
            speed = current - mean
            if velocity is not None:
                speed = speed + self.momentum * velocity.astype(np.float64)
            target = target - self.rate * self.momentum * speed
        return target, None if speed is None else finite_floats(speed)


@_UNWARNED
def caught_up(end: Floats, start: Floats, current: Floats, share: float | Doubles = 1.0) -> Doubles:
    """The end of a late update as if it had started from `current`. Where `start` equals `current`,
    it is exactly `end`."""
    learned = np.subtract(end, start, dtype=np.float64)
    if not isinstance(share, np.ndarray) and share == 1.0:
        return np.where(start == current, end, current + learned)
    return current + share * learned


@_UNWARNED
def finite_floats(values: Array) -> Floats:
    """Round to float32; DivergedError if a number is not finite."""
    floats: Floats = np.asarray(values, np.float32)
    if not np.isfinite(floats).all():
        raise DivergedError("merging these updates gives weights that are not finite")
    return floats
