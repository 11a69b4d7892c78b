"""float32 in fewer bits: bfloat16, and whole multiples of a row's scale in 8 bits.

A bfloat16 is the upper half of a float32, so widening one is a shift of bits and gives the same
number on every machine. Knows no files and no messages.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bits16 = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.int8]
Integers = npt.NDArray[Any]  # of any width

INFINITE_BF16 = 0x7F80  # the bits of infinity: without the sign, all from here on are not finite
STEPS = 127  # from zero to the largest number of a row
LEAST_SCALE = np.float32(2.0**-126)  # less is subnormal, which some machines take for zero


def to_bf16(numbers: Floats) -> Bits16:
    """The nearest bfloat16 of finite numbers, ties to even; always finite."""
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
    """Rounds numbers >= 0 up to the next bfloat16."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    return ((bits + np.uint32(0xFFFF)) >> np.uint32(16)).astype(np.uint16)


def from_bf16(halves: Integers) -> Floats:
    wide = halves.astype(np.uint32)
    wide <<= np.uint32(16)
    return wide.view(np.float32)


def row_scales(rows: Floats) -> Floats:
    """A 127th of each row's largest magnitude; rows are the last dimension, which stays as 1."""
    largest: Floats = np.abs(rows).max(axis=-1, keepdims=True, initial=0)
    return largest / np.float32(STEPS)


def usable_scales(scales: Floats, most: np.float32) -> Floats:
    """The same scales, but at most `most`, and zero instead of a subnormal number."""
    return np.where(scales < LEAST_SCALE, np.float32(0), np.minimum(scales, most))


def to_int8(rows: Floats, scales: Floats) -> Bytes:
    """Each number as the nearest multiple of its row's scale; zeros where the scale is zero."""
    multiples = rows / np.where(scales == 0, np.float32(np.inf), scales)
    np.rint(multiples, out=multiples)
    np.clip(multiples, -STEPS, STEPS, out=multiples)
    return multiples.astype(np.int8)
