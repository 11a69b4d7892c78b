"""The safetensors format, read and written in parts, because files are stored in chunks.

    8 bytes    length of the header, little-endian
    header     JSON: name -> dtype, shape, data_offsets; padded with spaces to a multiple of 8
    data       the tensors, end to end

Files written here are canonical: tensors are sorted by name, without metadata. So equal tensors
have equal bytes and hashes on every machine. Files to read come from untrusted machines: every
number in a header is checked before anything is allocated for it, and every fault raises
ProtocolError.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from io import BufferedReader
from typing import Any

import numpy as np
import numpy.typing as npt

from blocktrain.codec.dense import from_bf16
from blocktrain.errors import ProtocolError

Array = npt.NDArray[Any]
Tensors = dict[str, Array]
Buffer = bytes | bytearray | memoryview

LARGEST_HEADER = 16 * 1024 * 1024
LONGEST_NAME = 256  # characters
MOST_DIMENSIONS = 32
MOST_MARKS = 1 << 18  # commas and brackets in a header: about ten per tensor
MOST_ELEMENTS = 2**53
PIECE_BYTES = 4 * 1024 * 1024
METADATA = "__metadata__"

DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),  # as bits, since numpy has no bfloat16; `decode` makes them float32
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items() if name != "BF16"}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor in a file, at bytes start .. end - 1."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def parse_header(read: Callable[[int, int], bytes], size: int) -> list[TensorSpec]:
    """The tensors of a file of `size` bytes, in the file's order. `read(offset, length)` is only
    called for bytes inside the file."""
    if size < 8:
        raise ProtocolError(f"a file of {size} bytes is too short for safetensors")
    length = int.from_bytes(read(0, 8), "little")
    if length > min(LARGEST_HEADER, size - 8):
        raise ProtocolError(f"a header of {length} bytes is too long for a file of {size} bytes")
    entries = _parse_json(read(8, length))
    start = 8 + length
    specs = [_spec(name, entry, start) for name, entry in entries.items() if name != METADATA]
    specs.sort(key=lambda spec: (spec.start, spec.end, spec.name))
    for spec in specs:
        if spec.start != start:
            raise ProtocolError(f"{spec.name!r} does not begin where the tensor before it ends")
        start = spec.end
    if start != size:
        raise ProtocolError(f"the tensors end at byte {start}, but the file has {size} bytes")
    return specs


def header_bytes(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """The canonical header of a file whose tensors have these names, dtypes and shapes. With
    `metadata`, which other programs may need, it is not canonical."""
    entries: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    start = 0
    for name, dtype, shape in sorted(tensors):
        if name in entries:
            raise ProtocolError(f"two tensors are named {name!r}")
        _check_name(name)
        end = start + _byte_count(name, dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def canonical(specs: Iterable[TensorSpec]) -> bytes:
    """The canonical header of a file with these tensors."""
    return header_bytes((spec.name, spec.dtype, spec.shape) for spec in specs)


def encode(tensors: Mapping[str, Array]) -> Iterator[bytes | memoryview]:
    """A canonical file, piece by piece; pieces are views of the tensors."""
    yield header_bytes((name, _dtype_name(name, t), t.shape) for name, t in tensors.items())
    for _, tensor in sorted(tensors.items()):
        little = tensor.astype(tensor.dtype.newbyteorder("<"), order="C", copy=False)
        data = little.reshape(-1).view(np.uint8)
        for start in range(0, data.size, PIECE_BYTES):
            yield data[start : start + PIECE_BYTES].data


def decode(data: Buffer) -> dict[str, Array]:
    """The tensors of a whole file, as views of `data`, writable if `data` is. BF16 becomes float32,
    which is a copy."""
    view = memoryview(data).cast("B")
    specs = parse_header(lambda start, length: bytes(view[start : start + length]), len(view))
    return {spec.name: _array(spec, view) for spec in specs}


def read_specs(file: BufferedReader, size: int) -> list[TensorSpec]:
    """The tensors of an open file, in the file's order."""

    def read(offset: int, length: int) -> bytes:
        file.seek(offset)
        return file.read(length)

    return parse_header(read, size)


