"""Encodes messages as binary frames, and decodes them. Knows neither sockets nor meanings.

    head     28 bytes, little endian: magic, version, kind, bytes of the table, bytes of meta, bytes
             of payload, CRC-32 of all that follows, CRC-32 of the head
    table    for every array: type, number of dimensions, and 4 bytes for each dimension
    payload  the arrays in order, padded with zeros to a multiple of 8, so that all are aligned
    meta     a JSON object, compressed (raw deflate) with a dictionary of `COMMON_WORDS`

A step of one position has one or two KB of features, so all the rest must be small. Compression
brings the meta to about a third of its size.

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
VERSION = 2
HEAD = struct.Struct("<4sBBHIQII")
CHECKSUM_BYTES = 4  # at the end of the head
ENTRY = struct.Struct("<BBxx")  # before the sizes of an array's dimensions
SIZE_BYTES = 4  # of each dimension
MAX_META = 256 * 1024
MAX_ARRAYS = 64
MAX_DIMENSIONS = 4
MAX_ELEMENTS = 2**48
MAX_TABLE = MAX_ARRAYS * (ENTRY.size + MAX_DIMENSIONS * SIZE_BYTES)
LIMIT = 64 * 1024 * 1024
STAGING_BYTES = 64 * 1024
DEFLATE_BITS = -12  # raw deflate with a window of 4 KiB, which takes microseconds to set up
DEFLATE_MEMORY = 4
COMMON_WORDS = (  # of the metas of steps and results; the commonest are last
    b'"min_p":,"presence_penalty":,"frequency_penalty":,"bias":{,"top_k":,"refine":true,'
    b'"answer_from":,"top":{"requests":[,"temperature":0.,"top_p":0.,"seed":],"wire":"int8"],'
    b'"wire":"fp32"],"wire":"bf16","seconds":{"block 1":0.0,"blocks 2-3":0.00}}{"router":"",'
    b'"hops":["192.168.],"rows":[{"request":1,"start":,"length":1,"read":1,"position":'
)

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
    FAILURE = 12


KINDS = frozenset(map(int, FrameKind))


@dataclass(frozen=True, eq=False)
class FrameMessage:
    """A message of the ring. `size`: bytes of its frame; 0 if the message was not received."""

    kind: FrameKind
    meta: dict[str, Any] = field(default_factory=dict)
    arrays: tuple[Array, ...] = ()
    size: int = 0


def largest_frame(limit: int) -> int:
    """The largest frame in bytes if meta and payload have `limit` bytes."""
    return HEAD.size + MAX_TABLE + limit


def encode(message: FrameMessage) -> list[Buffer]:
    """The frame in parts; contiguous arrays are not copied."""
    if len(message.arrays) > MAX_ARRAYS:
        raise FrameError(f"a message has {len(message.arrays)} arrays; the limit is {MAX_ARRAYS}")
    arrays = [np.asarray(array, order="C") for array in message.arrays]
    meta = _encoded_meta(message.meta)
    table = b"".join(map(_entry, arrays))
    body: list[Buffer] = [table]
    for array in arrays:
        if array.nbytes:
            body.append(array.reshape(-1).view(np.uint8).data)
        if padding := _padding(array.nbytes):
            body.append(padding)
    body.append(meta)
    head = HEAD.pack(
        MAGIC,
        VERSION,
        message.kind,
        len(table),
        len(meta),
        sum(_padded_size(array.nbytes) for array in arrays),
        _checksum(*body),
        0,
    )[:-CHECKSUM_BYTES]
    body[0] = head + _checksum(head).to_bytes(CHECKSUM_BYTES, "little") + table
    return body


class _Head(NamedTuple):
    kind: FrameKind
    table: int
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
        self._expect(memoryview(bytearray(self._head.table)), self._take_table)

    def _take_table(self) -> None:
        self._table = self._target
        self._shapes = _parsed_table(self._table)
        declared = sum(_padded_size(_bytes_of(*shape)) for shape in self._shapes)
        if declared != self._head.payload:
            _refuse(f"its arrays need {declared} bytes, but its payload has {self._head.payload}")
        self._body = np.empty(declared + self._head.meta, np.uint8)
        self._expect(self._body.data, self._take_body)

    def _take_body(self) -> None:
        head, body = self._head, self._body
        if _checksum(self._table, body.data) != head.checksum:
            _refuse("the body's checksum is wrong")
        meta = _decoded_meta(body[head.payload :].data)
        arrays, start = [], 0
        for dtype, shape in self._shapes:
            end = start + _bytes_of(dtype, shape)
            arrays.append(body[start:end].view(dtype).reshape(shape))
            start = _padded_size(end)
        size = HEAD.size + len(self._table) + len(body)
        self._messages.append(FrameMessage(head.kind, meta, tuple(arrays), size))
        self._expect_head()


def _parsed_head(data: Buffer, limit: int) -> _Head:
    magic, version, kind, table, meta, payload, body_sum, own = HEAD.unpack(data)
    if magic != MAGIC:
        _refuse("it does not begin with the magic bytes of a frame")
    if version != VERSION:
        _refuse(
            f"it has version {version}; expected {VERSION}; use the same release of blocktrain on"
            " all hosts"
        )
    if _checksum(data[:-CHECKSUM_BYTES]) != own:
        _refuse("the head's checksum is wrong")
    if kind not in KINDS:
        _refuse(f"its kind {kind} is unknown")
    if table > MAX_TABLE or meta > MAX_META:
        _refuse(f"a table of {table} bytes and {meta} bytes of meta exceed the limits")
    if meta + payload > limit:
        _refuse(f"meta and payload have {meta + payload} bytes; the limit is {limit}")
    return _Head(FrameKind(kind), table, meta, payload, body_sum)


def _entry(array: Array) -> bytes:
    code = DTYPE_CODES.get(array.dtype)
    if code is None or array.ndim > MAX_DIMENSIONS or max(array.shape, default=0) >= 2**32:
        raise FrameError(f"an array of {array.dtype} and shape {array.shape} cannot be sent")
    return ENTRY.pack(code, array.ndim) + np.array(array.shape, "<u4").tobytes()


def _parsed_table(table: memoryview) -> list[_Shape]:
    shapes: list[_Shape] = []
    while table:
        if len(table) < ENTRY.size:
            _refuse("its table ends within an array")
        code, dimensions = ENTRY.unpack_from(table)
        end = ENTRY.size + dimensions * SIZE_BYTES
        if len(table) < end or len(shapes) == MAX_ARRAYS:
            _refuse(f"its table ends within an array, or has more than {MAX_ARRAYS}")
        sizes = np.frombuffer(table[ENTRY.size : end], "<u4").tolist()
        shapes.append(_parsed_entry(code, dimensions, sizes))
        table = table[end:]
    return shapes


def _parsed_entry(code: int, dimensions: int, sizes: list[int]) -> _Shape:
    if code not in DTYPES:
        _refuse(f"an array has the unknown type {code}")
    if dimensions > MAX_DIMENSIONS:
        _refuse(f"an array has {dimensions} dimensions; the limit is {MAX_DIMENSIONS}")
    # numpy limits the shape of empty arrays too.
    if math.prod(size for size in sizes if size) > MAX_ELEMENTS:
        _refuse(f"an array has the impossible shape {sizes}")
    return DTYPES[code], tuple(sizes)


def _encoded_meta(meta: dict[str, Any]) -> bytes:
    try:
        encoded = _TO_JSON.encode(meta).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise FrameError(f"a message's meta is not JSON: {error}") from None
    if len(encoded) > MAX_META:
        raise FrameError(f"a message's meta has {len(encoded)} bytes; the limit is {MAX_META}")
    deflate = zlib.compressobj(wbits=DEFLATE_BITS, memLevel=DEFLATE_MEMORY, zdict=COMMON_WORDS)
    return deflate.compress(encoded) + deflate.flush()


def _decoded_meta(data: Buffer) -> dict[str, Any]:
    inflate = zlib.decompressobj(DEFLATE_BITS, COMMON_WORDS)
    try:
        encoded = inflate.decompress(data, MAX_META + 1)
    except zlib.error:
        _refuse("the meta cannot be decompressed")
    if not inflate.eof or inflate.unused_data or len(encoded) > MAX_META:
        _refuse(f"the meta is incomplete, or has more than {MAX_META} bytes")
    try:
        meta = _FROM_JSON.decode(encoded.decode())
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


def _checksum(*parts: Buffer) -> int:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum


def _refuse(why: str) -> NoReturn:
    raise FrameError(f"the frame is invalid: {why}")


_TO_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_FROM_JSON = json.JSONDecoder(parse_constant=_refuse)
