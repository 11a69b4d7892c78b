"""The codec `sparse`: sends the largest few of every 4096 numbers, as signs and two magnitudes.

Their places are encoded by the gaps between them, with Rice codes: a gap is `quotient << low |
rest`. A quotient is written in unary, as that many zeros and a one, and the rest in `low` bits.
With 64 places among 4096, each place costs 7.5 bits; the entropy is 7.4. Numpy reads and writes the
streams without a loop. Streams come from untrusted machines: an invalid one raises ProtocolError.
"""

import struct
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import numpy as np
import numpy.typing as npt

from blocktrain.codec.dense import INFINITE_BF16, STORED_16, Bits16, from_bf16, to_bf16
from blocktrain.errors import ConfigError, ProtocolError
from blocktrain.numerics import Floats, Integers

Bits8 = npt.NDArray[np.uint8]

CHUNK = 4096
# A final update sends this many times more numbers: what earlier ones left out is spread widely.
FINAL_UPDATE = 16
MAGNITUDE = np.uint32(0x7FFFFFFF)
FRAME_HEADER = struct.Struct("<IB")
MOST_LOW_BITS = 15


class CodecSettings(Protocol):
    """A run's settings of its codec, as in `config.SwarmConfig`."""

    @property
    def codec(self) -> str: ...
    @property
    def top_k_per_4096(self) -> int: ...
    @property
    def top_k_per_4096_down(self) -> int:
        """`top_k_per_4096` for deltas. 0: as many as a version's updates send together."""
        ...


