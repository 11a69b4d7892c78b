"""What travels around the ring: some positions of several requests, on their way through blocks.

A row is one request's share. What a stage's cache holds from `start` on is dropped first, so that
rejected drafts are rolled back by the next row, and a row from 0 rebuilds everything.

Shapes: N carried positions of all rows, R positions read, D or E the state's width, V bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from blocktrain.core.choice import Sampling
from blocktrain.core.vocabulary import BYTES


@dataclass(frozen=True)
class Refinement:
    """A sweep: every block's successor reads, as its context, what the block guessed.

    `position` is the text position of the first byte guessed.
    """

    sampling: Sampling
    position: int


@dataclass(frozen=True)
class Row:
    request: int
    start: int
    ids: np.ndarray  # uint16, the context at positions start, start + 1, ...
    read: int  # how many of the last positions are predicted
    refinement: Refinement | None = None


@dataclass(frozen=True)
class Work:
    """`state` is features of every position (a cascade) or z of every position read (denoising);
    `readout` the sum of the blocks' log-probabilities so far at the positions read, or with the
    readout "final" the last block's alone."""

    rows: tuple[Row, ...]
    state: np.ndarray
    readout_RV: np.ndarray

    @property
    def read(self) -> int:
        return sum(row.read for row in self.rows)


def started(rows: Sequence[Row]) -> Work:
    """Work before the first block has seen it."""
    empty = np.zeros((0, 0), np.float32)
    read = sum(row.read for row in rows)
    return Work(tuple(rows), empty, np.zeros((read, BYTES), np.float32))


def joined(works: Sequence[Work]) -> Work:
    """Several works that go the same way, as one."""
    return Work(
        tuple(row for work in works for row in work.rows),
        np.concatenate([work.state for work in works]),
        np.concatenate([work.readout_RV for work in works]),
    )


def apart(work: Work, carried: Sequence[int]) -> list[Work]:
    """Each row's own work; `carried` says how many positions of state each has."""
    states = np.split(work.state, np.cumsum(carried)[:-1])
    readouts = np.split(work.readout_RV, np.cumsum([row.read for row in work.rows])[:-1])
    return [Work((row,), *own) for row, *own in zip(work.rows, states, readouts, strict=True)]


def finite(work: Work) -> bool:
    return bool(np.isfinite(work.state).all() and np.isfinite(work.readout_RV).all())


def with_ids(row: Row, ids: np.ndarray) -> Row:
    return replace(row, ids=ids)
