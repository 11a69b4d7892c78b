"""Items that a thread of their own makes, while whoever asks for them works on those before.

Numpy, hashing and files let other threads run meanwhile, so that two processors are busy with one
merge. Knows nothing of what the items are.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import TypeVar

import numpy as np

from blocktrain.codec.delta import encode_delta
from blocktrain.codec.frames import FRAME_NUMBERS, Codec, UpdateDecoder, enclose
from blocktrain.errors import DivergedError, ProtocolError
from blocktrain.numerics.merge import (
    Doubles,
    Floats,
    Outer,
    WeightedMean,
    caught_up,
    finite_floats,
    outer_step,
)
from blocktrain.protocol.messages import CHUNK_BYTES, Blob, Recipe
from blocktrain.storage.blobs import BlobReader, Blobs, BlobWriter, ForwardReader
from blocktrain.storage.tensor_file import TensorSpec, canonical
from blocktrain.storage.weights_file import (
    TensorChange,
    check_form,
    chunk_cuts,
    chunk_numbers,
    first_number,
    number_count,
    tensor_changes,
    weights_form,
)

Item = TypeVar("Item")


def read_ahead(items: Iterator[Item], most: int) -> Iterator[Item]:
    """The same items in the same order, at most so many of them ahead; a failure comes where the
    item would have come."""
    with ThreadPoolExecutor(1) as thread:
        coming = deque(thread.submit(next, items, None) for _ in range(most))
        while (item := coming.popleft().result()) is not None:
            coming.append(thread.submit(next, items, None))
            yield item


AHEAD = 8  # pieces that are added up before they are needed
MADE_AT_ONCE = 3  # chunks: one is on its way to the disk while others keep processors busy
MADE_NUMBERS = 2 * FRAME_NUMBERS  # at a time, by threads side by side: with less they would meet
READ_AT_ONCE = 8  # updates
NOTHING = np.empty(0, np.float32)


@dataclass(frozen=True)
class MergeInput:
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


def check_update(
    reader: BlobReader, base: BlobReader, form: Sequence[TensorSpec]
) -> list[TensorChange]:
    """How far weights are from their base; refused, with a ProtocolError, where they have another
    form than the block's, or numbers that are not finite."""
    check_form(reader, form)
    changes = tensor_changes(reader, base, form)
    if not all(math.isfinite(change.distance) for change in changes):
        raise ProtocolError("the update holds numbers that are not finite, or far too large")
    return changes


def check_encoded(reader: BlobReader, form: Sequence[TensorSpec], most: Codec) -> float:
    """The root mean square of what was learned; refused where it is encoded by another codec than
    `most`, or keeps more, or does not decode to as many finite numbers as the block has."""
    numbers = number_count(form)
    decoder = UpdateDecoder(reader.read, reader.size, numbers)
    found = decoder.codec
    if found.code != most.code or found.parameter > most.parameter:
        raise ProtocolError(f"the update is encoded by {found}; the most is {most}")
    with np.errstate(over="ignore"):
        squares = sum(float(np.dot(frame, frame)) for frame in decoder.frames())
    return math.sqrt(squares / max(1, numbers))


def merge_blobs(
    blobs: Blobs,
    current: Blob,
    updates: Sequence[MergeInput],
    velocity: Blob | None,
    outer: Outer,
    compression: Compression | None = None,
) -> Merged:
    """Write the next version of `current`; it does not depend on the order of the updates."""
    owed = compression.owed if compression else None
    codec = compression.codec if compression else None
    files = _Files.open(blobs, current, updates, velocity if outer.momentum else None, owed)
    try:
        if codec or not files.in_any_order:
            return _write_in_order(blobs, files, outer, codec)
        return _write_side_by_side(blobs, files, outer)
    except (DivergedError, ProtocolError):
        files.check()  # what was altered on the disk is no update's fault
        raise


def _write_side_by_side(blobs: Blobs, files: "_Files", outer: Outer) -> Merged:
    with ThreadPoolExecutor(MADE_AT_ONCE) as threads:
        made = threads.map(partial(_made, blobs, files, outer), range(files.current.chunk_count))
        size, columns = files.current.size, zip(*made, strict=True)
        weights, *speeds = [blobs.add_recipe(Recipe(size=size, chunks=names)) for names in columns]
    return Merged(weights, speeds[0] if speeds else None)


