import json
import math
import tracemalloc
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from blocktrain.errors import ProtocolError
from blocktrain.storage import tensor_file
from blocktrain.storage.tensor_file import TensorSpec, check_like, decode, encode, parse_header

Array = npt.NDArray[Any]

FEW = settings(max_examples=40)
TYPES = [np.float32, np.float16, np.int64, np.int32, np.int16, np.int8, np.uint8, np.bool_]
names = st.text(st.characters(codec="utf-8"), max_size=20).filter(lambda n: n != "__metadata__")
shapes = arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
any_array = st.sampled_from(TYPES).flatmap(lambda t: arrays.arrays(t, shapes))
files = st.dictionaries(names, any_array, max_size=6)


def parse(data: bytes) -> list[TensorSpec]:
    def read(offset: int, length: int) -> bytes:
        assert min(offset, length) >= 0 and offset + length <= len(data), "asked past the file"
        return data[offset : offset + length]

    return parse_header(read, len(data))


def with_header(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(
    dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def same(a: dict[str, Array], b: dict[str, Array]) -> bool:
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and a[n].shape == b[n].shape and a[n].tobytes() == b[n].tobytes()
        for n in a
    )


@FEW
@given(files)
def test_what_we_write_both_read(wanted: dict[str, Array]):
    data = b"".join(encode(wanted))
    assert same(decode(data), wanted)
    assert same(safetensors.numpy.load(data), wanted)


@FEW
@given(files)
def test_what_the_package_writes_we_read(wanted: dict[str, Array]):
    contiguous = {name: np.asarray(array, order="C") for name, array in wanted.items()}
    assert same(decode(safetensors.numpy.save(contiguous)), wanted)
    assert same(decode(safetensors.numpy.save(contiguous, {"a": "b"})), wanted)


@FEW
@given(st.dictionaries(names, arrays.arrays(np.float32, shapes), max_size=6))
def test_files_of_one_dtype_are_the_packages_bytes(wanted: dict[str, Array]):
    contiguous = {name: np.asarray(array, order="C") for name, array in wanted.items()}
    assert b"".join(encode(wanted)) == safetensors.numpy.save(contiguous)


@FEW
@given(files)
def test_a_canonical_header_is_a_fixed_point(wanted: dict[str, Array]):
    data = b"".join(encode(wanted))
    specs = parse(data)
    header = tensor_file.canonical(specs)
    assert data.startswith(header) and len(header) % 8 == 0
    assert {spec.name for spec in specs} == wanted.keys()
    for spec in specs:
        assert data[spec.start : spec.end] == wanted[spec.name].tobytes()


def test_views_of_any_layout_are_written_as_their_values():
    base = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    wanted = {"t": base.T, "s": base[:, ::2], "b": base.astype(">i4"), "0": base[0, 0, 0:1]}
    found = decode(b"".join(encode(wanted)))
    for name, array in wanted.items():
        assert found[name].dtype == np.int32
        np.testing.assert_array_equal(found[name], array)


def test_bfloat16_is_widened():
    wanted = torch.tensor([1.0, -2.5, 3e38, math.inf, 1e-40]).bfloat16()
    found = decode(safetensors.torch.save({"x": wanted}))["x"]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, wanted.float().numpy())


def test_decoding_a_writable_buffer_copies_nothing():
    data = bytearray(b"".join(encode({"x": np.zeros(3, np.float32)})))
    decode(data)["x"][1] = 1
    assert decode(data)["x"].tolist() == [0, 1, 0]
    assert not decode(bytes(data))["x"].flags.writeable


