"""From several updates of one tensor to its next version: a weighted mean and an outer step.

All updates start from `current`, or from an older version, and then what they learned since
is added to `current` (`Contribution.start`). Sums are float64, in the order of the updates' ids,
so the result does not depend on who came first, and so is the target that a version is rounded
from (`finite_floats`). The outer step is DiLoCo's (SGD with
Nesterov momentum on the mean change), written so that rate 1 without momentum is the mean,
bit for bit. Works on numpy arrays of any shape; knows no files, no weights' names, no clock.
"""

import math
from collections.abc import Iterable
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


@dataclass(frozen=True)
class Contribution:
    """A tensor after training; `start` is what it was before, where that is not `current`, and
    `share` how much of the way from there is taken."""

    id: str
    end: Floats
    weight: float
    start: Floats | None = None
    share: float = 1.0


class WeightedMean:
    """A mean that is told its members one at a time and keeps only their sum. It may be used again,
    in the same memory: finding new memory takes longer than adding up. `room`: for what is added,
    at least a member's size; several means may share it."""

    def __init__(self, room: Doubles | None = None) -> None:
        self._sum: Doubles | None = None
        self._weight = 0.0
        self._room = room

    @_UNWARNED
    def add(self, values: Array, weight: float) -> None:
        if not 0 < weight < math.inf:
            raise ValueError(f"a weight must be above 0, not {weight}")
        if self._sum is None or self._sum.shape != values.shape:
            self._sum = np.empty(values.shape, np.float64)
        if self._weight == 0:  # not 0 + the first one: that would turn -0 into 0
            np.multiply(values, weight, out=self._sum, dtype=np.float64)
        else:
            room = None if self._room is None else self._room[: values.size].reshape(values.shape)
            self._sum += np.multiply(values, weight, out=room, dtype=np.float64)
        self._weight += weight

    def mean(self) -> Doubles:
        """To be asked once, as the sum becomes the mean; it lasts until the next member comes."""
        if self._sum is None or self._weight == 0:
            raise ValueError("a mean of nothing")
        weight, self._weight = self._weight, 0.0
        return np.divide(self._sum, weight, out=self._sum)


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


def merge_tensor(
    current: Floats,
    contributions: Iterable[Contribution],
    velocity: Floats | None,
    outer: Outer,
) -> tuple[Floats, Floats | None]:
    """The next version of a tensor and its velocity, from updates in any order."""
    sums = WeightedMean()
    for update in sorted(contributions, key=lambda update: update.id):
        values: Array = update.end
        if update.start is not None:
            values = caught_up(update.end, update.start, current, update.share)
        sums.add(values, update.weight)
    target, speed = outer_step(current, sums.mean(), velocity, outer)
    return finite_floats(target), speed


@_UNWARNED
def finite_floats(values: Array, room: Floats | None = None) -> Floats:
    """The nearest float32; in `room`, where there is one of at least their number."""
    if room is None:
        floats = np.asarray(values, np.float32)
    else:
        floats = room[: values.size]
        np.copyto(floats, values, casting="same_kind")
    if not np.isfinite(floats).all():
        raise DivergedError("merging these updates gives numbers that are not finite")
    return floats
