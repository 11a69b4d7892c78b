"""Data that travels between blocks: rows of requests, their activations and predictions.

Shapes: R positions read, V tokens, K likeliest tokens reported per position.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from blocktrain.codec.dense import (
    STEPS,
    from_bf16,
    row_scales,
    to_bf16,
    to_int8,
    usable_scales,
)
from blocktrain.errors import ProtocolError
from blocktrain.numerics import Floats
from blocktrain.numerics.sampling import Sampling

EMPTY = np.zeros((0, 0), np.float32)
NOT_FINITE = "computed NaN or Inf; if it computes in bf16, try --precision fp32"
GREEDY = Sampling()

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Choice:
    """How tokens are picked at the positions that a row reads, and what is reported of them."""

    sampling: Sampling = GREEDY
    position: int = 0  # text position of the first token picked
    top: int = 0  # number of likeliest tokens to report per position
    refine: bool = False  # in a sweep, a block's guesses become the next block's context
    answer_from: int = 0  # cached position of the answer's first token; only penalties need it


@dataclass(frozen=True)
class Row:
    """Positions of one request. A row overwrites cached positions from `start` on. So the next row
    rolls back rejected drafts, and a row from 0 rebuilds the whole context."""

    request: int
    start: int
    ids: np.ndarray  # uint32, at positions start, start + 1, ...
    read: int  # number of last positions whose predictions are read
    choice: Choice = Choice()
    source: int = 0  # of a new context: the request whose first `start` positions it copies

    @property
    def context(self) -> int:
        """Number of positions of the row before those that predict a token."""
        return len(self.ids) - self.read


@dataclass(frozen=True)
class Predictions:
    """The token picked at each position read, and log-probabilities."""

    tokens_R: Array
    log_probs_R: Array
    next_log_probs_R: Array  # of the next id in the row; at its end, of the token picked
    top_tokens_RK: Array  # likeliest first
    top_log_probs_RK: Array

    def __getitem__(self, chosen: slice) -> Self:
        return type(self)(*(getattr(self, field.name)[chosen] for field in fields(self)))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


@dataclass(frozen=True)
class Activations:
    """The rows of a step, and what the blocks so far have computed for them. `state`: features of
    every position (cascade), or z of every position read (denoising). `readout_RV`: sum of the
    blocks' log-probabilities so far at the positions read; with readout "final", those of the last
    block alone. Both are empty before the first block."""

    rows: Sequence[Row]
    state: np.ndarray = field(default_factory=lambda: EMPTY)
    readout_RV: np.ndarray = field(default_factory=lambda: EMPTY)
    predictions: Predictions | None = None


def is_finite(activations: Activations) -> bool:
    predicted = activations.predictions
    arrays = [activations.state, activations.readout_RV]
    arrays += [predicted.log_probs_R] if predicted else []
    return all(bool(np.isfinite(array).all()) for array in arrays)


def joined(parts: Sequence[Activations]) -> Activations:
    """Concatenate activations with the same route."""
    predicted = [part.predictions for part in parts if part.predictions]
    return Activations(
        tuple(row for part in parts for row in part.rows),
        np.concatenate([part.state for part in parts]),
        np.concatenate([part.readout_RV for part in parts]),
        Predictions.joined(predicted) if predicted else None,
    )


def split_rows(activations: Activations, carried: Sequence[int]) -> list[Activations]:
    """One Activations per row. `carried`: the number of state positions of each row."""
    rows, predicted = activations.rows, activations.predictions
    states = np.split(activations.state, np.cumsum(carried)[:-1])
    ends = np.cumsum([row.read for row in rows])
    readouts = np.split(activations.readout_RV, ends[:-1])
    return [
        Activations((row,), state, readout, predicted and predicted[end - row.read : end])
        for row, state, readout, end in zip(rows, states, readouts, ends, strict=True)
    ]


# Wire formats of floats: `fp32`, `bf16`, or `int8` with one scale per row.
#
# An int8 number is a multiple of its row's scale, which is 1/127 of the row's largest magnitude. A
# row is the last dimension, so that the precision of a position does not depend on others. Numbers
# that are not finite are neither sent nor accepted, so that they never reach a cache.

WIRE_TYPES: dict[str, tuple[type[np.generic], ...]] = {  # dtypes of the packed arrays
    "fp32": (np.float32,),
    "bf16": (np.uint16,),
    "int8": (np.int8, np.float32),
}
LARGEST_SCALE = np.nextafter(np.finfo(np.float32).max / np.float32(STEPS), np.float32(0))


def pack(numbers: Floats, kind: str) -> tuple[Array, ...]:
    """The arrays to send; with `fp32`, the array itself without a copy."""
    _check_finite(numbers)
    if kind == "fp32":
        return (numbers,)
    if kind == "bf16":
        return (to_bf16(numbers),)
    scales = usable_scales(row_scales(numbers), LARGEST_SCALE)
    return to_int8(numbers, scales), scales


def unpack(arrays: Sequence[Array], kind: str) -> Floats:
    """The inverse of `pack`, up to rounding. The result may be four times as large as the input."""
    types = [array.dtype for array in arrays]
    if kind not in WIRE_TYPES or types != [np.dtype(each) for each in WIRE_TYPES[kind]]:
        raise ProtocolError(f"numbers in wire format {kind!r} cannot have the types {types}")
    if kind == "int8":
        multiples, scales = arrays
        if not multiples.ndim or scales.shape != (*multiples.shape[:-1], 1):
            raise ProtocolError(
                f"the scales have shape {scales.shape}; numbers of shape {multiples.shape} need one"
                " scale per row"
            )
        with np.errstate(over="ignore", invalid="ignore"):  # an overflow is refused below
            numbers = multiples * scales
    else:
        numbers = from_bf16(arrays[0]) if kind == "bf16" else arrays[0]
    _check_finite(numbers)
    return numbers


def _check_finite(numbers: Floats) -> None:
    """Raise ProtocolError if a number is not finite. Checks maximum and minimum, which allocates no
    array."""
    if numbers.size and not (np.isfinite(numbers.max()) and np.isfinite(numbers.min())):
        raise ProtocolError("a number is not finite")
