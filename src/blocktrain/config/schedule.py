"""How a run's steps are divided: into phases, and phases into turns.

A run that was extended has several phases: one up to its first end, and one from each end to the
next. Steps are those of one block. Imports no settings.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple


class Stretch(NamedTuple):
    """The steps from `first` to `end` - 1."""

    first: int
    end: int


def phase(ends: Sequence[int], step: int) -> Stretch:
    """The phase of a step. Steps after the last end belong to the last phase."""
    index = min(bisect_right(ends, step), len(ends) - 1)
    return Stretch(ends[index - 1] if index else 0, ends[index])


def turn(ends: Sequence[int], length: int, step: int) -> Stretch:
    """The turn of a step. A turn has `length` steps, fewer at the end of a phase."""
    first, end = phase(ends, step)
    first += (min(step, end - 1) - first) // length * length
    return Stretch(first, min(first + length, end))
