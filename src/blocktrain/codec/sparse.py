"""The codec `sparse`: of every 4096 numbers the largest few, as one of two magnitudes with a sign.

Where they are is said by the gaps between them, Rice coded: a gap is `quotient << low bits | rest`.
The quotients are one stream of bits, each as many zeros and a one; the low bits all have the same
width. Of 64 places drawn from 4096 each costs 7.5 bits, and 7.4 is the least that is possible.
Numpy reads and writes the streams without a loop. Streams to be read may be anything: one that is
not valid is a ProtocolError.
"""

import struct
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import numpy as np
import numpy.typing as npt

from blocktrain.errors import ConfigError, ProtocolError
from blocktrain.numerics.quantization import (
    INFINITE_BF16,
    Bits16,
    Floats,
    Integers,
    from_bf16,
    to_bf16,
)

CHUNK = 4096
# Times as many numbers as in other updates, because what those left out lies anywhere.
FINAL_UPDATE = 16
MAGNITUDE = np.uint32(0x7FFFFFFF)
STORED_16 = np.dtype("<u2")
FRAME_HEADER = struct.Struct("<IB")
MOST_LOW_BITS = 15


class SparseSettings(Protocol):
    """How many of every 4096 numbers are sent; `..._down`: in a delta, 0 if that depends on its
    updates."""

    @property
    def top_k_per_4096(self) -> int: ...
    @property
    def top_k_per_4096_down(self) -> int: ...


