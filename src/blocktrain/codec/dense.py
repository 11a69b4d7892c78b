"""The codecs `bf16` and `int8`, which send every number, and rounding functions for all codecs.

A bfloat16 is the upper half of a float32, so converting it to float32 is a bit shift and gives the
same number on every machine.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

from blocktrain.errors import ProtocolError
from blocktrain.numerics import Floats, Integers

Bits16 = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.int8]

INFINITE_BF16 = 0x7F80  # the bits of infinity; larger ones, without the sign, are NaN
STEPS = 127  # scales from zero to the largest number of a row
LEAST_SCALE = np.float32(2.0**-126)  # smaller numbers are subnormal: some machines use zero instead
STORED_16 = np.dtype("<u2")
GROUP = 256  # numbers that share a scale
LARGEST_SCALE = np.float32(
    2.0**121 * (1 + 2.0**-7)
)  # the largest bfloat16 that is finite times 127


def to_bf16(numbers: Floats) -> Bits16:
    """Round finite numbers to the nearest bfloat16, ties to even. The result is always finite."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    halves = rounded.astype(np.uint16)
    # Instead of infinity, use the largest bfloat16, which is within 2^-8 of any float32.
    halves -= (halves & np.uint16(0x7FFF)) == INFINITE_BF16
    return halves


def to_bf16_upwards(numbers: Floats) -> Bits16:
    """Round numbers >= 0 up to the next bfloat16."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    return ((bits + np.uint32(0xFFFF)) >> np.uint32(16)).astype(np.uint16)


def from_bf16(halves: Integers) -> Floats:
    wide = halves.astype(np.uint32)
    wide <<= np.uint32(16)
    return wide.view(np.float32)


def row_scales(rows: Floats) -> Floats:
    """1/127 of each row's largest magnitude. Rows are the last dimension, whose size becomes 1."""
    largest: Floats = np.abs(rows).max(axis=-1, keepdims=True, initial=0)
    return largest / np.float32(STEPS)


def usable_scales(scales: Floats, most: np.float32) -> Floats:
    """Limit scales to `most`, and replace subnormal ones by zero."""
    return np.where(scales < LEAST_SCALE, np.float32(0), np.minimum(scales, most))


def to_int8(rows: Floats, scales: Floats) -> Bytes:
    """Round each number to the nearest multiple of its row's scale; 0 if the scale is 0."""
    multiples = rows / np.where(scales == 0, np.float32(np.inf), scales)
    np.rint(multiples, out=multiples)
    np.clip(multiples, -STEPS, STEPS, out=multiples)
    return multiples.astype(np.int8)


class _Dense:
    """A codec without a parameter: the same for updates and for deltas."""

    parameter: ClassVar[int] = 0

    @classmethod
    def for_update(cls, settings: object, *, final: bool) -> Self:
        return cls()

    @classmethod
    def for_delta(cls, settings: object, updates: int, *, final: bool) -> Self:
        return cls()

    @classmethod
    def from_parameter(cls, parameter: int) -> Self:
        if parameter != cls.parameter:
            raise ProtocolError(f"this codec has no parameter, but {parameter} was sent")
        return cls()


@dataclass(frozen=True)
class Bf16(_Dense):
    """Every number, rounded to bfloat16."""

    name: ClassVar[str] = "bf16"
    code: ClassVar[int] = 1
    left_out: ClassVar[float] = 2.0**-8

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
class Int8(_Dense):
    """Every number, rounded to a multiple of its group's scale: off by half a scale at most."""

    name: ClassVar[str] = "int8"
    code: ClassVar[int] = 2
    left_out: ClassVar[float] = 2.0**-7

    def largest_frame(self, count: int) -> int:
        return 2 * _group_count(count) + count

    def encode(self, numbers: Floats) -> bytes:
        groups = _in_groups(numbers)
        scales = usable_scales(from_bf16(to_bf16_upwards(row_scales(groups))), LARGEST_SCALE)
        multiples = to_int8(groups, scales).reshape(-1)[: numbers.size]
        return to_bf16(scales).astype(STORED_16, copy=False).tobytes() + multiples.tobytes()

    def decode(self, data: bytes, count: int) -> Floats:
        _check_length(data, self.largest_frame(count))
        scales = from_bf16(np.frombuffer(data, STORED_16, _group_count(count)))
        usable = (scales == 0) | ((scales >= LEAST_SCALE) & (scales <= LARGEST_SCALE))
        if not usable.all():
            raise ProtocolError("a scale is negative, subnormal or too large")
        multiples = np.frombuffer(data, np.int8, count, offset=2 * scales.size)
        if count and multiples.min() < -STEPS:
            raise ProtocolError(f"an 8-bit number is below -{STEPS}, the least that is allowed")
        groups = _in_groups(multiples.astype(np.float32))
        return (groups * scales[:, None]).reshape(-1)[:count]


def _in_groups(numbers: Floats) -> Floats:
    """The numbers in rows of GROUP, the last one padded with zeros."""
    return np.pad(numbers, (0, -numbers.size % GROUP)).reshape(-1, GROUP)


def _group_count(count: int) -> int:
    return -(-count // GROUP)


def _check_length(data: bytes, length: int) -> None:
    if len(data) != length:
        raise ProtocolError(f"a frame has {len(data)} bytes instead of {length}")
