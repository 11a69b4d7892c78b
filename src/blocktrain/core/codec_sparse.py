"""The codec that keeps few numbers: the largest of every chunk, each in two bits.

    u32, u8      count of numbers kept in the frame, Rice parameter r
    levels       for every chunk two bfloat16: its small and its large magnitude
    planes       2 + r bits for every kept number, plane by plane: all the signs, then whether
                 each is of the large magnitude, then the low bits of the gaps, lowest first
    quotients    the rest of the gaps, in unary (see `codec_rice`)

Gaps run through the whole frame, so which chunk a number belongs to follows from its place, and
a chunk of zeros costs its levels only. Both magnitudes are means, cut where the squared error is
least; where all kept numbers are equal, the small one is zero and nobody's. Decoding moves bits
and computes nothing, so it gives the same numbers everywhere; and it takes memory for bytes that
are there, not for counts that a frame claims.
"""

import struct
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from blocktrain.core import codec_rice as rice
from blocktrain.core.codec_numbers import (
    INFINITE_BF16,
    STORED_16,
    Bits16,
    Floats,
    Integers,
    from_bf16,
    in_rows,
    to_bf16,
)
from blocktrain.errors import ConfigError, ProtocolError

CHUNK = 4096
MAGNITUDE = np.uint32(0x7FFFFFFF)
FRAME_HEADER = struct.Struct("<IB")


