"""How the codecs look at numbers: as bfloat16, and in rows of one width.

A bfloat16 is the upper half of a float32, so widening one is a shift of bits and gives the same
number on every machine. Knows nothing of frames or of what the numbers mean.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bits16 = npt.NDArray[np.uint16]
Integers = npt.NDArray[Any]  # of any width

STORED_16 = np.dtype("<u2")
INFINITE_BF16 = 0x7F80  # the least bits, without the sign, that are no number


def to_bf16(numbers: Floats) -> Bits16:
    """The nearest bfloat16 of finite numbers, ties to even; one that is finite too."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    halves = rounded.astype(np.uint16)
    # The largest float32 would round to infinity: the number before that is still within 2^-8.
    halves -= (halves & np.uint16(0x7FFF)) == INFINITE_BF16
    return halves


def to_bf16_upwards(numbers: Floats) -> Bits16:
    """The least bfloat16 that is no less, of numbers that are not negative."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    return ((bits + np.uint32(0xFFFF)) >> np.uint32(16)).astype(np.uint16)


def from_bf16(halves: Integers) -> Floats:
    wide = halves.astype(np.uint32)
    wide <<= np.uint32(16)
    return wide.view(np.float32)


def in_rows(numbers: Floats, width: int) -> Floats:
    """The numbers in rows, the last one filled up with zeros; a view where nothing is missing."""
    missing = -numbers.size % width
    if missing:
        numbers = np.concatenate([numbers, np.zeros(missing, np.float32)])
    return numbers.reshape(-1, width)
