import hashlib
import struct
import tracemalloc
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktrain.codec import (
    CODECS,
    REGISTRY,
    Codec,
    codec_of,
    delta_codec,
    update_codec,
)
from blocktrain.codec.dense import LARGEST_SCALE, LEAST_SCALE, Bf16, Int8
from blocktrain.codec.frames import (
    FRAME_NUMBERS,
    UpdateDecoder,
    encode,
    largest_encoded_size,
)
from blocktrain.codec.sparse import Sparse
from blocktrain.config import SwarmConfig
from blocktrain.errors import ConfigError, ProtocolError

Floats = npt.NDArray[np.float32]

FEW = settings(max_examples=40, deadline=None)
MANY = settings(max_examples=200, deadline=None)
LARGEST = np.finfo(np.float32).max
HEADER = 12
CHUNK = 4096
GROUP = 256


def mostly_zeros(draws: np.random.Generator, size: int) -> Floats:
    return np.where(draws.random(size) < 0.003, draws.standard_normal(size), 0)


KINDS: dict[str, Callable[[np.random.Generator, int], npt.NDArray[np.float64]]] = {
    "normal": lambda draws, size: draws.standard_normal(size) * 1e-3,
    "heavy tails": lambda draws, size: draws.standard_t(2, size) * 1e-4,
    "ties": lambda draws, size: draws.integers(-2, 3, size) * 0.25,
    "mostly zeros": mostly_zeros,
    "zeros": lambda draws, size: np.zeros(size),
    "every magnitude": lambda draws, size: (
        draws.choice([-1, 1], size) * 2.0 ** draws.uniform(-149, 127.9, size)
    ),
    "largest": lambda draws, size: draws.choice([-1.0, 1.0], size) * float(LARGEST),
    "subnormal": lambda draws, size: draws.standard_normal(size) * 1e-40,
    "one among small ones": lambda draws, size: np.where(np.arange(size) % CHUNK == 7, 1, 1e-20),
}


def make(kind: str, size: int, seed: int) -> Floats:
    return KINDS[kind](np.random.default_rng(seed), size).astype(np.float32)


sizes = st.sampled_from([0, 1, 255, 257, 4095, 4096, 4097, 10_000]) | st.integers(1, 20_000)
several_frames = st.sampled_from([FRAME_NUMBERS - 1, FRAME_NUMBERS, FRAME_NUMBERS + 1, 140_000])
kinds, seeds = st.sampled_from(sorted(KINDS)), st.integers(0, 2**32 - 1)
deltas = st.builds(make, kinds, sizes, seeds)
long_deltas = st.builds(make, kinds, several_frames, seeds)
sparse = st.builds(Sparse, st.sampled_from([1, 64, 4096]) | st.integers(1, 4096))
codecs = st.sampled_from([Bf16(), Int8()]) | sparse
ALL = [Bf16(), Int8(), Sparse(64), Sparse(1), Sparse(4096)]


def encoded(numbers: Floats, codec: Codec) -> bytes:
    return b"".join(encode(numbers, codec))


def opened(data: bytes, count: int) -> UpdateDecoder:
    def read(offset: int, length: int) -> bytes:
        assert min(offset, length) >= 0 and offset + length <= len(data), "asked past the end"
        return data[offset : offset + length]

    return UpdateDecoder(read, len(data), count)


def decoded(data: bytes, count: int) -> Floats:
    frames = list(opened(data, count).frames())
    return np.concatenate([np.zeros(0, np.float32), *frames])


def after(numbers: Floats, codec: Codec) -> Floats:
    found = decoded(encoded(numbers, codec), numbers.size)
    assert found.dtype == np.float32 and found.shape == numbers.shape
    return found


def in_chunks(numbers: Floats, width: int) -> Iterator[Floats]:
    return (numbers[start : start + width] for start in range(0, numbers.size, width))


def squared(numbers: npt.NDArray[np.floating]) -> float:
    return float(np.sum(np.square(numbers, dtype=np.float64)))


