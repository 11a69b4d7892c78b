"""What travels around the ring: positions of several requests, on their way through the blocks.

Shapes: N carried positions of all rows, R positions read, D or E the state's width, V bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from blocktrain.numerics.sampling import Sampling
from blocktrain.vocabulary import BYTES

NO_STATE = np.zeros((0, 0), np.float32)


@dataclass(frozen=True)
class Refinement:
    """In a sweep, a block's guesses become the next block's context.

    `position` is the text position of the first guessed byte.
    """

    sampling: Sampling
    position: int


@dataclass(frozen=True)
class Row:
    """One request's positions. A row overwrites what caches have from `start` on: so the next row
    rolls rejected drafts back, and a row from 0 rebuilds everything.
    """

    request: int
    start: int
    ids: np.ndarray  # uint16, the context at positions start, start + 1, ...
    read: int  # how many of the last positions are predicted
    refinement: Refinement | None = None

    @property
    def context(self) -> int:
        """How many positions come before those that are read."""
        return len(self.ids) - self.read


@dataclass(frozen=True)
class Activations:
    """`state` is features of every position (a cascade) or z of every position read (denoising).
    `readout` is the sum of the blocks' log-probabilities so far at the positions read, or with the
    readout "final" those of the last block alone."""

    rows: tuple[Row, ...]
    state: np.ndarray
    readout_RV: np.ndarray

    @property
    def read(self) -> int:
        return sum(row.read for row in self.rows)


def initial(rows: Sequence[Row], state: np.ndarray = NO_STATE) -> Activations:
    """Before the first block."""
    read = sum(row.read for row in rows)
    return Activations(tuple(rows), state, np.zeros((read, BYTES), np.float32))


def joined(parts: Sequence[Activations]) -> Activations:
    """Several that go the same way, as one."""
    return Activations(
        tuple(row for part in parts for row in part.rows),
        np.concatenate([part.state for part in parts]),
        np.concatenate([part.readout_RV for part in parts]),
    )


def split_rows(activations: Activations, carried: Sequence[int]) -> list[Activations]:
    """One for each row; `carried` says how many positions of state each row has."""
    rows = activations.rows
    states = np.split(activations.state, np.cumsum(carried)[:-1])
    readouts = np.split(activations.readout_RV, np.cumsum([row.read for row in rows])[:-1])
    return [Activations((row,), *own) for row, *own in zip(rows, states, readouts, strict=True)]


def is_finite(activations: Activations) -> bool:
    return bool(np.isfinite(activations.state).all() and np.isfinite(activations.readout_RV).all())