def test_a_large_tensor_is_written_in_pieces():
    array = np.zeros(3 * tensor_file.PIECE_BYTES // 4 + 1, np.float32)
    sizes = [len(piece) for piece in encode({"x": array})]
    assert len(sizes) == 5 and max(sizes) == tensor_file.PIECE_BYTES


@pytest.mark.parametrize("dtype", [np.float64, np.uint16, np.complex64, "U3", object])
def test_other_types_are_not_written(dtype: Any):
    with pytest.raises(ProtocolError, match="'x'"):
        list(encode({"x": np.zeros(2, dtype)}))


BAD = {
    "empty": b"",
    "short": b"\x01\0\0\0",
    "longer than the file": (100).to_bytes(8, "little") + b"{}",
    "longer than allowed": (tensor_file.LARGEST_HEADER + 1).to_bytes(8, "little") + b"{}",
    "longer than anything": b"\xff" * 8 + b"{}",
    "no header": bytes(8),
    "no object": with_header(b"[]"),
    "leading space": with_header(b" {}"),
    "not UTF-8": with_header(b'{"\xff":1}'),
    "not JSON": with_header(b"{'a':1}"),
    "deep": with_header(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "many digits": with_header(b'{"a":' + b"9" * 10_000 + b"}"),
    "a name twice": with_header(b'{"a":%(e)s,"a":%(e)s}' % {b"e": json.dumps(entry()).encode()}),
    "a key twice": with_header(
        b'{"a":{"dtype":"U8","dtype":"U8","shape":[],"data_offsets":[0,1]}}', b"1"
    ),
    "name too long": with_header({"a" * 257: entry()}, b"1234"),
    "name no text": with_header(b'{"\\ud800":%s}' % json.dumps(entry()).encode(), b"1234"),
    "entry no object": with_header({"a": 1}),
    "entry missing": with_header({"a": {"dtype": "U8", "shape": [4]}}, b"1234"),
    "entry extra": with_header({"a": {**entry(), "x": 1}}, b"1234"),
    "dtype unknown": with_header({"a": entry("F64", [1], [0, 8])}, bytes(8)),
    "dtype no text": with_header({"a": entry(["U8"])}, b"1234"),
    "shape no list": with_header({"a": entry(shape=4)}, b"1234"),
    "shape negative": with_header({"a": entry(shape=[-2, -2])}, b"1234"),
    "shape a float": with_header({"a": entry(shape=[4.0])}, b"1234"),
    "shape a bool": with_header({"a": entry(shape=[4, True])}, b"1234"),
    "shape NaN": with_header(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,4]}}', b"1234"),
    "shape huge": with_header({"a": entry(shape=[2**53 + 1])}, b"1234"),
    "product huge": with_header({"a": entry(shape=[2**40, 2**40], offsets=[0, 2**80])}, b"1234"),
    "product wraps": with_header({"a": entry(shape=[2**32, 2**32, 0], offsets=[0, 0])}),
    "many sides": with_header({"a": entry(shape=[1] * 33, offsets=[0, 1])}, b"1"),
    "shape too small": with_header({"a": entry(shape=[3])}, b"1234"),
    "offsets backwards": with_header({"a": entry(shape=[0], offsets=[4, 0])}, b"1234"),
    "offsets three": with_header({"a": entry(offsets=[0, 4, 4])}, b"1234"),
    "offsets negative": with_header({"a": entry(offsets=[-4, 0])}, b"1234"),
    "past the end": with_header({"a": entry()}, b"123"),
    "bytes left over": with_header({"a": entry()}, b"12345"),
    "a hole": with_header({"a": entry(), "b": entry(offsets=[5, 9])}, b"123456789"),
    "an overlap": with_header({"a": entry(), "b": entry(offsets=[3, 7])}, b"1234567"),
    "the same twice": with_header({"a": entry(), "b": entry()}, b"1234"),
    "a late start": with_header({"a": entry(offsets=[1, 5])}, b"12345"),
    "metadata no object": with_header({"__metadata__": []}),
    "metadata no text": with_header({"__metadata__": {"a": 1}}),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_header_is_refused(name: str):
    with pytest.raises(ProtocolError):
        parse(BAD[name])


def test_a_truth_value_is_0_or_1():
    with pytest.raises(ProtocolError, match="neither 0 nor 1"):
        decode(with_header({"a": entry("BOOL")}, b"\0\1\2\1"))


@given(st.binary(max_size=200))
def test_noise_is_refused_or_read(data: bytes):
    _refused_or_sound(data)
    _refused_or_sound(with_header(data))
    _refused_or_sound(with_header(b"{" + data))


words = st.sampled_from(["a", "dtype", "shape", "data_offsets", "F32", "U8", "__metadata__"])
numbers = st.integers(-1, 20) | st.sampled_from([2**31, 2**63, 2**64, 10**30]) | st.floats()
json_values = st.recursive(
    st.none() | st.booleans() | numbers | words,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4),
    max_leaves=12,
)
loose_entry = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(sorted(tensor_file.DTYPES)) | json_values,
        "shape": st.lists(numbers, max_size=3) | json_values,
        "data_offsets": st.lists(numbers, min_size=2, max_size=2) | json_values,
    }
)