def _made(blobs: Blobs, files: "_Files", outer: Outer, index: int) -> list[str]:
    """One chunk of the next version, and where there is momentum of its velocity: their names."""
    header = files.header[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
    with ExitStack() as begun:
        weights, *speeds = chunks = [
            begun.enter_context(blobs.chunks.incoming(files.current.size))
            for _ in range(2 if outer.momentum else 1)
        ]
        for chunk in chunks:
            chunk.write(header)
        room = np.empty(MADE_NUMBERS, np.float32)
        for piece in _merged(_Chunk(files, index, MADE_NUMBERS), outer, None, used_at_once=True):
            weights.write(finite_floats(piece.target, room).data.cast("B"))
            for chunk in speeds:
                assert piece.speed is not None, "there is momentum"
                chunk.write(piece.speed.data.cast("B"))
        return [chunk.keep() for chunk in chunks]


def _write_in_order(blobs: Blobs, files: "_Files", outer: Outer, codec: Codec | None) -> Merged:
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
    are_too_many: bool
    header: bytes

    @classmethod
    def open(
        cls,
        blobs: Blobs,
        current: Blob,
        updates: Sequence[MergeInput],
        velocity: Blob | None,
        owed: Blob | None,
    ) -> "_Files":
        if len({update.id for update in updates}) != len(updates):
            raise ValueError("an update is merged once")
        weights = blobs.reader(current)
        form = weights_form(weights)
        are_too_many = _are_too_many(updates)

        def alike(blob: Recipe | Blob) -> BlobReader:
            reader = blobs.reader(blob)
            check_form(reader, form)
            return reader

        def opened(update: MergeInput) -> _Weights | _Learned:
            if update.encoded:
                file = blobs.forward_reader(update.end)
                decoder = UpdateDecoder(file.read, file.size, number_count(form))
                if are_too_many:
                    file.forget()
                return _Learned(file, decoder, update.weight, update.share)
            start = alike(update.start) if update.start else None
            return _Weights(alike(update.end), start, update.weight, update.share)

        ordered = sorted(updates, key=lambda update: update.id)
        speed, debt = (alike(blob) if blob else None for blob in (velocity, owed))
        found = [opened(update) for update in ordered]
        return cls(weights, speed, debt, found, are_too_many, canonical(form))

    @property
    def learned(self) -> list["_Learned"]:
        return [update for update in self.updates if isinstance(update, _Learned)]

    @property
    def in_any_order(self) -> bool:
        """Whether chunks may be made in any order, by several threads: what is encoded is read
        from its start to its end."""
        return not self.learned

    def forget(self, some: Sequence["_Weights | _Learned"]) -> None:
        """Let go of what is remembered of some updates, before others are read."""
        for update in some:
            if isinstance(update, _Learned):
                update.decoder.forget()
                if self.are_too_many:
                    update.file.forget()

    def check(self) -> None:
        """Notice whatever was altered."""
        files = [file for update in self.updates for file in update.files()]
        files += [file for file in (self.current, self.velocity, self.owed) if file]
        for file in files:
            for index in range(file.chunk_count):
                file.chunk(index)


def _are_too_many(updates: Sequence[MergeInput]) -> bool:
    """Whether the encoded ones would hold more than as many chunks as are read at once, where these
    come whole over a network. Then each is fetched again for every chunk that is made, as those of
    whole updates are."""
    held = sum(min(CHUNK_BYTES, update.end.size) for update in updates if update.encoded)
    return held > READ_AT_ONCE * CHUNK_BYTES


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

    def ends(self, chunk: "_Chunk") -> Callable[[Floats], Floats | Doubles]:
        """What it makes of one chunk: asked piece by piece, given what the newest version has
        there."""
        ends = chunk.numbers(self.end)
        if self.start is None:
            return lambda here: next(ends)
        starts = chunk.numbers(self.start)
        return lambda here: caught_up(next(ends), next(starts), here, self.share)


@dataclass(frozen=True)
class _Learned:
    """An update that is what was learned; fresh or late, it is added to the newest weights."""

    file: ForwardReader
    decoder: UpdateDecoder
    weight: float
    share: float
    needs_current = True

    def files(self) -> list[BlobReader]:
        return [self.file]

    def ends(self, chunk: "_Chunk") -> Callable[[Floats], Doubles]:
        first = first_number(chunk.index, len(chunk.files.header))

        def end(here: Floats) -> Doubles:
            nonlocal first
            learned = self.decoder.numbers(first, here.size).astype(np.float64)
            first += here.size
            if self.share != 1.0:
                learned *= self.share
            learned += here
            return learned

        return end


@dataclass(frozen=True)
class _Chunk:
    """The same chunk of all files of a merge, read in pieces of at most so many numbers."""

    files: _Files
    index: int
    most: int = FRAME_NUMBERS

    def numbers(self, reader: BlobReader) -> Iterator[Floats]:
        return chunk_numbers(reader, self.index, len(self.files.header), self.most)

    @property
    def piece_count(self) -> int:
        files = self.files
        return len(chunk_cuts(files.current, self.index, len(files.header), self.most))


@dataclass(frozen=True)
class _Piece:
    """Some numbers of a version, where those of the next one should be, and their velocity."""

    current: Floats
    target: Doubles
    speed: Floats | None = None


def _targets(files: _Files, outer: Outer, codec: Codec | None) -> Iterator[_Piece]:
    """What the next version is made of, in pieces that end where frames end, and where chunks
    do. They may count once all of them were asked for."""
    for index in range(files.current.chunk_count):
        yield from _merged(_Chunk(files, index), outer, codec, used_at_once=False)
    for update in files.learned:
        update.file.finish()


def _merged(
    chunk: _Chunk, outer: Outer, codec: Codec | None, *, used_at_once: bool
) -> Iterator[_Piece]:
    """`used_at_once`: a piece is done with when the next is asked for."""
    files = chunk.files
    needed = (
        bool(codec) or outer != Outer() or any(update.needs_current for update in files.updates)
    )
    speeds = chunk.numbers(files.velocity) if files.velocity else repeat(None)
    debts = chunk.numbers(files.owed) if files.owed else repeat(None)
    means = _means(chunk, needs_current=needed, used_at_once=used_at_once)
    for (here, mean), before, debt in zip(means, speeds, debts, strict=False):
        target, speed = outer_step(here, mean, before, outer)
        yield _Piece(here, target if debt is None else target + debt, speed)


def _means(
    chunk: _Chunk, *, needs_current: bool, used_at_once: bool
) -> Iterator[tuple[Floats, Doubles]]:
    """What the version before has, unless that does not matter, and the means of all updates.
    These are read a few at once, and added up while a piece is in the processor's cache; where
    there are more, all sums of the chunk wait for the rest."""
    updates, count, room = chunk.files.updates, chunk.piece_count, np.empty(chunk.most)
    last = max(0, len(updates) - 1) // READ_AT_ONCE * READ_AT_ONCE
    one_sum = used_at_once and not last
    sums = [WeightedMean(room)] * count if one_sum else [WeightedMean(room) for _ in range(count)]

    def added(some: Sequence[_Weights | _Learned]) -> Iterator[tuple[Floats, WeightedMean]]:
        current = chunk.numbers(chunk.files.current) if needs_current else repeat(NOTHING)
        ends = [update.ends(chunk) for update in some]
        for mean, there in zip(sums, current, strict=False):
            here = there.copy()
            for update, end in zip(some, ends, strict=True):
                mean.add(end(here), update.weight)
            yield here, mean
        if last:
            chunk.files.forget(some)

    for first in range(0, last, READ_AT_ONCE):
        for _ in added(updates[first : first + READ_AT_ONCE]):
            continue
    for here, mean in added(updates[last:]):
        yield here, mean.mean()


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
        frame = encode_delta(current, target, codec)
        weights.write(frame.following.data)
        debts.write(frame.owed.data)
        yield current.size, frame.difference
