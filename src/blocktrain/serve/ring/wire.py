"""Floats on the wire: whole (`fp32`), to 8 bits of precision (`bf16`), or in 8 bits (`int8`).

An int8 number is a multiple of its row's scale, a 127th of the row's largest; a row is the last
dimension, so that no position's precision depends on another's. Numbers are finite on both sides:
one that is not is never sent, and refused where it arrives, so that it ends in nobody's cache.
Knows nothing of frames.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from blocktrain.errors import ProtocolError
from blocktrain.numerics.quantization import (
    STEPS,
    Floats,
    from_bf16,
    row_scales,
    to_bf16,
    to_int8,
    usable_scales,
)

KINDS = ("fp32", "bf16", "int8")
LARGEST_SCALE = np.nextafter(np.finfo(np.float32).max / np.float32(STEPS), np.float32(0))

Array = npt.NDArray[Any]


def pack(numbers: Floats, kind: str) -> tuple[Array, ...]:
    """The arrays to send; with `fp32` the array itself."""
    _check_finite(numbers)
    if kind == "fp32":
        return (numbers,)
    if kind == "bf16":
        return (to_bf16(numbers),)
    scales = usable_scales(row_scales(numbers), LARGEST_SCALE)
    return to_int8(numbers, scales), scales


def unpack(arrays: Sequence[Array], kind: str) -> Floats:
    """What `pack` was given, or as near as the kind allows; takes up to four times the bytes."""
    _check_types(arrays, kind)
    if kind == "int8":
        numbers = _multiplied(*arrays)
    else:
        numbers = from_bf16(arrays[0]) if kind == "bf16" else arrays[0]
    _check_finite(numbers)
    return numbers


def arrays_of(kind: str) -> int:
    """How many arrays `pack` makes."""
    return len(_TYPES[kind])


_TYPES: dict[str, tuple[type[np.generic], ...]] = {
    "fp32": (np.float32,),
    "bf16": (np.uint16,),
    "int8": (np.int8, np.float32),
}


def _multiplied(multiples: Array, scales: Floats) -> Floats:
    if not multiples.ndim or scales.shape != (*multiples.shape[:-1], 1):
        raise ProtocolError(f"scales of shape {scales.shape} for numbers of {multiples.shape}")
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused by the caller
        return multiples * scales


def _check_types(arrays: Sequence[Array], kind: str) -> None:
    if kind not in _TYPES:
        raise ProtocolError(f"numbers of the unknown kind {kind!r}")
    types = [array.dtype for array in arrays]
    if types != [np.dtype(wanted) for wanted in _TYPES[kind]]:
        raise ProtocolError(f"numbers of the kind {kind} came as {types}")


def _check_finite(numbers: Floats) -> None:
    """By the largest and the least, because they need no array of their own."""
    if numbers.size and not (np.isfinite(numbers.max()) and np.isfinite(numbers.min())):
        raise ProtocolError("a number is not finite")
