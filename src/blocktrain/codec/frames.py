"""An update in few bytes: a long array of float32, encoded in frames of 65,536 numbers.

    magic, version, codec, its parameter, numbers in a frame       12 bytes
    the frames, one behind the other
    the length of every frame, u32 each
    count of numbers, u64

All little endian. Counts and lengths stand at the end, so that writing needs one pass and the
memory of one frame; their place follows from the size of the whole. Every frame is encoded by
itself, so that a merge decodes the frame it is at and no other. What is read comes from machines
nobody trusts: every length is checked before anything is read or allocated for it, and whatever
is wrong is a `ProtocolError`. Decoded numbers are the same bits on every machine. Knows neither
tensors nor files; `none`, an update that is not encoded, is only a name here.
"""

import struct
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from blocktrain.codec.dense import Bf16, Floats, Int8, Integers
from blocktrain.codec.sparse import CHUNK, Sparse
from blocktrain.errors import ConfigError, ProtocolError

Codec = Bf16 | Int8 | Sparse

NAMES = ("none", "bf16", "int8", "sparse")
MAGIC = b"BTUP"
VERSION = 1
FRAME_NUMBERS = 1 << 16
LAST_WORDS = 16  # times as many numbers as in other updates; what is owed lies in all of them

_HEADER = struct.Struct("<4sBBHI")
_COUNT = struct.Struct("<Q")
_LENGTH = np.dtype("<u4")


def codec_named(name: str, kept: int = 64) -> Codec | None:
    """The codec of a name in `NAMES`, None for `none`; `kept` matters to `sparse` only."""
    if name not in NAMES:
        raise ConfigError(f"no codec is named {name!r}; there are {', '.join(NAMES)}")
    known: dict[str, Codec] = {"bf16": Bf16(), "int8": Int8(), "sparse": Sparse(kept)}
    return known.get(name)


def top_k_of_final_update(kept: int) -> int:
    """Of every 4096 numbers, how many `sparse` keeps in a worker's last update of a block."""
    return min(LAST_WORDS * kept, CHUNK)


def encode(parts: Floats | Iterable[Floats], codec: Codec) -> Iterator[bytes]:
    """The numbers of all parts, one behind the other, encoded: the same bytes however they are
    cut into parts. A number that is not finite is a ValueError."""
    return enclose(codec, ((frame.size, encode_frame(codec, frame)) for frame in framed(parts)))


def encode_frame(codec: Codec, numbers: Floats) -> bytes:
    if not np.isfinite(numbers).all():
        raise ValueError("only finite numbers can be encoded")
    return codec.encode(numbers)


def framed(parts: Floats | Iterable[Floats]) -> Iterator[Floats]:
    """The numbers of all parts, frame by frame; a frame lasts until the next one is asked for."""
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
    """What stands before and behind the frames, and they: each with its count of numbers."""
    yield _HEADER.pack(MAGIC, VERSION, codec.code, codec.parameter, FRAME_NUMBERS)
    count = 0
    lengths: list[int] = []
    for numbers, data in frames:
        count += numbers
        lengths.append(len(data))
        yield data
    yield np.array(lengths, _LENGTH).tobytes() + _COUNT.pack(count)


def largest_encoded_size(codec: Codec, count: int) -> int:
    """No array of this many numbers takes more bytes; what does can be refused unread."""
    whole, rest = divmod(count, FRAME_NUMBERS)
    frames = whole * codec.largest_frame(FRAME_NUMBERS)
    if rest:
        frames += codec.largest_frame(rest)
    return _HEADER.size + frames + _frame_count(count) * _LENGTH.itemsize + _COUNT.size