@dataclass(frozen=True)
class Sparse:
    """The `top_k` largest of every 4096 numbers."""

    top_k: int
    name: ClassVar[str] = "sparse"
    code: ClassVar[int] = 3

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= CHUNK:
            raise ConfigError(f"the codec sparse sends 1 to {CHUNK} of {CHUNK}, not {self.top_k}")

    @classmethod
    def for_update(cls, settings: SparseSettings, *, final: bool) -> Self:
        return cls(min(settings.top_k_per_4096 * (FINAL_UPDATE if final else 1), CHUNK))

    @classmethod
    def for_delta(cls, settings: SparseSettings, updates: int, *, final: bool) -> Self:
        """Room for all that its updates name, unless the settings say less."""
        if final:
            return cls(min(settings.top_k_per_4096 * updates * FINAL_UPDATE, CHUNK))
        return cls(settings.top_k_per_4096_down or min(settings.top_k_per_4096 * updates, CHUNK))

    @classmethod
    def from_parameter(cls, parameter: int) -> Self:
        try:
            return cls(parameter)
        except ConfigError as error:
            raise ProtocolError(str(error)) from None

    @property
    def parameter(self) -> int:
        return self.top_k

    def largest_frame(self, count: int) -> int:
        whole, rest = divmod(count, CHUNK)
        most = whole * self.top_k + min(self.top_k, rest)
        bits = 2 * most + most_bits(most, count)
        # One more byte, because planes and quotients both end at a whole one.
        return FRAME_HEADER.size + 4 * _chunk_count(count) + -(-bits // 8) + 1

    def encode(self, numbers: Floats) -> bytes:
        chunks = np.pad(numbers, (0, -numbers.size % CHUNK)).reshape(-1, CHUNK)
        # As whole numbers, magnitudes have the same order and are sorted twice as fast.
        magnitudes = chunks.view(np.uint32) & MAGNITUDE
        largest = _partitioned(magnitudes, CHUNK - self.top_k)[:, CHUNK - self.top_k :]
        places = _places_of(magnitudes, largest[:, 0], self.top_k)
        levels = _best_levels(np.sort(largest, axis=1).view(np.float32))
        kept = chunks.reshape(-1)[places]
        large = _nearer_to_large(np.abs(kept), levels[places // CHUNK])
        gaps = gaps_between(places)
        low = best_parameter(gaps)
        return b"".join(
            [
                FRAME_HEADER.pack(places.size, low),
                levels.astype(STORED_16, copy=False).tobytes(),
                _packed_planes([np.signbit(kept), large], gaps, low),
                write_quotients(gaps >> low),
            ]
        )

    def decode(self, data: bytes, count: int) -> Floats:
        parts = _cut(data, count)
        places = places_after(parts.gaps)
        if places.size and places[-1] >= count:
            raise ProtocolError("a kept number is past the end of its frame")
        chunks = places // CHUNK
        if np.bincount(chunks, minlength=1).max() > self.top_k:
            raise ProtocolError(f"a chunk keeps more than {self.top_k} numbers")
        bits = np.zeros(count, np.uint32)
        levels = parts.levels[chunks, parts.large].astype(np.uint32)
        bits[places] = (levels << np.uint32(16)) | (parts.negative.astype(np.uint32) << 31)
        return bits.view(np.float32)


@dataclass(frozen=True)
class _Parts:
    """The parts of an encoded frame."""

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
        raise ProtocolError(
            f"the frame is truncated: {len(data)} bytes cannot hold {count} numbers"
        )
    kept, low = FRAME_HEADER.unpack_from(data)
    if low > MOST_LOW_BITS:
        raise ProtocolError(f"a gap has at most {MOST_LOW_BITS} low bits, not {low}")
    quotients_start = planes_start + -(-kept * (2 + low) // 8)
    if len(data) < quotients_start:
        raise ProtocolError(
            f"the frame is truncated: {len(data)} bytes cannot hold {kept} kept numbers"
        )
    levels = np.frombuffer(data[FRAME_HEADER.size : planes_start], STORED_16)
    if levels.size and levels.max() >= INFINITE_BF16:
        raise ProtocolError("a magnitude is negative or not finite")
    planes = _unpacked_planes(data[planes_start:quotients_start], kept, 2 + low)
    gaps = read_quotients(data[quotients_start:], kept) << low
    for bit in range(low):
        gaps |= planes[2 + bit].astype(gaps.dtype) << bit
    return _Parts(levels.reshape(-1, 2), planes[0], planes[1], gaps)


def _unpacked_planes(packed: bytes, kept: int, planes: int) -> npt.NDArray[np.uint8]:
    bits = np.unpackbits(np.frombuffer(packed, np.uint8))
    if bits[kept * planes :].any():
        raise ProtocolError("bits are set after the last kept number")
    return bits[: kept * planes].reshape(planes, kept)


def _chunk_count(count: int) -> int:
    return -(-count // CHUNK)


def gaps_between(places: Integers) -> Integers:
    """How many numbers are left out before each place."""
    return np.diff(places, prepend=-1) - 1


def places_after(gaps: Integers) -> Integers:
    return np.cumsum(gaps + 1) - 1


def best_parameter(gaps: Integers) -> int:
    """The number of low bits with which the gaps take the fewest bits."""
    costs = [gaps.size * low + int((gaps >> low).sum()) for low in range(MOST_LOW_BITS + 1)]
    return costs.index(min(costs))


def most_bits(places: int, among: int) -> int:
    """The most bits that this many places, or fewer, take among this many numbers."""
    # One more place costs a bit or more and shortens the gaps by one: the most places are worst.
    return min(places * (low + 1) + ((among - places) >> low) for low in range(MOST_LOW_BITS + 1))


def write_quotients(quotients: Integers) -> bytes:
    ends = places_after(quotients)
    bits = np.zeros(int(ends[-1]) + 1 if ends.size else 0, np.bool_)
    bits[ends] = True
    return np.packbits(bits).tobytes()


def read_quotients(stream: bytes, count: int) -> Integers:
    ends = np.flatnonzero(np.unpackbits(np.frombuffer(stream, np.uint8)))
    used = int(ends[-1]) + 1 if ends.size else 0
    if ends.size != count or len(stream) != -(-used // 8):
        raise ProtocolError(f"a stream of {len(stream)} bytes does not hold {count} quotients")
    return gaps_between(ends)
