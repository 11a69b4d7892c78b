"""A weights file as one long array of float32, and the checks on an update before it counts."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from blocktrain.codec.frames import FRAME_NUMBERS, UpdateDecoder
from blocktrain.codec.registry import Codec
from blocktrain.errors import ProtocolError
from blocktrain.numerics.quantization import Floats
from blocktrain.protocol.messages import Blob, Recipe
from blocktrain.storage.blobs import BlobReader, Blobs, ForwardReader
from blocktrain.storage.tensor_file import TensorSpec, canonical, check_like, parse_header

FLOAT = np.dtype("<f4")
FRAME_BYTES = FRAME_NUMBERS * FLOAT.itemsize


def weights_form(reader: BlobReader) -> list[TensorSpec]:
    """The tensors of a weights file: canonical, and of float32 only."""
    specs = parse_header(reader.read, reader.size)
    if odd := next((spec for spec in specs if spec.dtype != "F32"), None):
        raise ProtocolError(f"tensor {odd.name!r} is {odd.dtype}; weights are F32")
    header = canonical(specs)
    if reader.read(0, min(len(header), reader.size)) != header:
        raise ProtocolError("a weights file is sorted by name and has no metadata")
    return specs


def check_form(reader: BlobReader, form: Sequence[TensorSpec]) -> None:
    """Refuse a file that is not a weights file of these tensors."""
    header = canonical(form)
    has_size = reader.size == len(header) + FLOAT.itemsize * number_count(form)
    if not has_size or reader.read(0, len(header)) != header:
        check_like(weights_form(reader), form)  # its error says what is wrong


def weights_frames(reader: ForwardReader, header_size: int) -> Iterator[Floats]:
    """A file's numbers, FRAME_NUMBERS at a time. They may count once the last one was taken."""
    for start in range(header_size, reader.size, FRAME_BYTES):
        yield np.frombuffer(reader.read(start, min(FRAME_BYTES, reader.size - start)), FLOAT)


def number_count(form: Sequence[TensorSpec]) -> int:
    """Numbers of a weights file."""
    return sum(math.prod(spec.shape) for spec in form)


class TensorChange(NamedTuple):
    """How far a tensor is from its base, and how large it is there: root mean squares."""

    name: str
    distance: float
    base: float


def check_update(
    blobs: Blobs, update: Recipe | Blob, base: Blob, form: Sequence[TensorSpec]
) -> list[TensorChange]:
    """How far weights are from their base; refused, with a ProtocolError, if they have another form
    than the block, or numbers that are not finite."""
    check_form(blobs.reader(update), form)
    changes = _tensor_changes(blobs, update, base, form)
    if not all(math.isfinite(change.distance) for change in changes):
        raise ProtocolError("the update holds numbers that are not finite, or far too large")
    return changes


def check_encoded(
    blobs: Blobs, update: Recipe | Blob, form: Sequence[TensorSpec], most: Codec
) -> float:
    """The root mean square of an encoded change; refused, with a ProtocolError, if its codec is not
    `most` or keeps more, or if it does not decode to as many finite numbers as the block has."""
    numbers = number_count(form)
    with blobs.forward_reader(update) as reader, np.errstate(over="ignore"):
        decoder = UpdateDecoder(reader.read, reader.size, numbers)
        codec = decoder.codec
        if codec.code != most.code or codec.parameter > most.parameter:
            raise ProtocolError(f"the update is encoded by {codec}; the run allows {most} at most")
        squares = sum(float(np.dot(frame, frame)) for frame in decoder.frames())
        reader.finish()
    return math.sqrt(squares / max(1, numbers))


def _tensor_changes(
    blobs: Blobs, update: Recipe | Blob, base: Blob, form: Sequence[TensorSpec]
) -> list[TensorChange]:
    """A distance is not finite if one of the numbers is not, or is too large to be squared: so this
    one pass finds those too."""
    header_size = len(canonical(form))
    sums = _SquaredSums(form)
    with (
        blobs.forward_reader(update) as after,
        blobs.forward_reader(base) as before,
        np.errstate(over="ignore", invalid="ignore"),
    ):
        frames = (weights_frames(reader, header_size) for reader in (after, before))
        for new, old in zip(*frames, strict=True):
            sums.add(new - old, old)
    return sums.changes()


class _SquaredSums:
    """Sums over each tensor, from arrays that together are all tensors end to end."""

    def __init__(self, form: Sequence[TensorSpec]) -> None:
        self._names = [spec.name for spec in form]
        self._sizes = [math.prod(spec.shape) for spec in form]
        self._ends = list(accumulate(self._sizes))
        self._changes, self._bases = np.zeros(len(form)), np.zeros(len(form))
        self._place = 0

    def add(self, change: np.ndarray, base: np.ndarray) -> None:
        first, last = self._place, self._place + change.size
        for index in range(bisect_right(self._ends, first), len(self._ends)):
            start, end = self._ends[index] - self._sizes[index], self._ends[index]
            if start >= last:
                break
            part = slice(max(start, first) - first, min(end, last) - first)
            self._changes[index] += np.dot(change[part], change[part])
            self._bases[index] += np.dot(base[part], base[part])
        self._place = last

    def changes(self) -> list[TensorChange]:
        counts = np.maximum(1, self._sizes)
        distances, bases = (np.sqrt(sums / counts) for sums in (self._changes, self._bases))
        return list(map(TensorChange, self._names, distances.tolist(), bases.tolist()))
