"""A long array of float32 in few bytes, encoded in frames of 65,536 numbers.

    magic, version, codec, its parameter, numbers in a frame       12 bytes
    the frames, end to end
    the length of every frame, u32 each
    count of numbers, u64

All little endian. Counts and lengths are at the end, so that writing needs one pass and the memory
of one frame; their place follows from the size of the whole. Every frame is encoded by itself, so
that a merge decodes only the frame it needs. What is read comes from untrusted machines: every
length is checked before anything is read or allocated for it, and whatever is wrong is a
ProtocolError. Decoded numbers are the same bits on every machine. Knows neither tensors nor files.
"""

import struct
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from blocktrain.codec.registry import Codec, codec_of
from blocktrain.errors import ProtocolError
from blocktrain.numerics.quantization import Floats, Integers

MAGIC = b"BTUP"
VERSION = 1
FRAME_NUMBERS = 1 << 16

_HEADER = struct.Struct("<4sBBHI")
_COUNT = struct.Struct("<Q")
_LENGTH = np.dtype("<u4")


def encode(parts: Floats | Iterable[Floats], codec: Codec) -> Iterator[bytes]:
    """The numbers of all parts, end to end: the same bytes however they are cut into parts.
    ValueError if a number is not finite."""
    return enclose(codec, ((frame.size, encode_frame(codec, frame)) for frame in framed(parts)))


def encode_frame(codec: Codec, numbers: Floats) -> bytes:
    if not np.isfinite(numbers).all():
        raise ValueError("only finite numbers can be encoded")
    return codec.encode(numbers)


def framed(parts: Floats | Iterable[Floats]) -> Iterator[Floats]:
    """The numbers of all parts, frame by frame; a frame is valid until the next one is taken."""
    frame = np.empty(FRAME_NUMBERS, np.float32)
    filled = 0
    for part in [parts] if isinstance(parts, np.ndarray) else parts:
        if part.dtype != np.float32:
            raise ValueError(f"only float32 can be encoded, not {part.dtype}")
        left = part.reshape(-1)
        while left.size:
            if not filled and left.size >= FRAME_NUMBERS:
                yield left[:FRAME_NUMBERS]
                left = left[FRAME_NUMBERS:]
                continue
            taken = left[: FRAME_NUMBERS - filled]
            frame[filled : filled + taken.size] = taken
            left = left[taken.size :]
            filled += taken.size
            if filled == FRAME_NUMBERS:
                yield frame
                filled = 0
    if filled:
        yield frame[:filled]


def enclose(codec: Codec, frames: Iterable[tuple[int, bytes]]) -> Iterator[bytes]:
    """A whole file from encoded frames, each with its count of numbers."""
    yield _HEADER.pack(MAGIC, VERSION, codec.code, codec.parameter, FRAME_NUMBERS)
    count = 0
    lengths: list[int] = []
    for numbers, data in frames:
        count += numbers
        lengths.append(len(data))
        yield data
    yield np.array(lengths, _LENGTH).tobytes() + _COUNT.pack(count)


def largest_encoded_size(codec: Codec, count: int) -> int:
    """The most bytes that this many numbers take; a larger file can be refused unread."""
    whole, rest = divmod(count, FRAME_NUMBERS)
    frames = whole * codec.largest_frame(FRAME_NUMBERS)
    if rest:
        frames += codec.largest_frame(rest)
    return _HEADER.size + frames + _frame_count(count) * _LENGTH.itemsize + _COUNT.size


class UpdateDecoder:
    """Decodes a file of `size` bytes and a known count of numbers frame by frame. `read(offset,
    length)` is only called for bytes inside the file."""

    def __init__(self, read: Callable[[int, int], bytes], size: int, count: int) -> None:
        self._read = read
        self.count = count
        self.frame_count = _frame_count(count)
        behind_frames = self.frame_count * _LENGTH.itemsize + _COUNT.size
        frames_end = size - behind_frames
        if frames_end < _HEADER.size:
            raise ProtocolError(f"{size} bytes are too few for {count} encoded numbers")
        self.codec = self._read_codec()
        lengths = self._read_lengths(frames_end, behind_frames)
        self._starts = _HEADER.size + np.concatenate([[0], np.cumsum(lengths)])
        if self._starts[-1] != frames_end:
            raise ProtocolError(f"frames end at byte {self._starts[-1]} instead of {frames_end}")

    def frame(self, index: int) -> Floats:
        """The numbers from index x FRAME_NUMBERS on, as many as are in one frame."""
        if not 0 <= index < self.frame_count:
            raise IndexError(f"there are {self.frame_count} frames and none of index {index}")
        start, end = (int(place) for place in self._starts[index : index + 2])
        return self.codec.decode(self._bytes(start, end - start), self._frame_size(index))

    def frames(self) -> Iterator[Floats]:
        return (self.frame(index) for index in range(self.frame_count))

    def _read_codec(self) -> Codec:
        header = self._bytes(0, _HEADER.size)
        magic, version, code, parameter, frame_numbers = _HEADER.unpack(header)
        if (magic, version, frame_numbers) != (MAGIC, VERSION, FRAME_NUMBERS):
            raise ProtocolError("this is no encoded array, or it has another format version")
        return codec_of(code, parameter)

    def _read_lengths(self, start: int, length: int) -> Integers:
        data = self._bytes(start, length)
        (count,) = _COUNT.unpack(data[-_COUNT.size :])
        if count != self.count:
            raise ProtocolError(f"{count} numbers are encoded instead of {self.count}")
        lengths = np.frombuffer(data[: -_COUNT.size], _LENGTH).astype(np.int64)
        limits = np.full(self.frame_count, self.codec.largest_frame(FRAME_NUMBERS))
        if self.frame_count:
            limits[-1] = self.codec.largest_frame(self._frame_size(self.frame_count - 1))
        if (lengths > limits).any():
            raise ProtocolError("a frame is longer than its numbers can need")
        return lengths

    def _frame_size(self, index: int) -> int:
        return min(FRAME_NUMBERS, self.count - index * FRAME_NUMBERS)

    def _bytes(self, start: int, length: int) -> bytes:
        data = self._read(start, length)
        if len(data) != length:
            raise ProtocolError(f"{len(data)} bytes were read instead of {length}")
        return data


def _frame_count(count: int) -> int:
    return -(-count // FRAME_NUMBERS)


def encode_with_residual(
    codec: Codec, deltas: Floats | Iterable[Floats], keep: Callable[[Floats], object]
) -> Iterator[bytes]:
    """An encoded update. What the encoding leaves out, its residual, goes to `keep` frame by frame;
    it belongs into the next update."""

    def frames() -> Iterator[tuple[int, bytes]]:
        for delta in framed(deltas):
            data = encode_frame(codec, delta)
            keep(np.subtract(delta, codec.decode(data, delta.size)))
            yield delta.size, data

    return enclose(codec, frames())
