"""Merging whole files: from a version and its updates to the next version, chunk by chunk.

Beside the sums of one chunk, a few pieces are in memory; so it grows neither with the files nor
with the number of updates. One thread reads and adds up, another makes the next version of it. How
numbers are merged is the business of `core.merge`, and how a version is cut down to what a small
difference leads to, that of `core.following`.
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
from blocktrain.errors import DivergedError, ProtocolError
from blocktrain.protocol.messages import Blob, Recipe
from blocktrain.protocol.tensors import TensorSpec, canonical, check_like
from blocktrain.storage.blobs import BlobReader, Blobs, BlobWriter
from blocktrain.storage.read_ahead import read_ahead
from blocktrain.storage.weights_file import (
    chunk_cuts,
    chunk_numbers,
    finite,
    first_number,
    number_count,
    weights_form,
)

AHEAD = 8  # pieces that are added up before they are needed
NOTHING = np.empty(0, np.float32)


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
    try:
        return _write(blobs, files, outer, compression.codec if compression else None)
    except DivergedError:
        files.check()  # what was altered on the disk is no update's fault
        raise


def _write(blobs: Blobs, files: "_Files", outer: Outer, codec: Codec | None) -> Merged:
    size = files.current.size
    with blobs.writer(size) as weights, blobs.writer(size) as speeds, blobs.writer(size) as debts:
        for writer in (weights, speeds, debts):
            writer.write(files.header)
        pieces = _moving(read_ahead(_targets(files, outer, codec), AHEAD), speeds)
        difference = None
        if codec:
            frames = _compressed(_framed(pieces), codec, weights, debts)
            difference = blobs.write(enclose(codec, frames))
        else:
            for piece in pieces:
                weights.write(finite_floats(piece.target).data)
        return Merged(
            weights.finish(),
            speeds.finish() if outer.momentum else None,
            difference,
            debts.finish() if codec else None,
        )


def _moving(pieces: Iterable["_Piece"], speeds: BlobWriter) -> Iterator["_Piece"]:
    """The same pieces; their velocities are written on the way."""
    for piece in pieces:
        if piece.speed is not None:
            speeds.write(piece.speed.data)
        yield piece


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

    def check(self) -> None:
        """Notice whatever was altered."""
        files = [file for update in self.updates for file in update.files()]
        files += [file for file in (self.current, self.velocity, self.owed) if file]
        for file in files:
            for index in range(file.chunk_count):
                file.chunk(index)


@dataclass(frozen=True)
class _Weights:
    """An update that is a block's weights."""

    end: BlobReader
    start: BlobReader | None
    weight: float
    share: float

    @property
    def needs_current(self) -> bool:
        return self.start is not None

    def files(self) -> list[BlobReader]:
        return [self.end, *([self.start] if self.start else [])]

    def ends(
        self, index: int, header: int, current: Sequence[Floats]
    ) -> Iterator[Floats | Doubles]:
        """What it makes of one chunk, in pieces."""
        ends = chunk_numbers(self.end, index, header)
        if self.start is None:
            yield from ends
            return
        starts = chunk_numbers(self.start, index, header)
        for end, start, here in zip(ends, starts, current, strict=True):
            yield caught_up(end, start, here, self.share)


@dataclass(frozen=True)
class _Learned:
    """An update that is what was learned; fresh or late, it is added to the newest weights."""

    decoder: Decoder
    weight: float
    share: float
    needs_current = True

    def files(self) -> list[BlobReader]:
        return []  # checked whenever they are read

    def ends(self, index: int, header: int, current: Sequence[Floats]) -> Iterator[Doubles]:
        first = first_number(index, header)
        for here in current:
            learned = self.decoder.numbers(first, here.size).astype(np.float64)
            first += here.size
            if self.share != 1.0:
                learned *= self.share
            learned += here
            yield learned


@dataclass(frozen=True)
class _Piece:
    """Some numbers of a version, where those of the next one should be, and their velocity."""

    current: Floats
    target: Doubles
    speed: Floats | None = None


def _targets(files: _Files, outer: Outer, codec: Codec | None) -> Iterator[_Piece]:
    """What the next version is made of, chunk by chunk, in pieces that end where frames end, and
    where chunks do."""
    means_only = not codec and outer == Outer() and not any(u.needs_current for u in files.updates)
    merged = _means if means_only else _merged
    for index in range(files.current.chunk_count):
        yield from merged(files, index, outer)


def _means(files: _Files, index: int, outer: Outer) -> Iterator[_Piece]:
    """One chunk where the version before does not matter, and so is not read."""
    for mean in _added_up(files, index, []):
        yield _Piece(NOTHING, mean)


def _merged(files: _Files, index: int, outer: Outer) -> Iterator[_Piece]:
    """One chunk."""

    def numbers(reader: BlobReader) -> Iterator[Floats]:
        return chunk_numbers(reader, index, len(files.header))

    current = [piece.copy() for piece in numbers(files.current)]  # for every update, and to keep
    nothing = [None] * len(current)
    velocity = numbers(files.velocity) if files.velocity else nothing
    owed = numbers(files.owed) if files.owed else nothing
    means = _added_up(files, index, current)
    for here, mean, before, debt in zip(current, means, velocity, owed, strict=True):
        target, speed = outer_step(here, mean, before, outer)
        yield _Piece(here, target if debt is None else target + debt, speed)


def _added_up(files: _Files, index: int, current: Sequence[Floats]) -> Iterator[Doubles]:
    """The means of all updates of one chunk; a sum goes when it was asked for."""
    header = len(files.header)
    sums = [WeightedMean() for _ in chunk_cuts(files.current, index, header)]
    for update in files.updates:
        for mean, end in zip(sums, update.ends(index, header, current), strict=True):
            mean.add(end, update.weight)
    while sums:
        yield sums.pop(0).mean()


def _framed(pieces: Iterable[_Piece]) -> Iterator[tuple[Floats, Doubles]]:
    """Versions and targets, cut as a codec cuts them: the pieces of a frame that lies in several
    chunks are put together."""
    held: list[_Piece] = []
    for piece in pieces:
        held.append(piece)
        if sum(each.target.size for each in held) == FRAME_NUMBERS:
            yield _joined(held)
            held = []
    if held:
        yield _joined(held)


def _joined(pieces: Sequence[_Piece]) -> tuple[Floats, Doubles]:
    if len(pieces) == 1:
        return pieces[0].current, pieces[0].target
    return (
        np.concatenate([piece.current for piece in pieces]),
        np.concatenate([piece.target for piece in pieces]),
    )


def _compressed(
    frames: Iterable[tuple[Floats, Doubles]], codec: Codec, weights: BlobWriter, debts: BlobWriter
) -> Iterator[tuple[int, bytes]]:
    """The encoded difference, frame by frame; weights and debts are written on the way."""
    for current, target in frames:
        frame = compress(current, target, codec)
        weights.write(frame.following.data)
        debts.write(frame.owed.data)
        yield current.size, frame.difference