@dataclass(frozen=True)
class Sparse:
    """The `kept` largest of every 4096 numbers, as one of two magnitudes with a sign."""

    kept: int = 64
    code: ClassVar[int] = 3

    def __post_init__(self) -> None:
        if not 1 <= self.kept <= CHUNK:
            raise ConfigError(f"of a chunk's numbers 1 to {CHUNK} are kept, not {self.kept}")

    @property
    def parameter(self) -> int:
        return self.kept

    def largest_frame(self, count: int) -> int:
        whole, rest = divmod(count, CHUNK)
        most = whole * self.kept + min(self.kept, rest)
        bits = 2 * most + rice.most_bits(most, count)
        # One more byte, because planes and quotients both end at a whole one.
        return FRAME_HEADER.size + 4 * _chunk_count(count) + -(-bits // 8) + 1

    def encode(self, numbers: Floats) -> bytes:
        chunks = in_rows(numbers, CHUNK)
        # As whole numbers, magnitudes have the same order and are sorted twice as fast.
        magnitudes = chunks.view(np.uint32) & MAGNITUDE
        largest = _partitioned(magnitudes, CHUNK - self.kept)[:, CHUNK - self.kept :]
        places = _places_of(magnitudes, largest[:, 0], self.kept)
        levels = _best_levels(np.sort(largest, axis=1).view(np.float32))
        kept = chunks.reshape(-1)[places]
        large = _nearer_to_large(np.abs(kept), levels[places // CHUNK])
        gaps = rice.gaps_between(places)
        low = rice.best_parameter(gaps)
        return b"".join(
            [
                FRAME_HEADER.pack(places.size, low),
                levels.astype(STORED_16, copy=False).tobytes(),
                _packed_planes([np.signbit(kept), large], gaps, low),
                rice.write_quotients(gaps >> low),
            ]
        )

    def decode(self, data: bytes, count: int) -> Floats:
        parts = _cut(data, count)
        places = rice.places_after(parts.gaps)
        if places.size and places[-1] >= count:
            raise ProtocolError("a place lies behind the end of its frame")
        chunks = places // CHUNK
        if np.bincount(chunks, minlength=1).max() > self.kept:
            raise ProtocolError(f"a chunk keeps more than {self.kept} numbers")
        bits = np.zeros(count, np.uint32)
        levels = parts.levels[chunks, parts.large].astype(np.uint32)
        bits[places] = (levels << np.uint32(16)) | (parts.negative.astype(np.uint32) << 31)
        return bits.view(np.float32)


@dataclass(frozen=True)
class _Parts:
    """A frame cut into what it holds."""

    levels: Bits16  # (chunks, 2)
    negative: npt.NDArray[np.uint8]
    large: npt.NDArray[np.uint8]
    gaps: Integers


def _partitioned(magnitudes: npt.NDArray[np.uint32], at: int) -> npt.NDArray[np.uint32]:
    """Every row with its largest from `at` on. Where most are zeros, as in sums of what was
    decoded, selecting among equals takes numpy many times as long as sorting them."""
    mostly_zeros = 2 * np.count_nonzero(magnitudes) < magnitudes.size
    return np.sort(magnitudes, axis=1) if mostly_zeros else np.partition(magnitudes, at, axis=1)


def _places_of(magnitudes: npt.NDArray[np.uint32], least: Integers, most: int) -> Integers:
    """Where in all chunks the kept numbers are: no zeros, and of equals the first ones, so that
    equal numbers make equal bytes everywhere."""
    chosen = magnitudes >= np.maximum(least, 1)[:, None]
    surplus = chosen.sum(axis=1) - most
    for chunk in np.flatnonzero(surplus > 0):
        equals = np.flatnonzero(magnitudes[chunk] == least[chunk])
        chosen[chunk, equals[-surplus[chunk] :]] = False
    return np.flatnonzero(chosen)


def _best_levels(rising: Floats) -> Bits16:
    """Two magnitudes for every row of rising ones; zeros at its beginning are not kept.

    The squared error is least where the squared sum of the small ones divided by their count,
    and the same of the large ones, together are most. Both sums are added up: a difference
    from the sum of all would lose small ones beside large ones.
    """
    width = rising.shape[1]
    small = np.zeros(rising.shape)
    np.cumsum(rising[:, :-1], axis=1, dtype=np.float64, out=small[:, 1:])
    large = np.cumsum(rising[:, ::-1], axis=1, dtype=np.float64)[:, ::-1]
    zeros = width - np.count_nonzero(rising, axis=1)[:, None]
    small_counts = np.maximum(np.arange(width) - zeros, 1)
    large_counts = width - np.arange(width)  # zeros too: that is never the best cut
    cuts = np.argmax(small**2 / small_counts + large**2 / large_counts, axis=1)[:, None]
    small_means = np.take_along_axis(small / small_counts, cuts, 1)
    large_means = np.take_along_axis(large / large_counts, cuts, 1)
    return to_bf16(np.hstack([small_means, large_means]).astype(np.float32))


def _nearer_to_large(magnitudes: Floats, levels: Bits16) -> npt.NDArray[np.bool_]:
    middles = from_bf16(levels) / np.float32(2)
    return magnitudes > middles[:, 0] + middles[:, 1]


def _packed_planes(planes: list[npt.NDArray[np.bool_]], gaps: Integers, low: int) -> bytes:
    low_bits = [((gaps >> bit) & 1).astype(np.bool_) for bit in range(low)]
    return np.packbits(np.concatenate([*planes, *low_bits])).tobytes()


def _cut(data: bytes, count: int) -> _Parts:
    planes_start = FRAME_HEADER.size + 4 * _chunk_count(count)
    if len(data) < planes_start:
        raise ProtocolError(f"a sparse frame of {count} numbers has more than {len(data)} bytes")
    kept, low = FRAME_HEADER.unpack_from(data)
    if low > rice.MOST_LOW_BITS:
        raise ProtocolError(f"a gap has {rice.MOST_LOW_BITS} low bits at most, not {low}")
    quotients_start = planes_start + -(-kept * (2 + low) // 8)
    if len(data) < quotients_start:
        raise ProtocolError(f"a frame that keeps {kept} numbers has more than {len(data)} bytes")
    levels = np.frombuffer(data[FRAME_HEADER.size : planes_start], STORED_16)
    if levels.size and levels.max() >= INFINITE_BF16:
        raise ProtocolError("a magnitude is negative or not finite")
    planes = _unpacked_planes(data[planes_start:quotients_start], kept, 2 + low)
    gaps = rice.read_quotients(data[quotients_start:], kept) << low
    for bit in range(low):
        gaps |= planes[2 + bit].astype(gaps.dtype) << bit
    return _Parts(levels.reshape(-1, 2), planes[0], planes[1], gaps)


def _unpacked_planes(packed: bytes, kept: int, planes: int) -> npt.NDArray[np.uint8]:
    bits = np.unpackbits(np.frombuffer(packed, np.uint8))
    if bits[kept * planes :].any():
        raise ProtocolError("bits are set behind the last kept number")
    return bits[: kept * planes].reshape(planes, kept)


def _chunk_count(count: int) -> int:
    return -(-count // CHUNK)
