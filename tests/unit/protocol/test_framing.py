import struct
import tracemalloc
import zlib
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from blocktrain.errors import FrameError
from blocktrain.protocol.framing import (
    COMMON_WORDS,
    DTYPES,
    HEAD,
    MAGIC,
    MAX_ARRAYS,
    MAX_META,
    STAGING_BYTES,
    FrameDecoder,
    FrameKind,
    FrameMessage,
    encode,
    largest_frame,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
ARRAYS = st.sampled_from(list(DTYPES.values())).flatmap(
    lambda dtype: arrays.arrays(
        dtype, arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3)
    )
)
MESSAGES = st.builds(
    FrameMessage,
    st.sampled_from(FrameKind),
    st.dictionaries(st.text(), JSON, max_size=3),
    st.lists(ARRAYS, max_size=4).map(tuple),
)
LIMIT = 1 << 20


def frame(message: FrameMessage) -> bytes:
    return b"".join(encode(message))


def decoded(data: bytes, limit: int = LIMIT) -> list[FrameMessage]:
    decoder = FrameDecoder(limit)
    decoder.feed(data)
    return list(decoder.messages())


def pieces(data: bytes, sizes: list[int]) -> list[bytes]:
    """The data cut at sizes that repeat."""
    found, at = [], 0
    while at < len(data):
        size = sizes[len(found) % len(sizes)]
        found.append(data[at : at + size])
        at += size
    return found


def same(one: FrameMessage, other: FrameMessage) -> bool:
    return (
        (one.kind, one.meta) == (other.kind, other.meta)
        and [(a.dtype, a.shape, a.tobytes()) for a in one.arrays]
        == [(a.dtype, a.shape, a.tobytes()) for a in other.arrays]
    )  # fmt: skip


BIG = FrameMessage(FrameKind.STEP, {"hops": ["a:1"]}, (np.arange(40_000, dtype=np.float32),))
SMALL = FrameMessage(
    FrameKind.RESULT,
    {"a": 1},
    (np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(3, np.int8)),
)

# What was sent arrives


@settings(max_examples=60, deadline=None)
@given(st.lists(MESSAGES, max_size=3), st.lists(st.integers(1, 200), min_size=1, max_size=8))
def test_messages_arrive_however_the_stream_is_cut(messages: list[FrameMessage], sizes: list[int]):
    decoder, found = FrameDecoder(), []
    for piece in pieces(b"".join(map(frame, messages)), sizes):
        decoder.feed(piece)
        found += decoder.messages()
    assert len(found) == len(messages)
    for message, sent in zip(found, messages, strict=True):
        assert same(message, sent)
        assert message.size == len(frame(sent)) <= largest_frame(LIMIT)


@given(st.lists(st.integers(1000, 3 * STAGING_BYTES), min_size=1, max_size=8))
@settings(max_examples=20, deadline=None)
def test_messages_arrive_through_the_decoders_own_buffers(sizes: list[int]):
    stream = frame(SMALL) + frame(BIG) + frame(SMALL) + frame(BIG)
    decoder, found = FrameDecoder(), []
    for piece in pieces(stream, sizes):
        rest = piece
        while rest:
            buffer = decoder.get_buffer()
            count = min(len(buffer), len(rest))
            buffer[:count] = rest[:count]
            rest = rest[count:]
            decoder.buffer_updated(count)
            found += decoder.messages()
    assert [message.kind for message in found] == [
        FrameKind.STEP if i % 2 else FrameKind.RESULT for i in range(4)
    ]
    assert all(same(message, BIG if i % 2 else SMALL) for i, message in enumerate(found))


def test_arrays_are_sent_without_a_copy():
    array = BIG.arrays[0]
    assert any(np.shares_memory(np.frombuffer(part, np.uint8), array) for part in encode(BIG))
    strided = np.arange(20, dtype=np.float32).reshape(4, 5).T
    (found,) = decoded(frame(FrameMessage(FrameKind.STEP, arrays=(strided,))))
    np.testing.assert_array_equal(found.arrays[0], strided)


def test_received_arrays_lie_in_one_buffer_aligned_and_writable():
    (message,) = decoded(
        frame(FrameMessage(FrameKind.STEP, meta={"x": "odd"}, arrays=SMALL.arrays[::-1]))
    )
    assert all(array.base is message.arrays[0].base for array in message.arrays)
    for array in message.arrays:
        assert array.flags.aligned and array.flags.writeable and array.flags.c_contiguous


# What cannot be sent


@pytest.mark.parametrize(
    "message",
    [
        FrameMessage(FrameKind.STEP, meta={"x": float("nan")}),
        FrameMessage(FrameKind.STEP, meta={"x": object()}),
        FrameMessage(FrameKind.STEP, meta={"x": "y" * MAX_META}),
        FrameMessage(FrameKind.STEP, arrays=(np.zeros(1, np.float64),)),
        FrameMessage(FrameKind.STEP, arrays=(np.array([None]),)),
        FrameMessage(FrameKind.STEP, arrays=(np.zeros(2, ">f4"),)),
        FrameMessage(FrameKind.STEP, arrays=(np.zeros((1, 1, 1, 1, 1), np.uint8),)),
        FrameMessage(FrameKind.STEP, arrays=(np.zeros(1, np.uint8),) * (MAX_ARRAYS + 1)),
    ],
)
def test_messages_too_large_for_a_frame_are_refused(message: FrameMessage):
    with pytest.raises(FrameError):
        encode(message)


# What must not be believed


