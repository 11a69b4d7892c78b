"""Encodes messages as binary frames, and decodes them. Knows neither sockets nor meanings.

    head     44 bytes, little endian: magic, version, kind, count of arrays, request, sequence,
             bytes of meta, bytes of payload, CRC-32 of all that follows, CRC-32 of the head
    table    20 bytes for every array: type, dimensions, shape
    meta     a JSON object, padded with zeros to a multiple of 8
    payload  the arrays in order, padded in the same way, so that all are aligned

The head has its own checksum, so that a corrupt length is detected before the decoder waits for
bytes that never come. The head's checksum covers that of the rest too. CRC-32 detects accidental
corruption; TLS protects against tampering.

Input is untrusted: every declared size is checked against the limit and the other sizes before
memory is allocated. Any fault raises a `FrameError`.
"""

import json
import math
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from blocktrain.errors import FrameError

Array = npt.NDArray[Any]
Buffer = bytes | bytearray | memoryview
_Shape = tuple[np.dtype[Any], tuple[int, ...]]  # type and dimensions

MAGIC = b"BTfr"
VERSION = 1
HEAD = struct.Struct("<4sBBHQQIQII")
CHECKSUM_BYTES = 4  # at the end of the head
ENTRY = struct.Struct("<BBxx4I")
MAX_META = 256 * 1024
MAX_ARRAYS = 64
MAX_DIMENSIONS = 4
MAX_ELEMENTS = 2**48
NUMBER_END = 2**64  # request and sequence numbers are below this
LIMIT = 64 * 1024 * 1024
STAGING_BYTES = 64 * 1024

DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<u2"),  # also the bits of bfloat16, which numpy lacks
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f4"),
    7: np.dtype("<u4"),
}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}


class FrameKind(IntEnum):
    HELLO = 1
    STEP = 2
    RESULT = 3
    PREFILL = 4
    RELEASE = 5
    CREDIT = 6
    PING = 7
    PONG = 8
    ERROR = 9
    DIAL = 10
    PAD = 11


KINDS = frozenset(map(int, FrameKind))


@dataclass(frozen=True, eq=False)
class FrameMessage:
    """A message of the ring. `size`: bytes of its frame; 0 if the message was not received."""

    kind: FrameKind
    request: int = 0
    sequence: int = 0
    meta: dict[str, Any] = field(default_factory=dict)
    arrays: tuple[Array, ...] = ()
    size: int = 0


def largest_frame(limit: int) -> int:
    """The largest frame in bytes if meta and payload have `limit` bytes."""
    return HEAD.size + MAX_ARRAYS * ENTRY.size + limit


def encode(message: FrameMessage) -> list[Buffer]:
    """The frame in parts; contiguous arrays are not copied."""
    if len(message.arrays) > MAX_ARRAYS:
        raise FrameError(f"a message has {len(message.arrays)} arrays; the limit is {MAX_ARRAYS}")
    arrays = [np.asarray(array, order="C") for array in message.arrays]
    meta = _encoded_meta(message.meta)
    body: list[Buffer] = [b"".join(map(_entry, arrays)) + meta + _padding(len(meta))]
    for array in arrays:
        if array.nbytes:
            body.append(array.reshape(-1).view(np.uint8).data)
        if padding := _padding(array.nbytes):
            body.append(padding)
    head = HEAD.pack(
        MAGIC,
        VERSION,
        message.kind,
        len(arrays),
        _number(message.request),
        _number(message.sequence),
        len(meta),
        sum(_padded_size(array.nbytes) for array in arrays),
        _checksum(*body),
        0,
    )[:-CHECKSUM_BYTES]
    body[0] = head + _checksum(head).to_bytes(CHECKSUM_BYTES, "little") + body[0]
    return body


class _Head(NamedTuple):
    kind: FrameKind
    arrays: int
    request: int
    sequence: int
    meta: int
    payload: int
    checksum: int


