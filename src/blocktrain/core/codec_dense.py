"""Codecs that keep every number, in fewer bits: `bf16` and `int8`.

    bf16 frame   a bfloat16 for every number
    int8 frame   a scale for every group of 256 numbers, bfloat16; then an int8 for every number

An int8 of 7 bits times a bfloat16 of 8 fits into a float32 without rounding, so decoding is
exact, and the same on every machine. A scale is zero or an ordinary number, never a subnormal
one, because some machines take those for zero. Decoders expect the worst: whatever they are
given, it is numbers of the asked count, all finite, or a `ProtocolError`.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from blocktrain.core.codec_numbers import (
    INFINITE_BF16,
    STORED_16,
    Floats,
    from_bf16,
    in_rows,
    to_bf16,
    to_bf16_upwards,
)
from blocktrain.errors import ProtocolError

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