def test_a_frame_with_any_bit_turned_is_refused_at_once():
    whole = frame(SMALL)
    for bit in range(8 * len(whole)):
        turned = bytearray(whole)
        turned[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            decoded(bytes(turned))


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_are_refused_or_incomplete(data: bytes):
    for stream in (data, MAGIC + data, frame(SMALL)[: HEAD.size] + data):
        try:
            assert decoded(stream) == []
        except FrameError:
            continue


@settings(max_examples=60, deadline=None)
@given(MESSAGES, st.data())
def test_a_mutated_stream_gives_what_was_sent_or_a_frame_error(message: FrameMessage, data: Any):
    whole = frame(message)
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, len(whole)))
    stream = whole[:start] + data.draw(st.binary(max_size=20)) + whole[end:]
    decoder = FrameDecoder(LIMIT)
    with suppress(FrameError):
        decoder.feed(stream + whole)
    assert all(same(found, message) for found in decoder.messages())


def deflated(meta: bytes) -> bytes:
    deflate = zlib.compressobj(wbits=-15, zdict=COMMON_WORDS)
    return deflate.compress(meta) + deflate.flush()


def forged(
    *,
    version: int = 2,
    kind: int = 2,
    table_bytes: int | None = None,
    meta: bytes = b"{}",
    packed: bytes | None = None,
    meta_bytes: int | None = None,
    payload: int = 0,
    table: bytes = b"",
    body: bytes = b"",
) -> bytes:
    """A frame whose checksums are right, whatever it says."""
    packed = deflated(meta) if packed is None else packed
    table_bytes = len(table) if table_bytes is None else table_bytes
    meta_bytes = len(packed) if meta_bytes is None else meta_bytes
    body = table + body + packed
    head = struct.pack(
        "<4sBBHIQI", MAGIC, version, kind, table_bytes, meta_bytes, payload, zlib.crc32(body)
    )
    return head + struct.pack("<I", zlib.crc32(head)) + body


def entry(code: int, dimensions: int, *sizes: int) -> bytes:
    return struct.pack(f"<BBxx{len(sizes)}I", code, dimensions, *sizes)


def test_a_forged_frame_with_nothing_wrong_is_taken():
    (message,) = decoded(forged(table=entry(6, 1, 2), payload=8, body=bytes(8)))
    assert message.arrays[0].tolist() == [0, 0]


@pytest.mark.parametrize(
    "stream",
    [
        forged(version=1),
        forged(version=3),
        forged(kind=0),
        forged(kind=max(FrameKind) + 1),
        forged(table=entry(1, 0) * (MAX_ARRAYS + 1), payload=8 * (MAX_ARRAYS + 1)),
        forged(table_bytes=2**16 - 1),
        forged(table=entry(6, 1, 2)[:-1], payload=8, body=bytes(8)),
        forged(table=b"\6", payload=8, body=bytes(8)),
        forged(meta_bytes=MAX_META + 1),
        forged(payload=LIMIT),
        forged(payload=2**64 - 1),
        forged(payload=8),
        forged(table=entry(6, 1, 2), payload=16, body=bytes(16)),
        forged(table=entry(6, 1, 2)),
        forged(table=entry(0, 1, 2), payload=8),
        forged(table=entry(8, 1, 2), payload=8),
        forged(table=entry(6, 5, 2), payload=8),
        forged(table=entry(6, 1, 2, 1), payload=8),
        forged(table=entry(6, 2, 2), payload=8),
        forged(table=entry(6, 4, *[2**32 - 1] * 4), payload=8),
        forged(table=entry(5, 4, 0, *[2**32 - 1] * 3)),
        forged(meta=b""),
        forged(meta=b"[]"),
        forged(meta=b"{"),
        forged(meta=b'{"a":NaN}'),
        forged(meta=b'{"a":-Infinity}'),
        forged(meta=b'{"a":"\xff"}'),
        forged(meta=b'{"a":' + b"9" * 5000 + b"}"),
        forged(meta=b'{"a":' + b"[" * 100_000),
        forged(packed=b""),
        forged(packed=b"{}"),
        forged(packed=deflated(b"{}")[:-1]),
        forged(packed=deflated(b"{}") + b"\0"),
        forged(meta=b'{"a":"' + b"a" * 5_000_000 + b'"}'),
    ],
)
def test_a_lie_is_refused_for_little_memory(stream: bytes):
    decoder = FrameDecoder(LIMIT)
    tracemalloc.start()
    with pytest.raises(FrameError):
        decoder.feed(stream)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2 * LIMIT
    with pytest.raises(FrameError):
        decoder.feed(frame(SMALL))
    assert not list(decoder.messages())


@settings(deadline=None)
@given(st.data())
def test_no_head_makes_the_decoder_allocate_beyond_its_limit(data: Any):
    table = b"".join(
        entry(data.draw(st.integers(1, 6)), 4, *data.draw(st.tuples(*[st.integers(0, 300)] * 4)))
        for _ in range(data.draw(st.integers(0, 3)))
    )
    declared = sum(
        -(-DTYPES[code].itemsize * a * b * c * d // 8) * 8
        for code, _, a, b, c, d in struct.iter_unpack("<BBxx4I", table)
    )
    stream = forged(table=table, payload=declared, body=bytes(100))
    decoder = FrameDecoder(LIMIT)
    tracemalloc.start()
    with suppress(FrameError):
        decoder.feed(stream)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < LIMIT + 100_000


def test_the_limit_holds_from_the_next_frame_on():
    decoder = FrameDecoder(1000)
    with pytest.raises(FrameError, match="the limit is 1000"):
        decoder.feed(frame(BIG))
    decoder = FrameDecoder(1000)
    decoder.feed(frame(SMALL))
    decoder.limit = LIMIT
    decoder.feed(frame(BIG))
    assert [message.kind for message in decoder.messages()] == [FrameKind.RESULT, FrameKind.STEP]