# What comes back


@FEW
@given(deltas)
def test_bf16_is_the_nearest_of_8_bits(numbers: Floats):
    found = after(numbers, Bf16())
    assert np.isfinite(found).all()
    assert not (found.view(np.uint32) & 0xFFFF).any()
    error = np.abs(found.astype(np.float64) - numbers)
    assert (error <= 2.0**-8 * np.abs(numbers.astype(np.float64)) + 2.0**-134).all()


def test_bf16_rounds_a_tie_to_even_and_never_to_infinity():
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0xBF808000, 0x7F7FFFFF, 0xFF7FFFFF])
    found = after(bits.astype(np.uint32).view(np.float32), Bf16()).view(np.uint32) >> 16
    assert [hex(half) for half in found] == [
        "0x3f80", "0x3f82", "0x3f81", "0xbf80", "0x7f7f", "0xff7f",
    ]  # fmt: skip


@FEW
@given(deltas)
def test_int8_is_off_by_half_a_step_of_its_group(numbers: Floats):
    found = after(numbers, Int8())
    assert np.isfinite(found).all()
    for group, there in zip(in_chunks(numbers, GROUP), in_chunks(found, GROUP), strict=True):
        # A scale is at most a 64th above the 127th part of the largest: it is a bfloat16. Where
        # it would be subnormal, the group is left out.
        step = float(np.abs(group).max()) / 127 * (1 + 2.0**-6)
        error = np.abs(there.astype(np.float64) - group)
        assert (error <= max(step * (0.5 + 2.0**-16), 127 * float(LEAST_SCALE))).all()


def test_int8_keeps_the_largest_of_a_group_and_is_exact_where_the_scale_is():
    numbers = np.arange(-127, 128, dtype=np.float32) * np.float32(0.25)
    np.testing.assert_array_equal(after(numbers, Int8()), numbers)
    ends = np.array([LARGEST, -LARGEST, 0], np.float32)
    np.testing.assert_allclose(after(ends, Int8()), ends, rtol=2.0**-12)


@FEW
@given(deltas, sparse)
def test_sparse_keeps_the_largest_of_every_chunk_and_nothing_else(numbers: Floats, codec: Sparse):
    found = after(numbers, codec)
    assert np.isfinite(found).all()
    for chunk, there in zip(in_chunks(numbers, CHUNK), in_chunks(found, CHUNK), strict=True):
        # -0 is a kept number whose magnitude no bfloat16 can hold: as good as left out.
        kept = np.flatnonzero(there)
        left_out = np.delete(np.abs(chunk), kept)
        representable = np.count_nonzero(np.abs(chunk) > 2.0**-120)
        assert min(codec.top_k, representable) <= kept.size <= codec.top_k
        np.testing.assert_array_equal(np.sign(there[kept]), np.sign(chunk[kept]))
        if kept.size and left_out.size:
            assert np.abs(chunk[kept]).min() >= left_out.max()
        assert len(set(np.abs(there[kept]).tolist())) <= 2


@FEW
@given(deltas, sparse)
def test_sparse_is_never_worse_than_sending_nothing(numbers: Floats, codec: Sparse):
    error = squared(numbers.astype(np.float64) - after(numbers, codec))
    assert error <= squared(numbers) * (1 + 1e-12)


@FEW
@given(st.lists(st.floats(0.0078125, 100, width=32), min_size=2, max_size=12), seeds)
def test_sparse_has_the_two_best_magnitudes(magnitudes: list[float], seed: int):
    numbers = np.array(magnitudes, np.float32)
    numbers *= np.random.default_rng(seed).choice([-1, 1], numbers.size).astype(np.float32)
    rising = np.sort(np.abs(numbers)).astype(np.float64)
    best = min(
        squared(rising[:cut] - rising[:cut].mean()) + squared(rising[cut:] - rising[cut:].mean())
        for cut in range(1, rising.size)
    )
    rounding = squared(2.0**-8 * rising)
    assert squared(numbers.astype(np.float64) - after(numbers, Sparse(4096))) <= best + rounding