class FrameDecoder:
    """Decodes a byte stream that arrives in pieces of any size. Unusable after a `FrameError`.

    `limit` bounds meta and payload of one frame; a change applies from the next frame on. Either
    call `feed`, or receive into `get_buffer` and call `buffer_updated`, which avoids copying large
    arrays.
    """

    _target: memoryview  # the part of the frame being received
    _filled: int
    _complete: Callable[[], None]  # called when the target is full
    _head: _Head
    _table: memoryview
    _shapes: list[_Shape]
    _body: Array

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self._messages: deque[FrameMessage] = deque()
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._direct = False  # get_buffer returned the target itself, not the staging buffer
        self._expect_head()

    def feed(self, data: Buffer) -> None:
        rest = memoryview(data)
        while rest:
            count = min(len(rest), len(self._target) - self._filled)
            self._target[self._filled : self._filled + count] = rest[:count]
            rest = rest[count:]
            self._advance(count)

    def get_buffer(self, size_hint: int = -1) -> memoryview:
        missing = self._target[self._filled :]
        self._direct = len(missing) >= STAGING_BYTES
        return missing if self._direct else self._staging

    def buffer_updated(self, count: int) -> None:
        if self._direct:
            self._advance(count)
        else:
            self.feed(self._staging[:count])

    def messages(self) -> Iterator[FrameMessage]:
        """Yields each complete message once."""
        while self._messages:
            yield self._messages.popleft()

    def _expect(self, target: memoryview, complete: Callable[[], None]) -> None:
        self._target, self._filled, self._complete = target, 0, complete

    def _advance(self, count: int) -> None:
        self._filled += count
        while self._filled == len(self._target):
            self._complete()

    def _expect_head(self) -> None:
        self._expect(memoryview(bytearray(HEAD.size)), self._take_head)

    def _take_head(self) -> None:
        self._head = _parsed_head(self._target, self.limit)
        table = memoryview(bytearray(ENTRY.size * self._head.arrays))
        self._expect(table, self._take_table)

    def _take_table(self) -> None:
        self._table = self._target
        self._shapes = [_parsed_entry(*entry) for entry in ENTRY.iter_unpack(self._table)]
        declared = sum(_padded_size(_bytes_of(*shape)) for shape in self._shapes)
        if declared != self._head.payload:
            _refuse(f"its arrays need {declared} bytes, but its payload has {self._head.payload}")
        self._body = np.empty(_padded_size(self._head.meta) + declared, np.uint8)
        self._expect(self._body.data, self._take_body)

    def _take_body(self) -> None:
        head, body = self._head, self._body
        if _checksum(self._table, body.data) != head.checksum:
            _refuse("the body's checksum is wrong")
        meta = _decoded_meta(body[: head.meta].tobytes())
        arrays, start = [], _padded_size(head.meta)
        for dtype, shape in self._shapes:
            end = start + _bytes_of(dtype, shape)
            arrays.append(body[start:end].view(dtype).reshape(shape))
            start = _padded_size(end)
        size = HEAD.size + len(self._table) + len(body)
        self._messages.append(
            FrameMessage(head.kind, head.request, head.sequence, meta, tuple(arrays), size)
        )
        self._expect_head()


def _parsed_head(data: Buffer, limit: int) -> _Head:
    magic, version, kind, arrays, request, sequence, meta, payload, body_sum, own = HEAD.unpack(
        data
    )
    if magic != MAGIC:
        _refuse("it does not begin with the magic bytes of a frame")
    if version != VERSION:
        _refuse(f"it has version {version}; expected {VERSION}")
    if _checksum(data[:-CHECKSUM_BYTES]) != own:
        _refuse("the head's checksum is wrong")
    if kind not in KINDS:
        _refuse(f"its kind {kind} is unknown")
    if arrays > MAX_ARRAYS or meta > MAX_META:
        _refuse(f"{arrays} arrays and {meta} bytes of meta exceed the limits")
    if _padded_size(meta) + payload > limit:
        _refuse(f"meta and payload have {meta + payload} bytes; the limit is {limit}")
    return _Head(FrameKind(kind), arrays, request, sequence, meta, payload, body_sum)


def _entry(array: Array) -> bytes:
    code = DTYPE_CODES.get(array.dtype)
    if code is None or array.ndim > MAX_DIMENSIONS or max(array.shape, default=0) >= 2**32:
        raise FrameError(f"an array of {array.dtype} and shape {array.shape} cannot be sent")
    return ENTRY.pack(code, array.ndim, *array.shape, *[0] * (MAX_DIMENSIONS - array.ndim))


def _parsed_entry(code: int, dimensions: int, *sizes: int) -> _Shape:
    if code not in DTYPES:
        _refuse(f"an array has the unknown type {code}")
    if dimensions > MAX_DIMENSIONS:
        _refuse(f"an array has {dimensions} dimensions; the limit is {MAX_DIMENSIONS}")
    if any(sizes[dimensions:]):
        _refuse(f"an array of {dimensions} dimensions has sizes for more of them: {sizes}")
    # numpy limits the shape of empty arrays too.
    if math.prod(size for size in sizes if size) > MAX_ELEMENTS:
        _refuse(f"an array has the impossible shape {sizes[:dimensions]}")
    return DTYPES[code], sizes[:dimensions]


def _encoded_meta(meta: dict[str, Any]) -> bytes:
    try:
        encoded = _TO_JSON.encode(meta).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise FrameError(f"a message's meta is not JSON: {error}") from None
    if len(encoded) > MAX_META:
        raise FrameError(f"a message's meta has {len(encoded)} bytes; the limit is {MAX_META}")
    return encoded


def _decoded_meta(data: bytes) -> dict[str, Any]:
    try:
        meta = _FROM_JSON.decode(data.decode())
    except (ValueError, RecursionError):
        _refuse("the meta is not JSON")
    if not isinstance(meta, dict):
        _refuse("the meta is not an object")
    return meta


def _bytes_of(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    return dtype.itemsize * math.prod(shape)


def _padded_size(count: int) -> int:
    return -(-count // 8) * 8


def _padding(count: int) -> bytes:
    return bytes(-count % 8)


def _number(number: int) -> int:
    if not 0 <= number < NUMBER_END:
        raise FrameError(f"{number} is out of range for a request or sequence number")
    return number


def _checksum(*parts: Buffer) -> int:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum


def _refuse(why: str) -> NoReturn:
    raise FrameError(f"the frame is invalid: {why}")


_TO_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_FROM_JSON = json.JSONDecoder(parse_constant=_refuse)
