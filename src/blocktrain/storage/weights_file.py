"""A weights file as one long array of float32, chunk by chunk.

Weights, velocities and residuals of a block are canonical safetensors files with the same header,
so the same chunk of every one of them holds the same numbers. Knows nothing of what is done with
the numbers.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from blocktrain.codec.dense import Floats
from blocktrain.codec.frames import FRAME_NUMBERS, framed
from blocktrain.errors import ProtocolError
from blocktrain.protocol.messages import CHUNK_BYTES
from blocktrain.storage.blobs import BlobReader
from blocktrain.storage.tensor_file import TensorSpec, canonical, check_like, parse_header

FLOAT = np.dtype("<f4")


def weights_form(reader: BlobReader) -> list[TensorSpec]:
    """The tensors of a weights file: canonical, and of float32 only."""
    specs = parse_header(reader.read, reader.size)
    if odd := next((spec for spec in specs if spec.dtype != "F32"), None):
        raise ProtocolError(f"tensor {odd.name!r} is {odd.dtype}; weights are F32")
    header = canonical(specs)
    if reader.read(0, min(len(header), reader.size)) != header:
        raise ProtocolError("a weights file is sorted by name and has no metadata")
    reader.forget()
    return specs


def check_form(reader: BlobReader, form: Sequence[TensorSpec]) -> None:
    """Refuse a file that is not a weights file of these tensors."""
    header = canonical(form)
    if reader.size == len(header) + FLOAT.itemsize * number_count(form):
        found = reader.read(0, len(header))
        reader.forget()
        if found == header:
            return
    check_like(weights_form(reader), form)  # which tells what is wrong


class TensorChange(NamedTuple):
    """How far a tensor is from its base, and how large it is there: root mean squares."""

    name: str
    distance: float
    base: float


def tensor_changes(
    reader: BlobReader, base: BlobReader, form: Sequence[TensorSpec]
) -> list[TensorChange]:
    """Tensor by tensor, the distance between two files of this form. It is not finite where one of
    their numbers is not, or is too large to be squared: so this one pass finds those too."""
    header, first = len(canonical(form)), 0
    squares, base_squares = np.zeros(len(form)), np.zeros(len(form))
    sizes = [math.prod(spec.shape) for spec in form]
    ends, room = list(accumulate(sizes)), np.empty(FRAME_NUMBERS, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for here, before in _pairs(reader, base, header):
            difference = np.subtract(here, before, out=room[: here.size])
            last = first + here.size
            for index in range(bisect_right(ends, first), len(form)):
                start = ends[index] - sizes[index]
                if start >= last:
                    break
                part = slice(max(start, first) - first, min(ends[index], last) - first)
                squares[index] += np.dot(difference[part], difference[part])
                base_squares[index] += np.dot(before[part], before[part])
            first = last
    counts = np.maximum(1, sizes)
    distances, bases = np.sqrt(squares / counts).tolist(), np.sqrt(base_squares / counts).tolist()
    return list(map(TensorChange, (spec.name for spec in form), distances, bases))


def _pairs(reader: BlobReader, base: BlobReader, header: int) -> Iterator[tuple[Floats, Floats]]:
    """The numbers of two files of one form, piece by piece."""
    for index in range(reader.chunk_count):
        pieces = (chunk_numbers(file, index, header) for file in (reader, base))
        yield from zip(*pieces, strict=True)


def all_numbers(reader: BlobReader, header: int) -> Iterator[Floats]:
    """A file's numbers, frame by frame; a frame lasts until the next one is asked for."""
    return framed(
        piece
        for index in range(reader.chunk_count)
        for piece in chunk_numbers(reader, index, header)
    )


def chunk_numbers(
    reader: BlobReader, index: int, header: int, most: int = FRAME_NUMBERS
) -> Iterator[Floats]:
    """What one chunk holds of a file's numbers, cut as `chunk_cuts` says: whole numbers, as
    header and chunks are multiples of 8 bytes. A piece lasts until the next one is asked for."""
    pieces = chunk_cuts(reader, index, header, most)
    lengths = [FLOAT.itemsize * size for size in pieces]
    skipped = _chunk_length(reader, index) - sum(lengths)
    parts = reader.parts(index, [skipped, *lengths])
    next(parts)  # the header
    return (np.frombuffer(part, FLOAT) for part in parts)


def chunk_cuts(reader: BlobReader, index: int, header: int, most: int = FRAME_NUMBERS) -> list[int]:
    """How many numbers of a chunk are in each piece: they end at multiples of `most`, as a codec's
    frames do, and are few enough for the arithmetic to stay in the cache."""
    first = first_number(index, header)
    last = max(0, index * CHUNK_BYTES + _chunk_length(reader, index) - header) // FLOAT.itemsize
    inner = range(first - first % most + most, last, most)
    return [end - start for start, end in pairwise([first, *inner, last]) if end > start]


def _chunk_length(reader: BlobReader, index: int) -> int:
    return min(CHUNK_BYTES, reader.size - index * CHUNK_BYTES)


def first_number(index: int, header: int) -> int:
    """The place of a chunk's first number among all of the file."""
    return max(0, index * CHUNK_BYTES - header) // FLOAT.itemsize


def number_count(form: Sequence[TensorSpec]) -> int:
    """Numbers of a weights file."""
    return sum(math.prod(spec.shape) for spec in form)