@given(st.dictionaries(words, loose_entry | json_values, max_size=3), st.binary(max_size=40))
@settings(max_examples=100)
def test_any_json_is_refused_or_read(header: dict[str, object], data: bytes):
    _refused_or_sound(with_header(header, data))


@given(files, st.data())
@settings(max_examples=100)
def test_an_altered_file_is_refused_or_read(wanted: dict[str, Array], data: st.DataObject):
    file = bytearray(b"".join(encode(wanted)))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(file) - 1))
        kind = data.draw(st.sampled_from(["set", "cut", "insert"]))
        if kind == "set":
            file[place] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del file[place : place + data.draw(st.integers(1, 9))]
        else:
            file[place:place] = data.draw(st.binary(max_size=9))
        if not file:
            break
    _refused_or_sound(bytes(file))


def _refused_or_sound(data: bytes) -> None:
    try:
        specs = parse(data)
        found = decode(data)
    except ProtocolError:
        return
    assert sum(spec.end - spec.start for spec in specs) <= len(data)
    assert found.keys() == {spec.name for spec in specs}
    for spec in specs:
        assert (
            math.prod(spec.shape) * tensor_file.DTYPES[spec.dtype].itemsize == spec.end - spec.start
        )


@pytest.mark.parametrize("unit", [b'"":[],', b"{},", b"999,"], ids=["lists", "objects", "numbers"])
def test_a_header_cannot_take_much_memory(unit: bytes):
    """The largest header allowed, of what takes most memory once it is parsed."""
    body = b'{"a":{' if unit.startswith(b'"') else b'{"a":['
    length = tensor_file.LARGEST_HEADER
    data = length.to_bytes(8, "little") + (body + unit * (length // len(unit)))[:length]
    fitting = with_header(body + unit * (tensor_file.MOST_MARKS // 4))
    tracemalloc.start()
    try:
        for case in (data, fitting):
            with pytest.raises(ProtocolError):
                parse(case)
        assert tracemalloc.get_traced_memory()[1] < 4 * length
    finally:
        tracemalloc.stop()


def spec(name: str, dtype: str = "F32", shape: tuple[int, ...] = (2, 3)) -> TensorSpec:
    return TensorSpec(name, dtype, shape, 0, 24)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([spec("a")], "'b' is missing"),
        ([spec("a"), spec("b"), spec("c")], "'c' does not belong"),
        ([spec("a"), spec("b", "F16")], r"'b' is F16\[2, 3\], not F32\[2, 3\]"),
        ([spec("a", shape=(3, 2)), spec("b")], r"'a' is F32\[3, 2\], not F32\[2, 3\]"),
        ([], "'a' is missing"),
    ],
)
def test_the_first_difference_is_named(found: list[TensorSpec], message: str):
    expected = [spec("a"), spec("b")]
    check_like(expected, expected)
    with pytest.raises(ProtocolError, match=message):
        check_like(found, expected)


def test_a_header_has_each_name_once():
    with pytest.raises(ProtocolError, match="'a'"):
        tensor_file.header_bytes([("a", "F32", (1,)), ("a", "F32", (2,))])
    with pytest.raises(ProtocolError, match="__metadata__"):
        tensor_file.header_bytes([("__metadata__", "F32", ())])