def test_of_equal_numbers_sparse_keeps_the_first():
    numbers = np.full(CHUNK + 3, -0.5, np.float32)
    expected = np.zeros_like(numbers)
    expected[[0, 1, CHUNK, CHUNK + 1]] = -0.5
    np.testing.assert_array_equal(after(numbers, Sparse(2)), expected)


# How it is framed


@FEW
@given(long_deltas, codecs, st.data())
def test_a_frame_decodes_alone_as_among_all(numbers: Floats, codec: Codec, data: st.DataObject):
    decoder = opened(encoded(numbers, codec), numbers.size)
    together = np.concatenate(list(decoder.frames()))
    index = data.draw(st.integers(0, decoder.frame_count - 1))
    cut = slice(index * FRAME_NUMBERS, (index + 1) * FRAME_NUMBERS)
    assert decoder.frame(index).tobytes() == together[cut].tobytes()
    assert after(numbers[cut], codec).tobytes() == together[cut].tobytes()
    for absent in (-1, decoder.frame_count):
        with pytest.raises(IndexError):
            decoder.frame(absent)


@FEW
@given(long_deltas, codecs, st.lists(st.integers(0, 150_000), max_size=12))
def test_parts_of_any_sizes_give_the_same_bytes(numbers: Floats, codec: Codec, cuts: list[int]):
    parts = np.split(numbers, sorted(cut for cut in cuts if cut <= numbers.size))
    assert b"".join(encode(parts, codec)) == encoded(numbers, codec)


def test_parts_of_any_shape_and_layout_are_read_in_order():
    table = make("normal", 6000, 0).reshape(60, 100)
    parts = [table[:30].astype(">f4").astype(np.float32), table[30:, :].reshape(3, 10, 100)]
    assert b"".join(encode(parts, Int8())) == encoded(table.reshape(-1), Int8())
    assert b"".join(encode([table.T], Int8())) == encoded(np.ascontiguousarray(table.T), Int8())


@FEW
@given(deltas | long_deltas, codecs)
def test_no_encoding_is_larger_than_the_largest(numbers: Floats, codec: Codec):
    assert len(encoded(numbers, codec)) <= largest_encoded_size(codec, numbers.size)


@pytest.mark.parametrize("codec", ALL)
def test_the_largest_is_close_to_what_happens(codec: Codec):
    numbers = make("normal", 200_000, 3)
    assert len(encoded(numbers, codec)) > 0.9 * largest_encoded_size(codec, numbers.size)


@pytest.mark.parametrize(
    ("codec", "kind", "ratio"),
    [
        (Bf16(), "normal", 1.999),
        (Int8(), "normal", 3.96),
        (Sparse(64), "normal", 200),
        (Sparse(64), "heavy tails", 200),
        (Sparse(96), "normal", 146),
        (Sparse(154), "normal", 100),
    ],
)
def test_an_encoding_is_this_many_times_smaller(codec: Codec, kind: str, ratio: float):
    numbers = make(kind, 4 * FRAME_NUMBERS, 5)
    assert numbers.nbytes / len(encoded(numbers, codec)) > ratio


def test_zeros_cost_next_to_nothing():
    assert len(encoded(np.zeros(FRAME_NUMBERS, np.float32), Sparse(64))) < 100


@pytest.mark.parametrize("codec", ALL)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_encoded(codec: Codec, bad: float):
    numbers = make("normal", FRAME_NUMBERS + 10, 0)
    numbers[-3] = bad
    with pytest.raises(ValueError, match="finite"):
        encoded(numbers, codec)


def test_only_float32_is_encoded():
    with pytest.raises(ValueError, match="float64"):
        encoded(np.zeros(3), Bf16())