class UpdateDecoder:
    """An encoded array of a known count, frame by frame, from `size` bytes that `read(offset,
    length)` gives; it is asked only for what is inside."""

    def __init__(self, read: Callable[[int, int], bytes], size: int, count: int) -> None:
        self._read = read
        self._last: tuple[int, Floats] | None = None
        self.count = count
        self.frame_count = _frame_count(count)
        behind_frames = self.frame_count * _LENGTH.itemsize + _COUNT.size
        frames_end = size - behind_frames
        if frames_end < _HEADER.size:
            raise ProtocolError(f"{count} encoded numbers have more than {size} bytes")
        self.codec = self._read_codec()
        lengths = self._read_lengths(frames_end, behind_frames)
        self._starts = _HEADER.size + np.concatenate([[0], np.cumsum(lengths)])
        if self._starts[-1] != frames_end:
            raise ProtocolError(f"the frames end at byte {self._starts[-1]}, not at {frames_end}")

    def frame(self, index: int) -> Floats:
        """The numbers from index x FRAME_NUMBERS on, as many as are in one frame."""
        if not 0 <= index < self.frame_count:
            raise IndexError(f"there are {self.frame_count} frames and none of index {index}")
        start, end = (int(place) for place in self._starts[index : index + 2])
        return self.codec.decode(self._bytes(start, end - start), self._frame_size(index))

    def frames(self) -> Iterator[Floats]:
        return (self.frame(index) for index in range(self.frame_count))

    def numbers(self, first: int, count: int) -> Floats:
        """So many numbers from `first` on, wherever frames end; not to be written to."""
        index, skipped = divmod(first, FRAME_NUMBERS)
        if count and skipped + count <= FRAME_NUMBERS:
            return self._remembered(index)[skipped : skipped + count]
        result = np.empty(count, np.float32)
        done = 0
        while done < count:
            index, skipped = divmod(first + done, FRAME_NUMBERS)
            part = self._remembered(index)[skipped : skipped + count - done]
            result[done : done + part.size] = part
            done += part.size
        return result

    def forget(self) -> None:
        """Let go of the remembered frame."""
        self._last = None

    def _remembered(self, index: int) -> Floats:
        """A frame; the last one is kept, because the next numbers may begin in its middle."""
        if self._last is None or self._last[0] != index:
            self._last = (index, self.frame(index))
        return self._last[1]

    def _read_codec(self) -> Codec:
        header = self._bytes(0, _HEADER.size)
        magic, version, code, parameter, frame_numbers = _HEADER.unpack(header)
        if (magic, version, frame_numbers) != (MAGIC, VERSION, FRAME_NUMBERS):
            raise ProtocolError("this is no encoded array, or one of another version")
        return _codec_of(code, parameter)

    def _read_lengths(self, start: int, length: int) -> Integers:
        data = self._bytes(start, length)
        (count,) = _COUNT.unpack(data[-_COUNT.size :])
        if count != self.count:
            raise ProtocolError(f"{count} numbers are encoded, not {self.count}")
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
            raise ProtocolError(f"{len(data)} bytes were read where there should be {length}")
        return data


def _codec_of(code: int, parameter: int) -> Codec:
    if code == Sparse.code:
        try:
            return Sparse(parameter)
        except ConfigError as error:
            raise ProtocolError(str(error)) from None
    dense: dict[int, Codec] = {Bf16.code: Bf16(), Int8.code: Int8()}
    if code not in dense or parameter != dense[code].parameter:
        raise ProtocolError(f"no codec has number {code} and parameter {parameter}")
    return dense[code]


def _frame_count(count: int) -> int:
    return -(-count // FRAME_NUMBERS)


def encode_with_residual(
    codec: Codec, deltas: Floats | Iterable[Floats], owe: Callable[[Floats], object]
) -> Iterator[bytes]:
    """An encoded update of numbers that hold all that was owed before; what it leaves out of them
    goes to `owe`, frame by frame."""

    def frames() -> Iterator[tuple[int, bytes]]:
        for delta in framed(deltas):
            data = encode_frame(codec, delta)
            owe(np.subtract(delta, codec.decode(data, delta.size)))
            yield delta.size, data

    return enclose(codec, frames())
