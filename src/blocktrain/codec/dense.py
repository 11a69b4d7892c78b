"""How the codecs look at numbers: as bfloat16, and in rows of one width.

A bfloat16 is the upper half of a float32, so widening one is a shift of bits and gives the same
number on every machine. Knows nothing of frames or of what the numbers mean.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from blocktrain.errors import ProtocolError

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


GROUP = 256
STEPS = 127  # from zero to the largest of a group
LEAST_SCALE = np.float32(2.0**-126)
LARGEST_SCALE = np.float32(2.0**121 * (1 + 2.0**-7))  # the largest bfloat16 of which 127 is finite


@dataclass(frozen=True)
class Bf16:
    """Every number to 8 bits of precision."""

    code: ClassVar[int] = 1
    parameter: ClassVar[int] = 0

    def largest_frame(self, count: int) -> int:
        return 2 * count

    def encode(self, numbers: Floats) -> bytes:
        return to_bf16(numbers).astype(STORED_16, copy=False).tobytes()

    def decode(self, data: bytes, count: int) -> Floats:
        _check_length(data, self.largest_frame(count))
        halves = np.frombuffer(data, STORED_16)
        if count and (halves & 0x7FFF).max() >= INFINITE_BF16:
            raise ProtocolError("an encoded number is not finite")
        return from_bf16(halves)


@dataclass(frozen=True)
class Int8:
    """Every number as a whole multiple of its group's scale: off by half a scale at most."""

    code: ClassVar[int] = 2
    parameter: ClassVar[int] = 0

    def largest_frame(self, count: int) -> int:
        return 2 * _group_count(count) + count

    def encode(self, numbers: Floats) -> bytes:
        groups = in_rows(numbers, GROUP)
        scales = _scales(groups)
        # Divided by infinity, the numbers of a group that has no scale become zeros.
        multiples = groups / np.where(scales == 0, np.float32(np.inf), scales)[:, None]
        np.rint(multiples, out=multiples)
        np.clip(multiples, -STEPS, STEPS, out=multiples)
        stored = multiples.astype(np.int8).reshape(-1)[: numbers.size]
        return to_bf16(scales).astype(STORED_16, copy=False).tobytes() + stored.tobytes()

    def decode(self, data: bytes, count: int) -> Floats:
        _check_length(data, self.largest_frame(count))
        scales = from_bf16(np.frombuffer(data, STORED_16, _group_count(count)))
        usable = (scales == 0) | ((scales >= LEAST_SCALE) & (scales <= LARGEST_SCALE))
        if not usable.all():
            raise ProtocolError("a scale is negative, subnormal or too large")
        multiples = np.frombuffer(data, np.int8, count, offset=2 * scales.size)
        if count and multiples.min() < -STEPS:
            raise ProtocolError("a number is more than 127 scales")
        rows = in_rows(multiples.astype(np.float32), GROUP)
        return (rows * scales[:, None]).reshape(-1)[:count]


def _scales(groups: Floats) -> Floats:
    """A 127th of each group's largest, rounded up to a bfloat16; zero where that is subnormal."""
    largest = np.abs(groups).max(axis=1, initial=0)
    scales = from_bf16(to_bf16_upwards(largest / np.float32(STEPS)))
    return np.where(scales < LEAST_SCALE, np.float32(0), np.minimum(scales, LARGEST_SCALE))


def _group_count(count: int) -> int:
    return -(-count // GROUP)


def _check_length(data: bytes, length: int) -> None:
    if len(data) != length:
        raise ProtocolError(f"a frame has {len(data)} bytes, not {length}")