def test_a_long_array_is_encoded_in_the_memory_of_a_frame():
    part = make("normal", 100_000, 0)
    tracemalloc.start()
    for codec in (Bf16(), Int8(), Sparse(64)):
        for _ in encode((part for _ in range(20)), codec):
            pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 * 4 * FRAME_NUMBERS < 20 * part.nbytes


def test_every_name_has_its_codec():
    found = {name: update_codec(SwarmConfig(codec=name, top_k_per_4096=7)) for name in CODECS}
    assert found == {"none": None, "bf16": Bf16(), "int8": Int8(), "sparse": Sparse(7)}
    assert {name: codec.name for name, codec in REGISTRY.items()} == {n: n for n in REGISTRY}
    assert len({codec.code for codec in REGISTRY.values()}) == len(REGISTRY)


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_a_codec_is_found_again_by_what_a_file_says(name: str):
    settings = SwarmConfig(codec=name)
    for codec in (update_codec(settings, final=True), delta_codec(settings, 3)):
        assert codec is not None and codec_of(codec.code, codec.parameter) == codec


def test_how_many_numbers_sparse_sends():
    settings = SwarmConfig(codec="sparse", top_k_per_4096=100)
    assert update_codec(settings) == Sparse(100)
    assert update_codec(settings, final=True) == Sparse(1600)
    assert delta_codec(settings, 3) == Sparse(300)
    assert delta_codec(settings, 2, final=True) == Sparse(3200)
    assert delta_codec(settings, 50) == delta_codec(settings, 3, final=True) == Sparse(4096)
    limited = SwarmConfig(codec="sparse", top_k_per_4096=100, top_k_per_4096_down=250)
    assert delta_codec(limited, 3) == Sparse(250)
    assert delta_codec(limited, 2, final=True) == Sparse(3200)


@pytest.mark.parametrize("kept", [0, -1, 4097])
def test_a_chunk_keeps_1_to_4096(kept: int):
    with pytest.raises(ConfigError, match="4096"):
        Sparse(kept)


def fixed_numbers() -> Floats:
    """Made of whole numbers only, so that no library's random numbers are part of the format."""
    mixed = np.arange(150_000, dtype=np.uint32)
    for factor, shift in ((0x7FEB352D, 16), (0x846CA68B, 15), (1, 16)):
        mixed = (mixed ^ (mixed >> np.uint32(shift))) * np.uint32(factor)
    centred = mixed.astype(np.float64) / 2**31 - 1
    return (centred * centred * centred * 1e-3).astype(np.float32)


@pytest.mark.parametrize(
    ("codec", "of_bytes", "of_numbers"),
    [
        (Bf16(), "db3eaafe24127006", "9fcb2fde16d76cd6"),
        (Int8(), "4565e5e4018459a2", "a5966cbcbb4199f3"),
        (Sparse(64), "5e7e46c18604821f", "c54deccec5d195df"),
        (Sparse(1000), "e45889fe27d81cec", "b98609b787cb2090"),
    ],
)
def test_the_format_stays_what_it_is(codec: Codec, of_bytes: str, of_numbers: str):
    data = encoded(fixed_numbers(), codec)
    numbers = decoded(data, 150_000).astype("<f4")
    assert hashlib.sha256(data).hexdigest()[:16] == of_bytes
    assert hashlib.sha256(numbers.tobytes()).hexdigest()[:16] == of_numbers


# What is refused


def accepted(data: bytes, count: int) -> bool:
    """Whether these bytes are an array; that nothing else happens than being refused."""
    try:
        found = decoded(data, count)
    except ProtocolError:
        return False
    assert found.dtype == np.float32 and found.shape == (count,) and np.isfinite(found).all()
    return True


@MANY
@given(st.binary(max_size=400), st.integers(0, 5000))
def test_random_bytes_are_refused(data: bytes, count: int):
    assert not accepted(data, count)