def read_tensor(file: BufferedReader, spec: TensorSpec, *, bf16_as_bits: bool = False) -> Array:
    """One tensor of an open file, writable. BF16 becomes float32, or uint16 with `bf16_as_bits`,
    which is not copied."""
    data = bytearray(spec.end - spec.start)
    file.seek(spec.start)
    if file.readinto(data) != len(data):
        raise ProtocolError(f"the file ends inside tensor {spec.name!r}")
    return _array(replace(spec, start=0, end=len(data)), memoryview(data), bf16_as_bits)


def check_like(actual: Iterable[TensorSpec], expected: Iterable[TensorSpec]) -> None:
    """Raise ProtocolError unless a file has exactly the expected tensors."""
    actual_by_name = {spec.name: spec for spec in actual}
    expected_by_name = {spec.name: spec for spec in expected}
    for name in sorted(actual_by_name.keys() | expected_by_name.keys()):
        if name not in actual_by_name:
            raise ProtocolError(f"tensor {name!r} is missing")
        if name not in expected_by_name:
            raise ProtocolError(f"tensor {name!r} does not belong here")
        spec, model = actual_by_name[name], expected_by_name[name]
        if (spec.dtype, spec.shape) != (model.dtype, model.shape):
            raise ProtocolError(
                f"tensor {name!r} is {spec.dtype}{list(spec.shape)},"
                f" not {model.dtype}{list(model.shape)}"
            )


def _parse_json(text: bytes) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise ProtocolError("a safetensors header begins with {")
    # Count before parsing: a parsed value takes many times the memory of its text.
    if sum(text.count(mark) for mark in (b",", b"[", b"{")) > MOST_MARKS:
        raise ProtocolError("the header names too many tensors")
    try:
        header = json.loads(text.decode(), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError):
        raise ProtocolError("the header is not valid JSON") from None
    metadata = header.get(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ProtocolError("the header's metadata is not a table of strings")
    return dict(header)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ProtocolError("the header names a tensor twice")
    return entries


def _spec(name: str, entry: Any, data_start: int) -> TensorSpec:
    _check_name(name)
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ProtocolError(f"{name!r} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not _is_counts(shape) or not _is_counts(offsets) or len(offsets) != 2:
        raise ProtocolError(f"shape and data_offsets of {name!r} must be lists of whole numbers")
    start, end = offsets
    if end - start != _byte_count(name, dtype, shape):
        raise ProtocolError(f"data_offsets of {name!r} do not fit its shape")
    return TensorSpec(name, dtype, tuple(shape), data_start + start, data_start + end)


def _check_name(name: str) -> None:
    if len(name) > LONGEST_NAME or name == METADATA:
        raise ProtocolError(f"{name[:40]!r} is not a valid name of a tensor")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ProtocolError(f"a tensor's name is not valid Unicode: {name!r}") from None


def _is_counts(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value <= MOST_ELEMENTS for value in values
    )


def _byte_count(name: str, dtype: Any, shape: Iterable[int]) -> int:
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ProtocolError(f"tensor {name!r} has an unknown dtype")
    sizes = list(shape)
    # Zeros count as ones, so that no other dimension is too large for numpy.
    if len(sizes) > MOST_DIMENSIONS or math.prod(size or 1 for size in sizes) > MOST_ELEMENTS:
        raise ProtocolError(f"tensor {name!r} has too many dimensions or elements")
    return math.prod(sizes) * DTYPES[dtype].itemsize


def _dtype_name(name: str, tensor: Array) -> str:
    dtype_name = DTYPE_NAMES.get(tensor.dtype.newbyteorder("<"))
    if dtype_name is None:
        raise ProtocolError(f"tensor {name!r} has dtype {tensor.dtype}, which cannot be stored")
    return dtype_name


def _array(spec: TensorSpec, data: memoryview, bf16_as_bits: bool = False) -> Array:
    flat: Array = np.frombuffer(data[spec.start : spec.end], DTYPES[spec.dtype])
    if spec.dtype == "BF16" and not bf16_as_bits:
        flat = from_bf16(flat)
    if spec.dtype == "BOOL" and (flat.view(np.uint8) > 1).any():
        raise ProtocolError(f"tensor {spec.name!r} contains booleans that are neither 0 nor 1")
    return np.require(flat.reshape(spec.shape), requirements="A")
