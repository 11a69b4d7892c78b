"""Merging whole files: from a version and its updates to the next version, chunk by chunk.

Every file is a canonical safetensors file of float32 tensors with the same header, so what
follows the header is one long array, and the same chunk of every file holds the same numbers.
Beside the sums of one chunk, a chunk of the version and one of an update are in memory; so it
grows neither with the files nor with the number of updates. How numbers are merged is the
business of `core.merge`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from blocktrain.core.codec import Decoder
from blocktrain.core.merge import Doubles, Floats, Outer, WeightedMean, caught_up, outer_step
from blocktrain.errors import ProtocolError
from blocktrain.protocol.messages import CHUNK_BYTES, Blob, Recipe
from blocktrain.protocol.tensors import TensorSpec, canonical, check_like, parse_header
from blocktrain.storage.blobs import BlobReader, Blobs

FLOAT = np.dtype("<f4")
PIECE = 1 << 16  # numbers: what the arithmetic takes at a time, so that it stays in the cache


@dataclass(frozen=True)
class Update:
    """A block's weights after training, and for a late update those it was trained from. Or, where
    it is `encoded`, what was learned, by `core.codec`."""

    id: str
    end: Recipe | Blob
    weight: float
    start: Blob | None = None
    share: float = 1.0  # of what a late update learned that is taken
    encoded: bool = False


@dataclass(frozen=True)
class Merged:
    """The next version; its velocity is None where there is no outer momentum."""

    weights: Blob
    velocity: Blob | None


def check_update(reader: BlobReader, form: Sequence[TensorSpec]) -> None:
    """Refuse, with a ProtocolError, weights of another form than the block's, or with numbers that
    are not finite."""
    check_like(weights_form(reader), form)
    if not finite(reader, form):
        raise ProtocolError("the update holds numbers that are not finite")


def check_encoded(reader: BlobReader, form: Sequence[TensorSpec]) -> None:
    """Refuse, with a ProtocolError, what does not decode to as many finite numbers as the block
    has."""
    for _ in Decoder(reader.read, reader.size, _count(form)).frames():
        pass


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


def finite(reader: BlobReader, form: Sequence[TensorSpec]) -> bool:
    """Whether every number of a weights file is one."""
    start = len(canonical(form))
    for index in range(reader.chunk_count):
        numbers = _numbers(reader, index, start)
        if not all(np.isfinite(numbers[cut]).all() for cut in _cuts(numbers.size)):
            return False
    return True


def merge_blobs(
    blobs: Blobs, current: Blob, updates: Sequence[Update], velocity: Blob | None, outer: Outer
) -> Merged:
    """Write the next version of `current`; it does not depend on the order of the updates."""
    files = _Files.open(blobs, current, updates, velocity if outer.momentum else None)
    weights, speeds = blobs.writer(), blobs.writer()
    weights.write(files.header)
    speeds.write(files.header)
    for index in range(files.current.chunk_count):
        for following, speed in _merged(files, index, outer):
            weights.write(following.data)
            if speed is not None:
                speeds.write(speed.data)
    return Merged(weights.finish(), speeds.finish() if outer.momentum else None)


@dataclass(frozen=True)
class _Files:
    """All that a merge reads, found to be of one form; in an order of its own."""

    current: BlobReader
    velocity: BlobReader | None
    updates: list["_Weights | _Learned"]
    header: bytes

    @classmethod
    def open(
        cls, blobs: Blobs, current: Blob, updates: Sequence[Update], velocity: Blob | None
    ) -> "_Files":
        if len({update.id for update in updates}) != len(updates):
            raise ValueError("an update is merged once")
        weights = blobs.reader(current)
        form = weights_form(weights)

        def alike(blob: Recipe | Blob) -> BlobReader:
            reader = blobs.reader(blob)
            check_like(weights_form(reader), form)
            return reader

        def opened(update: Update) -> _Weights | _Learned:
            if update.encoded:
                reader = blobs.reader(update.end)
                decoder = Decoder(reader.read, reader.size, _count(form))
                return _Learned(decoder, update.weight, update.share)
            start = alike(update.start) if update.start else None
            return _Weights(alike(update.end), start, update.weight, update.share)

        ordered = sorted(updates, key=lambda update: update.id)
        speed = alike(velocity) if velocity else None
        return cls(weights, speed, [opened(update) for update in ordered], canonical(form))


@dataclass(frozen=True)
class _Weights:
    """An update that is a block's weights."""

    end: BlobReader
    start: BlobReader | None
    weight: float
    share: float

    def ends(self, index: int, header: int, current: Floats) -> Iterator[Floats | Doubles]:
        """What it makes of one chunk, in pieces."""
        ends = _numbers(self.end, index, header)
        starts = _numbers(self.start, index, header) if self.start else None
        for cut in _cuts(current.size):
            if starts is None:
                yield ends[cut]
            else:
                yield caught_up(ends[cut], starts[cut], current[cut], self.share)


@dataclass(frozen=True)
class _Learned:
    """An update that is what was learned; fresh or late, it is added to the newest weights."""

    decoder: Decoder
    weight: float
    share: float

    def ends(self, index: int, header: int, current: Floats) -> Iterator[Floats | Doubles]:
        first = max(0, index * CHUNK_BYTES - header) // FLOAT.itemsize
        for cut in _cuts(current.size):
            here = current[cut]
            learned = self.decoder.numbers(first + cut.start, here.size).astype(np.float64)
            yield here + self.share * learned


def _merged(files: _Files, index: int, outer: Outer) -> Iterator[tuple[Floats, Floats | None]]:
    """One chunk of the next version and of its velocity, in pieces."""
    header = len(files.header)
    current = _numbers(files.current, index, header)
    cuts = _cuts(current.size)
    means = [WeightedMean() for _ in cuts]
    for update in files.updates:
        _add(means, update, update.ends(index, header, current))
    velocity = _numbers(files.velocity, index, header) if files.velocity else None
    for cut in cuts:
        # A sum goes when it is used: that makes room for what the writers gather.
        mean_here = means.pop(0).mean()
        before = None if velocity is None else velocity[cut]
        yield outer_step(current[cut], mean_here, before, outer)


def _add(
    means: list[WeightedMean], update: _Weights | _Learned, ends: Iterator[Floats | Doubles]
) -> None:
    """One chunk of an update, none of which is left in memory afterwards."""
    for mean, end in zip(means, ends, strict=True):
        mean.add(end, update.weight)


def _numbers(reader: BlobReader, index: int, header: int) -> Floats:
    """What one chunk holds of a file's numbers: whole ones, as header and chunks are multiples
    of 8 bytes."""
    skipped = max(0, header - index * CHUNK_BYTES)
    return np.frombuffer(memoryview(reader.chunk(index))[skipped:], FLOAT)


def _count(form: Sequence[TensorSpec]) -> int:
    """Numbers of a weights file."""
    return sum(math.prod(spec.shape) for spec in form)


def _cuts(size: int) -> list[slice]:
    return [slice(start, start + PIECE) for start in range(0, size, PIECE)]
