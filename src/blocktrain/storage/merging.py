"""Merging whole files: from a version and its updates to the next version, chunk by chunk.

Beside the sums of one chunk, a chunk of the version and one of an update are in memory; so it
grows neither with the files nor with the number of updates. How numbers are merged is the
business of `core.merge`, and how a version is cut down to what a small difference leads to, that
of `core.following`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from blocktrain.core.codec import FRAME_NUMBERS, Codec, Decoder, enclose
from blocktrain.core.following import compress
from blocktrain.core.merge import (
    Doubles,
    Floats,
    Outer,
    WeightedMean,
    caught_up,
    finite_floats,
    outer_step,
)
from blocktrain.errors import ProtocolError
from blocktrain.protocol.messages import Blob, Recipe
from blocktrain.protocol.tensors import TensorSpec, canonical, check_like
from blocktrain.storage.blobs import BlobReader, Blobs, BlobWriter
from blocktrain.storage.weights_file import (
    chunk_numbers,
    cuts,
    finite,
    first_number,
    number_count,
    weights_form,
)


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
class Compression:
    """How the difference between two versions is encoded, and what the versions before still owe:
    None where it is nothing. Without a codec nothing is left out any more."""

    codec: Codec | None
    owed: Blob | None


@dataclass(frozen=True)
class Merged:
    """The next version. Its velocity is None where there is no outer momentum; the difference to
    the version before and what is owed, where versions are not compressed."""

    weights: Blob
    velocity: Blob | None
    difference: Blob | None = None
    owed: Blob | None = None


def check_update(reader: BlobReader, form: Sequence[TensorSpec]) -> None:
    """Refuse, with a ProtocolError, weights of another form than the block's, or with numbers that
    are not finite."""
    check_like(weights_form(reader), form)
    if not finite(reader, form):
        raise ProtocolError("the update holds numbers that are not finite")


def check_encoded(reader: BlobReader, form: Sequence[TensorSpec]) -> None:
    """Refuse, with a ProtocolError, what does not decode to as many finite numbers as the block
    has."""
    for _ in Decoder(reader.read, reader.size, number_count(form)).frames():
        pass


def merge_blobs(
    blobs: Blobs,
    current: Blob,
    updates: Sequence[Update],
    velocity: Blob | None,
    outer: Outer,
    compression: Compression | None = None,
) -> Merged:
    """Write the next version of `current`; it does not depend on the order of the updates."""
    owed = compression.owed if compression else None
    files = _Files.open(blobs, current, updates, velocity if outer.momentum else None, owed)
    weights, speeds, debts = (_begun(blobs, files.header) for _ in range(3))
    targets = _targets(files, outer, speeds)
    difference = None
    codec = compression.codec if compression else None
    if codec:
        frames = _compressed(_framed(targets), codec, weights, debts)
        difference = blobs.write(enclose(codec, frames))
    else:
        for _, target in targets:
            weights.write(finite_floats(target).data)
    return Merged(
        weights.finish(),
        speeds.finish() if outer.momentum else None,
        difference,
        debts.finish() if codec else None,
    )


def _begun(blobs: Blobs, header: bytes) -> BlobWriter:
    writer = blobs.writer()
    writer.write(header)
    return writer


@dataclass(frozen=True)
class _Files:
    """All that a merge reads, found to be of one form; in an order of its own."""

    current: BlobReader
    velocity: BlobReader | None
    owed: BlobReader | None
    updates: list["_Weights | _Learned"]
    header: bytes

    @classmethod
    def open(
        cls,
        blobs: Blobs,
        current: Blob,
        updates: Sequence[Update],
        velocity: Blob | None,
        owed: Blob | None,
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
                decoder = Decoder(reader.read, reader.size, number_count(form))
                return _Learned(decoder, update.weight, update.share)
            start = alike(update.start) if update.start else None
            return _Weights(alike(update.end), start, update.weight, update.share)

        ordered = sorted(updates, key=lambda update: update.id)
        speed, debt = (alike(blob) if blob else None for blob in (velocity, owed))
        return cls(weights, speed, debt, [opened(update) for update in ordered], canonical(form))


@dataclass(frozen=True)
class _Weights:
    """An update that is a block's weights."""

    end: BlobReader
    start: BlobReader | None
    weight: float
    share: float

    def ends(self, index: int, header: int, current: Floats) -> Iterator[Floats | Doubles]:
        """What it makes of one chunk, in pieces."""
        ends = chunk_numbers(self.end, index, header)
        starts = chunk_numbers(self.start, index, header) if self.start else None
        for cut in cuts(current.size):
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
        first = first_number(index, header)
        for cut in cuts(current.size):
            here = current[cut]
            learned = self.decoder.numbers(first + cut.start, here.size).astype(np.float64)
            yield here + self.share * learned


def _targets(files: _Files, outer: Outer, speeds: BlobWriter) -> Iterator[tuple[Floats, Doubles]]:
    """The version and where the next one should be, in pieces; velocities are written meanwhile."""
    for index in range(files.current.chunk_count):
        for current, target, speed in _merged(files, index, outer):
            if speed is not None:
                speeds.write(speed.data)
            yield current, target


def _merged(
    files: _Files, index: int, outer: Outer
) -> Iterator[tuple[Floats, Doubles, Floats | None]]:
    """One chunk of the version, of where the next one should be and of its velocity, in pieces."""
    header = len(files.header)
    current = chunk_numbers(files.current, index, header)
    pieces = cuts(current.size)
    means = [WeightedMean() for _ in pieces]
    for update in files.updates:
        _add(means, update, update.ends(index, header, current))
    velocity = chunk_numbers(files.velocity, index, header) if files.velocity else None
    owed = chunk_numbers(files.owed, index, header) if files.owed else None
    for cut in pieces:
        # A sum goes when it is used: that makes room for what the writers gather.
        mean_here = means.pop(0).mean()
        before = None if velocity is None else velocity[cut]
        here = current[cut].copy()  # a view would hold the whole chunk as long as it is held
        target, speed = outer_step(here, mean_here, before, outer)
        yield here, target if owed is None else target + owed[cut], speed


def _framed(pieces: Iterable[tuple[Floats, Doubles]]) -> Iterator[tuple[Floats, Doubles]]:
    """The same numbers, cut as a codec cuts them; a frame lasts until the next one is asked for."""
    current, target = np.empty(FRAME_NUMBERS, np.float32), np.empty(FRAME_NUMBERS)
    filled = 0
    for here, wanted in pieces:
        done = 0
        while done < here.size:
            taken = min(here.size - done, FRAME_NUMBERS - filled)
            current[filled : filled + taken] = here[done : done + taken]
            target[filled : filled + taken] = wanted[done : done + taken]
            done, filled = done + taken, filled + taken
            if filled == FRAME_NUMBERS:
                yield current, target
                filled = 0
    if filled:
        yield current[:filled], target[:filled]


def _compressed(
    frames: Iterable[tuple[Floats, Doubles]], codec: Codec, weights: BlobWriter, debts: BlobWriter
) -> Iterator[tuple[int, bytes]]:
    """The encoded difference, frame by frame; weights and debts are written on the way."""
    for current, target in frames:
        frame = compress(current, target, codec)
        weights.write(frame.following.data)
        debts.write(frame.owed.data)
        yield current.size, frame.difference


def _add(
    means: list[WeightedMean], update: _Weights | _Learned, ends: Iterator[Floats | Doubles]
) -> None:
    """One chunk of an update, none of which is left in memory afterwards."""
    for mean, end in zip(means, ends, strict=True):
        mean.add(end, update.weight)
