"""Tensors laid end to end in one array: how large each one is, and factors by tensor.

Arrays come in pieces, so that a large file is never in memory as a whole.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from blocktrain.numerics import Doubles, Floats


class Sizes(NamedTuple):
    """Two sizes of each tensor: the root mean square of its numbers, and the largest magnitude."""

    rms: Doubles
    largest: Doubles


class Pieces:
    """Cuts an array at the borders of its tensors. `counts`: how many numbers each tensor has."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = counts
        self._ends = list(accumulate(counts))

    def of(self, first: int, last: int) -> Iterator[tuple[int, slice]]:
        """The tensors with numbers between `first` and `last`, and where these are, counted from
        `first`."""
        for index in range(bisect_right(self._ends, first), len(self._ends)):
            start, end = self._ends[index] - self.counts[index], self._ends[index]
            if start >= last:
                break
            if max(start, first) < min(end, last):
                yield index, slice(max(start, first) - first, min(end, last) - first)


def sizes(parts: Iterable[Floats], counts: Sequence[int]) -> Sizes:
    """The sizes of all tensors. They are not finite if a number is not, or is too large to
    square."""
    squares, largest = np.zeros(len(counts)), np.zeros(len(counts))
    pieces, place = Pieces(counts), 0
    with np.errstate(over="ignore", invalid="ignore"):
        for part in parts:
            for index, at in pieces.of(place, place + part.size):
                numbers = part[at]
                squares[index] += np.dot(numbers, numbers)
                largest[index] = max(largest[index], numbers.max(), -numbers.min())
            place += part.size
        return Sizes(np.sqrt(squares / np.maximum(1, counts)), largest)


def scaled(parts: Iterable[Floats], factors: Sequence[float], pieces: Pieces) -> Iterator[Floats]:
    """The same numbers, those of each tensor times its factor."""
    place = 0
    for part in parts:
        scaled_part = part.copy()
        for index, at in pieces.of(place, place + part.size):
            scaled_part[at] *= np.float32(factors[index])
        place += part.size
        yield scaled_part