@MANY
@given(codecs, st.binary(max_size=600), st.integers(1, 6000))
def test_random_frames_are_refused_or_numbers(codec: Codec, data: bytes, count: int):
    try:
        found = codec.decode(data, count)
    except ProtocolError:
        return
    assert found.shape == (count,) and np.isfinite(found).all()


@MANY
@given(st.integers(0, 80), st.integers(0, 17), st.binary(max_size=200), st.integers(1, 5000))
def test_random_places_are_refused_or_numbers(kept: int, low: int, rest: bytes, count: int):
    levels = bytes(4 * -(-count // CHUNK))
    try:
        found = Sparse(64).decode(struct.pack("<IB", kept, low) + levels + rest, count)
    except ProtocolError:
        return
    assert found.shape == (count,) and not found.any()


@MANY
@given(deltas.filter(lambda numbers: numbers.size > 0), codecs, st.data())
def test_a_changed_bit_is_refused_or_another_number(
    numbers: Floats, codec: Codec, data: st.DataObject
):
    changed = bytearray(encoded(numbers, codec))
    for bit in data.draw(st.lists(st.integers(0, 8 * len(changed) - 1), min_size=1, max_size=3)):
        changed[bit // 8] ^= 1 << bit % 8
    accepted(bytes(changed), numbers.size)


@FEW
@given(deltas, codecs, st.data())
def test_what_is_cut_off_or_goes_on_is_refused(numbers: Floats, codec: Codec, data: st.DataObject):
    whole = encoded(numbers, codec)
    assert accepted(whole, numbers.size)
    assert not accepted(whole[: data.draw(st.integers(0, len(whole) - 1))], numbers.size)
    assert not accepted(whole + b"\0", numbers.size)
    assert not accepted(whole, numbers.size + 1)


def with_lengths(data: bytes, lengths: list[int]) -> bytes:
    end = len(data) - 8
    return data[: end - 4 * len(lengths)] + struct.pack(f"<{len(lengths)}I", *lengths) + data[end:]


@FEW
@given(codecs, st.lists(st.integers(0, 2**32 - 1), min_size=3, max_size=3))
def test_lengths_that_do_not_add_up_are_refused(codec: Codec, lengths: list[int]):
    data = encoded(make("normal", 2 * FRAME_NUMBERS + 5, 0), codec)
    assert not accepted(with_lengths(data, lengths), 2 * FRAME_NUMBERS + 5)


@pytest.mark.parametrize("codec", ALL)
def test_lengths_that_are_moved_between_frames_are_refused(codec: Codec):
    count = 2 * FRAME_NUMBERS + 5000
    data = encoded(make("normal", count, 0), codec)
    lengths = list(struct.unpack("<3I", data[-20:-8]))
    assert with_lengths(data, lengths) == data and accepted(data, count)
    for moved in (1, 100, -1):
        mutated = [lengths[0] - moved, lengths[1] + moved, lengths[2]]
        assert not accepted(with_lengths(data, mutated), count)


@pytest.mark.parametrize(
    ("offset", "value"),
    [(0, b"X"), (4, b"\2"), (5, b"\0"), (5, b"\4"), (5, b"\3"), (6, b"\1"), (8, b"\1")],
)
def test_another_header_is_refused(offset: int, value: bytes):
    data = encoded(make("normal", 300, 0), Bf16())
    changed = data[:offset] + value + data[offset + 1 :]
    with pytest.raises(ProtocolError):
        opened(changed, 300)


@pytest.mark.parametrize("codec", ALL)
def test_a_frame_that_is_too_long_is_refused_unread(codec: Codec):
    whole = encoded(np.zeros(10, np.float32), codec)
    for too_long in (codec.largest_frame(10) + 1, 10_000_000):
        data = whole[:HEADER] + bytes(too_long) + struct.pack("<IQ", too_long, 10)
        with pytest.raises(ProtocolError, match="too long"):
            opened(data, 10)


def test_a_count_from_the_file_allocates_nothing():
    forged = b"BTUP" + struct.pack("<BBHI", 1, 3, 64, FRAME_NUMBERS) + struct.pack("<Q", 2**60)
    tracemalloc.start()
    for count in (2**60, 1000):
        with pytest.raises(ProtocolError):
            opened(forged, count)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize("kept", [1, 64, 4096])
def test_a_frame_is_decoded_in_bounded_memory_whatever_it_says(kept: int):
    codec = Sparse(kept)
    draws = np.random.default_rng(0)
    tracemalloc.start()
    for low in (0, 1, 4, 15, 255):
        for claimed in (16, 16 * kept, 2**32 - 1):
            rest = draws.bytes(codec.largest_frame(FRAME_NUMBERS) - 5)
            frame = struct.pack("<IB", claimed, low) + bytes(64) + rest[64:]
            with pytest.raises(ProtocolError):
                codec.decode(frame, FRAME_NUMBERS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * 4 * FRAME_NUMBERS


def sparse_frame(gaps: list[int], levels: list[int], codec: Sparse, count: int) -> Floats:
    """A frame with all gaps in unary, decoded."""
    planes = bytes(-(-2 * len(gaps) // 8))
    bits = [bit for gap in gaps for bit in [0] * gap + [1]]
    unary = np.packbits(np.array(bits, np.uint8)).tobytes()
    stored = struct.pack(f"<{len(levels)}H", *levels)
    return codec.decode(struct.pack("<IB", len(gaps), 0) + stored + planes + unary, count)


def test_places_levels_and_counts_of_a_frame_are_checked():
    one, infinite, negative = 0x3F80, 0x7F80, 0xBF80
    found = sparse_frame([0, 8], [one, one], Sparse(2), 10)
    assert found.tolist() == [1, 0, 0, 0, 0, 0, 0, 0, 0, 1]
    for gaps, levels, kept in [
        ([0, 9], [one, one], 2),  # behind the end
        ([0, 0, 0], [one, one], 2),  # more than are kept
        ([0, 8], [one, infinite], 2),
        ([0, 8], [negative, one], 2),
    ]:
        with pytest.raises(ProtocolError):
            sparse_frame(gaps, levels, Sparse(kept), 10)
    with pytest.raises(ProtocolError, match="chunk keeps more"):
        sparse_frame([0, 0, 0], [one] * 4, Sparse(2), CHUNK + 10)


@pytest.mark.parametrize("low", [16, 63, 64, 255])
def test_a_gap_has_15_low_bits_at_most(low: int):
    def frame(low: int) -> bytes:
        return struct.pack("<IBHH", 1, low, 0, 0x3F80) + bytes(-(-(2 + low) // 8)) + b"\x80"

    assert Sparse(1).decode(frame(15), 10).tolist() == [0.0] * 10
    with pytest.raises(ProtocolError, match="low bits"):
        Sparse(1).decode(frame(low), 10)


def test_streams_end_where_their_content_ends():
    frame = Sparse(3).encode(np.array([0, 1, 0, -2, 3], np.float32))
    assert Sparse(3).decode(frame, 5).tolist() == [0, 1, 0, -2.5, 2.5]
    planes, unary = frame[9:10], frame[10:]
    assert len(planes) == 1 and len(unary) == 1, "3 x 2 bits, then 0 1 0 1 1"
    for changed in (
        frame[:9] + bytes([planes[0] | 1]) + unary,
        frame[:10] + bytes([unary[0] | 1]),
        frame + b"\0",
        frame[:-1],
    ):
        with pytest.raises(ProtocolError):
            Sparse(3).decode(changed, 5)


@pytest.mark.parametrize("scale", [0x7F80, 0xFFC0, 0x8000 | 0x3F80, 0x0001, 0x7C02])
def test_scales_of_int8_are_checked(scale: int):
    assert Int8().decode(struct.pack("<Hb", 0x3F80, -127), 1).tolist() == [-127]
    with pytest.raises(ProtocolError):
        Int8().decode(struct.pack("<Hb", scale, 1), 1)


def test_the_largest_scale_is_the_largest_that_stays_finite():
    found = Int8().decode(struct.pack("<Hb", 0x7C01, 127), 1)
    assert found[0] == np.float32(127) * LARGEST_SCALE < np.inf
    with pytest.raises(ProtocolError):
        Int8().decode(struct.pack("<Hb", 0x3F80, -128), 1)


def test_numbers_of_bf16_are_finite():
    with pytest.raises(ProtocolError, match="finite"):
        Bf16().decode(struct.pack("<2H", 0x3F80, 0xFF80), 2)


# Error feedback


def sent_and_owed(codec: Codec, numbers: Floats, parts: int = 1) -> tuple[Floats, Floats]:
    """What arrives of an update, and what it leaves out."""
    owed: list[Floats] = []
    data = b"".join(encode(np.array_split(numbers, parts), codec, owed.append))
    return decoded(data, numbers.size), np.concatenate(owed)


@pytest.mark.parametrize("codec", [Bf16(), Int8(), Sparse(3)], ids=str)
def test_what_is_owed_is_what_was_given_less_what_was_sent(codec: Codec):
    numbers = make("normal", FRAME_NUMBERS + 100, 0)
    sent, owed = sent_and_owed(codec, numbers, parts=3)
    assert sent.tobytes() == after(numbers, codec).tobytes()
    assert owed.tobytes() == np.subtract(numbers, sent).tobytes()


def test_what_is_owed_is_told_before_its_frame_is_handed_on():
    owed: list[Floats] = []
    parts = encode(make("normal", 2 * FRAME_NUMBERS, 0), Sparse(1), owed.append)
    next(parts)  # what stands before the frames
    for told in (1, 2):
        next(parts)
        assert len(owed) == told


@FEW
@given(codecs, st.sampled_from([1, 5000, 70_000]), seeds, st.integers(1, 5))
def test_all_that_was_sent_and_what_is_owed_are_all_that_was_learned(
    codec: Codec, size: int, seed: int, rounds: int
):
    learned, sent, most = np.zeros(size), np.zeros(size), 0.0
    owed = np.zeros(size, np.float32)
    for turn in range(rounds):
        delta = make("heavy tails", size, seed + turn)
        learned += delta
        most = max(most, np.abs(learned).max())  # on the way: it may end near zero
        arrived, owed = sent_and_owed(codec, delta + owed, parts=3)
        sent += arrived
    off = np.abs(sent + owed - learned)
    assert off.max() <= 2.0**-22 * rounds * (most + np.abs(sent).max()) + 1e-30


def test_what_is_not_among_the_largest_is_owed():
    sent, owed = sent_and_owed(Sparse(1), np.array([3.0, 2.0, -0.5], np.float32))
    assert sent.tolist() == [3, 0, 0]
    assert owed.tolist() == [0, 2, -0.5]


def test_numbers_that_are_never_the_largest_are_sent_in_the_end():
    delta = np.array([1.0, 0.25], np.float32)
    sent, owed = np.zeros(2), np.zeros(2, np.float32)
    for _ in range(20):
        arrived, owed = sent_and_owed(Sparse(1), delta + owed)
        sent += arrived
    assert sent[1] > 0 and np.abs(sent + owed - 20 * delta).max() == 0


@pytest.mark.parametrize("codec", ALL)
def test_of_a_frame_that_overflowed_nothing_is_sent_or_owed(codec: Codec):
    numbers = np.full(FRAME_NUMBERS + 2, LARGEST, np.float32)
    with np.errstate(over="ignore"):
        numbers[-1] += LARGEST  # what was owed before
    owed: list[Floats] = []
    parts = encode(numbers, codec, owed.append)
    for _ in ("what stands before the frames", "the frame before"):
        next(parts)
    with pytest.raises(ValueError, match="finite"):
        next(parts)
    assert [frame.size for frame in owed] == [FRAME_NUMBERS]