@dataclass(frozen=True)
class Sparse:
    """Sends the `top_k` largest of every 4096 numbers."""

    top_k: int
    name: ClassVar[str] = "sparse"
    code: ClassVar[int] = 3
    left_out: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= CHUNK:
            raise ConfigError(
                f"the codec sparse sends 1 to {CHUNK} of {CHUNK} numbers, not {self.top_k}"
            )

    @classmethod
    def for_update(cls, settings: CodecSettings, *, final: bool) -> Self:
        return cls(min(settings.top_k_per_4096 * (FINAL_UPDATE if final else 1), CHUNK))

    @classmethod
    def for_delta(cls, settings: CodecSettings, updates: int, *, final: bool) -> Self:
        """By default, a delta sends as many numbers as its updates together."""
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
        # One more byte, since planes and quotients are both padded to whole bytes.
        return FRAME_HEADER.size + 4 * _chunk_count(count) + -(-bits // 8) + 1

    def encode(self, numbers: Floats) -> bytes:
        chunks = np.pad(numbers, (0, -numbers.size % CHUNK)).reshape(-1, CHUNK)
        # As integers, magnitudes have the same order and are sorted twice as fast.
        magnitudes = chunks.view(np.uint32) & MAGNITUDE
        largest = _partitioned(magnitudes, CHUNK - self.top_k)[:, CHUNK - self.top_k :]
        places = _places_of(magnitudes, largest[:, 0], self.top_k)
        levels = _best_levels(np.sort(largest, axis=1).view(np.float32))
        values = chunks.reshape(-1)[places]
        large = _nearer_to_large(np.abs(values), levels[places // CHUNK])
        gaps = gaps_between(places)
        low = best_parameter(gaps)
        header = FRAME_HEADER.pack(places.size, low) + levels.astype(STORED_16).tobytes()
        planes = _packed_planes([np.signbit(values), large], gaps, low)
        return header + planes + write_quotients(gaps >> low)

    def decode(self, data: bytes, count: int) -> Floats:
        levels, negative, large, gaps = _cut(data, count)
        places = places_after(gaps)
        if places.size and places[-1] >= count:
            raise ProtocolError("a kept number is past the end of its frame")
        chunks = places // CHUNK
        if np.bincount(chunks, minlength=1).max() > self.top_k:
            raise ProtocolError(f"a chunk keeps more than {self.top_k} numbers")
        bits = np.zeros(count, np.uint32)
        magnitudes = levels[chunks, large].astype(np.uint32)
        bits[places] = (magnitudes << np.uint32(16)) | (negative.astype(np.uint32) << 31)
        return bits.view(np.float32)


def _partitioned(magnitudes: npt.NDArray[np.uint32], at: int) -> npt.NDArray[np.uint32]:
    """Reorder each row: its largest numbers are from index `at` on. If most numbers are zeros, as
    in sums of decoded updates, numpy sorts many times faster than it partitions."""
    mostly_zeros = 2 * np.count_nonzero(magnitudes) < magnitudes.size
    return np.sort(magnitudes, axis=1) if mostly_zeros else np.partition(magnitudes, at, axis=1)


def _places_of(magnitudes: npt.NDArray[np.uint32], least: Integers, most: int) -> Integers:
    """The places of the numbers to keep, over all chunks. Zeros are not kept. Of equal numbers the
    first ones are kept, so that every machine encodes the same bytes."""
    chosen = magnitudes >= np.maximum(least, 1)[:, None]
    surplus = chosen.sum(axis=1) - most
    for chunk in np.flatnonzero(surplus > 0):
        equals = np.flatnonzero(magnitudes[chunk] == least[chunk])
        chosen[chunk, equals[-surplus[chunk] :]] = False
    return np.flatnonzero(chosen)


def _best_levels(rising: Floats) -> Bits16:
    """The two magnitudes that approximate the numbers of each row best. Rows are sorted, smallest
    first; their leading zeros do not count.

    The squared error is least at the cut where sum^2 / count of the small ones plus sum^2 / count
    of the large ones is greatest. Both sums are accumulated: the difference from a total would lose
    small numbers beside large ones.
    """
    width = rising.shape[1]
    small = np.zeros(rising.shape)
    np.cumsum(rising[:, :-1], axis=1, dtype=np.float64, out=small[:, 1:])
    large = np.cumsum(rising[:, ::-1], axis=1, dtype=np.float64)[:, ::-1]
    zeros = width - np.count_nonzero(rising, axis=1)[:, None]
    small_counts = np.maximum(np.arange(width) - zeros, 1)
    large_counts = width - np.arange(width)  # counts zeros too, but that is never the best cut
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


def _cut(data: bytes, count: int) -> tuple[Bits16, Bits8, Bits8, Integers]:
    """Cut an encoded frame into its parts: both levels of every chunk, then for every kept number
    its sign, which of the two levels it has, and the gap before it."""
    planes_start = FRAME_HEADER.size + 4 * _chunk_count(count)
    if len(data) < planes_start:
        raise ProtocolError(
            f"the frame is truncated: {len(data)} bytes cannot hold {count} numbers"
        )
    places, low = FRAME_HEADER.unpack_from(data)
    if low > MOST_LOW_BITS:
        raise ProtocolError(
            f"the frame's gaps have {low} low bits; at most {MOST_LOW_BITS} are allowed"
        )
    quotients_start = planes_start + -(-places * (2 + low) // 8)
    if len(data) < quotients_start:
        raise ProtocolError(
            f"the frame is truncated: {len(data)} bytes cannot hold {places} numbers' places"
        )
    levels = np.frombuffer(data[FRAME_HEADER.size : planes_start], STORED_16)
    if levels.size and levels.max() >= INFINITE_BF16:
        raise ProtocolError("a magnitude is negative or not finite")
    planes = _unpacked_planes(data[planes_start:quotients_start], places, 2 + low)
    gaps = read_quotients(data[quotients_start:], places) << low
    for bit in range(low):
        gaps |= planes[2 + bit].astype(gaps.dtype) << bit
    return levels.reshape(-1, 2), planes[0], planes[1], gaps


def _unpacked_planes(packed: bytes, places: int, planes: int) -> Bits8:
    bits = np.unpackbits(np.frombuffer(packed, np.uint8))
    if bits[places * planes :].any():
        raise ProtocolError("bits are set after the last kept number")
    return bits[: places * planes].reshape(planes, places)


def _chunk_count(count: int) -> int:
    return -(-count // CHUNK)


def gaps_between(places: Integers) -> Integers:
    """The count of skipped numbers before each place."""
    return np.diff(places, prepend=-1) - 1


def places_after(gaps: Integers) -> Integers:
    return np.cumsum(gaps + 1) - 1


def best_parameter(gaps: Integers) -> int:
    """The number of low bits that encodes the gaps in the fewest bits."""
    costs = [gaps.size * low + int((gaps >> low).sum()) for low in range(MOST_LOW_BITS + 1)]
    return costs.index(min(costs))


def most_bits(places: int, among: int) -> int:
    """The most bits that it takes to encode which `places`, or fewer, of `among` numbers are
    kept."""
    # Another place costs at least a bit and shortens the gaps by one, so the most places are worst.
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
