"""The codecs that send every number: as a bfloat16 (`bf16`) or in 8 bits (`int8`)."""

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from blocktrain.errors import ProtocolError
from blocktrain.numerics.quantization import (
    INFINITE_BF16,
    LEAST_SCALE,
    STEPS,
    Floats,
    from_bf16,
    row_scales,
    to_bf16,
    to_bf16_upwards,
    to_int8,
    usable_scales,
)

STORED_16 = np.dtype("<u2")
GROUP = 256  # numbers that share a scale
LARGEST_SCALE = np.float32(2.0**121 * (1 + 2.0**-7))  # the largest bfloat16 of which 127 is finite


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
    """Every number to 8 bits of precision."""

    name: ClassVar[str] = "bf16"
    code: ClassVar[int] = 1

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
    """Every number as a whole multiple of its group's scale: off by half a scale at most."""

    name: ClassVar[str] = "int8"
    code: ClassVar[int] = 2

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
            raise ProtocolError(f"a number is more than {STEPS} scales")
        groups = _in_groups(multiples.astype(np.float32))
        return (groups * scales[:, None]).reshape(-1)[:count]


def _in_groups(numbers: Floats) -> Floats:
    """The numbers in rows of GROUP, the last one filled up with zeros."""
    return np.pad(numbers, (0, -numbers.size % GROUP)).reshape(-1, GROUP)


def _group_count(count: int) -> int:
    return -(-count // GROUP)


def _check_length(data: bytes, length: int) -> None:
    if len(data) != length:
        raise ProtocolError(f"a frame has {len(data)} bytes instead of {length}")
