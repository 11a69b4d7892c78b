"""The format of an encoded array of float32 numbers: frames of 65,536 numbers.

    magic, version, codec, its parameter, numbers in a frame       12 bytes
    the frames, end to end
    the length of every frame, u32 each
    count of numbers, u64

All little-endian. Lengths and count come last, so that writing needs one pass and the memory of one
frame; the file's size tells where they are. Every frame is encoded independently, so that a merge
decodes only the frame it needs. Files come from untrusted machines: every length is checked before
anything is read or allocated for it, and every fault raises ProtocolError. Decoded numbers have the
same bits on every machine.
"""

import struct
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from blocktrain.codec import Codec, codec_of
from blocktrain.errors import ProtocolError
from blocktrain.numerics import Floats, Integers

MAGIC = b"BTUP"
VERSION = 1
FRAME_NUMBERS = 1 << 16

_HEADER = struct.Struct("<4sBBHI")
_COUNT = struct.Struct("<Q")
_LENGTH = np.dtype("<u4")


def encode(
    parts: Floats | Iterable[Floats],
    codec: Codec,
    keep: Callable[[Floats], object] = lambda residual: None,
) -> Iterator[bytes]:
    """Encode the numbers of all parts, end to end. The cuts between parts make no difference.
    Raises ValueError if a number is not finite.

    `keep` gets the residual, frame by frame: what the encoding left out and the next update must
    contain.
    """

    def frames() -> Iterator[tuple[int, bytes]]:
        for frame in framed(parts):
            data = encode_frame(codec, frame)
            keep(np.subtract(frame, codec.decode(data, frame.size)))
            yield frame.size, data

    return enclose(codec, frames())


def encode_frame(codec: Codec, numbers: Floats) -> bytes:
    if not np.isfinite(numbers).all():
        raise ValueError("only finite numbers can be encoded")
    return codec.encode(numbers)


def framed(parts: Floats | Iterable[Floats]) -> Iterator[Floats]:
    """Cut the numbers of all parts into frames; each is valid until the next one is requested."""
    frame = np.empty(FRAME_NUMBERS, np.float32)
    filled = 0
    for part in [parts] if isinstance(parts, np.ndarray) else parts:
        if part.dtype != np.float32:
            raise ValueError(f"only float32 can be encoded, not {part.dtype}")
        rest = part.reshape(-1)
        while rest.size:
            if not filled and rest.size >= FRAME_NUMBERS:
                yield rest[:FRAME_NUMBERS]
                rest = rest[FRAME_NUMBERS:]
                continue
            piece = rest[: FRAME_NUMBERS - filled]
            frame[filled : filled + piece.size] = piece
            rest = rest[piece.size :]
            filled += piece.size
            if filled == FRAME_NUMBERS:
                yield frame
                filled = 0
    if filled:
        yield frame[:filled]


def enclose(codec: Codec, frames: Iterable[tuple[int, bytes]]) -> Iterator[bytes]:
    """The file of these encoded frames, each with its count of numbers."""
    yield _HEADER.pack(MAGIC, VERSION, codec.code, codec.parameter, FRAME_NUMBERS)
    count = 0
    lengths: list[int] = []
    for numbers, data in frames:
        count += numbers
        lengths.append(len(data))
        yield data
    yield np.array(lengths, _LENGTH).tobytes() + _COUNT.pack(count)


def largest_encoded_size(codec: Codec, count: int) -> int:
    """The largest file of this many numbers; a larger one can be refused without reading it."""
    whole, rest = divmod(count, FRAME_NUMBERS)
    frames = whole * codec.largest_frame(FRAME_NUMBERS)
    if rest:
        frames += codec.largest_frame(rest)
    return _HEADER.size + frames + _frame_count(count) * _LENGTH.itemsize + _COUNT.size


class UpdateDecoder:
    """Decodes a file of `size` bytes and `count` numbers, frame by frame. `read(offset, length)` is
    only called for bytes inside the file."""

    def __init__(self, read: Callable[[int, int], bytes], size: int, count: int) -> None:
        self._read = read
        self.count = count
        self.frame_count = _frame_count(count)
        behind_frames = self.frame_count * _LENGTH.itemsize + _COUNT.size
        frames_end = size - behind_frames
        if frames_end < _HEADER.size:
            raise ProtocolError(f"{size} bytes are too few for {count} encoded numbers")
        header = _HEADER.unpack(self._bytes(0, _HEADER.size))
        magic, version, code, parameter, frame_numbers = header
        if (magic, version, frame_numbers) != (MAGIC, VERSION, FRAME_NUMBERS):
            raise ProtocolError(f"this is not an encoded array of format version {VERSION}")
        self.codec = codec_of(code, parameter)
        lengths = self._read_lengths(frames_end, behind_frames)
        self._starts = _HEADER.size + np.concatenate([[0], np.cumsum(lengths)])
        if self._starts[-1] != frames_end:
            raise ProtocolError(f"frames end at byte {self._starts[-1]} instead of {frames_end}")

    def frame(self, index: int) -> Floats:
        """The numbers of one frame; they begin at number index x FRAME_NUMBERS."""
        if not 0 <= index < self.frame_count:
            raise IndexError(f"there is no frame {index}, only {self.frame_count} frames")
        start, end = (int(offset) for offset in self._starts[index : index + 2])
        return self.codec.decode(self._bytes(start, end - start), self._frame_size(index))

    def frames(self) -> Iterator[Floats]:
        return (self.frame(index) for index in range(self.frame_count))

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
            raise ProtocolError("a frame is too long for its numbers")
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
