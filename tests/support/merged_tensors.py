"""A merge of whole tensors, in a few lines: what the merge of files, chunk by chunk, must equal."""

from collections.abc import Iterable
from dataclasses import dataclass

from blocktrain.core.merge import (
    Array,
    Floats,
    Outer,
    WeightedMean,
    caught_up,
    finite_floats,
    outer_step,
)


@dataclass(frozen=True)
class Contribution:
    """A tensor after training; `start` is what it was before, where that is not `current`, and
    `share` how much of the way from there is taken."""

    id: str
    end: Floats
    weight: float
    start: Floats | None = None
    share: float = 1.0


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
