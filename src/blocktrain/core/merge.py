"""From several updates of one tensor to its next version: a weighted mean and an outer step.

All updates start from `current`, or from an older version, and then what they learned since
is added to `current` (`caught_up`). Sums are float64, and so is the target that a version is
rounded from (`finite_floats`); whoever adds in the order of the updates'
ids gets a result that does not depend on who came first. The outer step is DiLoCo's (SGD with
Nesterov momentum on the mean change), written so that rate 1 without momentum is the mean,
bit for bit. Works on numpy arrays of any shape; knows no files, no weights' names, no clock.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from blocktrain.errors import ConfigError, DivergedError

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

_UNWARNED = np.errstate(over="ignore", invalid="ignore")  # the result is checked instead


@dataclass(frozen=True)
class Outer:
    """How far a version follows the mean of its updates, and how much it keeps its direction."""

    rate: float = 1.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.rate < math.inf:
            raise ConfigError(f"the outer rate cannot be {self.rate}")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"the outer momentum must be 0 or more and below 1: {self.momentum}")


class WeightedMean:
    """A mean that is told its members one at a time and keeps only their sum."""

    def __init__(self) -> None:
        self._sum: Doubles | None = None
        self._weight = 0.0

    @_UNWARNED
    def add(self, values: Array, weight: float) -> None:
        if not 0 < weight < math.inf:
            raise ValueError(f"a weight must be above 0, not {weight}")
        weighted = np.asarray(np.multiply(values, weight, dtype=np.float64))
        # Not 0 + the first one: that would turn -0 into 0.
        self._sum = weighted if self._sum is None else np.add(self._sum, weighted, out=self._sum)
        self._weight += weight

    def mean(self) -> Doubles:
        if self._sum is None:
            raise ValueError("a mean of nothing")
        return np.asarray(self._sum / self._weight)


@_UNWARNED
def caught_up(end: Floats, start: Floats, current: Floats, share: float = 1.0) -> Doubles:
    """A late update as if it had started from `current`; where that is so, exactly its end.

    The discount is a share of the step, not of a weight: an update merged alone would count in
    full whatever its weight.
    """
    learned = np.subtract(end, start, dtype=np.float64)
    if share == 1.0:
        return np.where(start == current, end, current + learned)
    return current + share * learned


@_UNWARNED
def outer_step(
    current: Floats, mean: Doubles, velocity: Floats | None, outer: Outer
) -> tuple[Doubles, Floats | None]:
    """Where the next version should be, and the next velocity; without momentum there is none.

    g = current - mean;  v' = momentum v + g;  next = current - rate (g + momentum v')
    """
    following, speed = mean, None
    # current - rate g is mean + (1 - rate) g. Terms of 0 are left out: they would turn -0 into 0.
    if outer.rate != 1:
        following = following + (1 - outer.rate) * (current - mean)
    if outer.momentum != 0:
        speed = current - mean
        if velocity is not None:
            speed = speed + outer.momentum * velocity.astype(np.float64)
        following = following - outer.rate * outer.momentum * speed
    return following, None if speed is None else finite_floats(speed)


@_UNWARNED
def finite_floats(values: Array) -> Floats:
    floats = np.asarray(values, np.float32)
    if not np.isfinite(floats).all():
        raise DivergedError("merging these updates gives numbers that are not finite")
    return floats
