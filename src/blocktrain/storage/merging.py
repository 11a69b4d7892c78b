"""Merges updates into a block's next version, frame by frame.

The files of up to UPDATES_AT_ONCE updates are read from start to end at the same pace, so memory
holds one frame of each. If there are more, partial sums go to a temporary file. A MergeRule decides
how numbers are combined; the coordinator decides which updates are merged.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from tempfile import TemporaryFile, gettempdir
from typing import IO, NamedTuple, TypeVar

import numpy as np

from blocktrain.codec import Codec
from blocktrain.codec.frames import FRAME_NUMBERS, UpdateDecoder, enclose
from blocktrain.errors import DivergedError, ProtocolError, RunError
from blocktrain.numerics import Doubles, Floats
from blocktrain.numerics.merge import Contribution, MergeRule, WeightedSum, finite_floats
from blocktrain.protocol.messages import Blob, Recipe
from blocktrain.storage.blobs import Blobs, BlobWriter, ForwardReader
from blocktrain.storage.tensor_file import canonical
from blocktrain.storage.weights_file import (
    check_form,
    encode_delta,
    number_count,
    tensor_counts,
    weights_form,
    weights_frames,
)

FRAMES_AHEAD = 8
UPDATES_AT_ONCE = 64  # each keeps up to two files open, and some systems allow only 256

Item = TypeVar("Item")


@dataclass(frozen=True)
class MergeInput:
    """An update: a block's weights after training (`end`) and, if it is late, before (`start`). If
    `encoded`, `end` is the encoded change. `share`: the fraction of the change that counts, and
    `clip`, by tensor, the factors by which it is scaled because it is unusually large."""

    id: str
    end: Recipe | Blob
    weight: float
    start: Blob | None = None
    share: float = 1.0
    encoded: bool = False
    clip: Sequence[float] | None = None


@dataclass(frozen=True)
class Compression:
    """How the delta to the next version is encoded, and the residual of earlier deltas. Without a
    codec the version is exact and includes the residual."""

    codec: Codec | None
    residual: Blob | None


@dataclass(frozen=True)
class Merged:
    """A version. `velocity` is None without outer momentum; `delta`, and `residual`, what the delta
    leaves out, are None without a codec."""

    weights: Blob
    velocity: Blob | None
    delta: Blob | None = None
    residual: Blob | None = None


@dataclass(frozen=True)
class Merge:
    """A merge of several, with the codec of its delta."""

    updates: Sequence[MergeInput]
    codec: Codec | None = None


def merge_blobs(
    blobs: Blobs,
    current: Blob,
    updates: Sequence[MergeInput],
    velocity: Blob | None,
    rule: MergeRule,
    compression: Compression | None = None,
) -> Merged:
    """Write the version after `current`. It does not depend on the order of the updates."""
    codec, residual = (compression.codec, compression.residual) if compression else (None, None)
    before = Merged(current, velocity, residual=residual)
    return rebuild_blobs(blobs, before, [Merge(updates, codec)], rule)


def rebuild_blobs(blobs: Blobs, start: Merged, merges: Sequence[Merge], rule: MergeRule) -> Merged:
    """Write the version that several merges lead to, one after another, without the versions
    between. `delta` is that of the last merge."""
    while merges:
        count = len(merges)
        while count > 1 and sum(len(merge.updates) for merge in merges[:count]) > UPDATES_AT_ONCE:
            count -= 1
        start = _write(blobs, start, merges[:count], rule)
        merges = merges[count:]
    return start


# Reading


class _Frame(NamedTuple):
    """Numbers of a version, with the velocity that led to it and what its delta left out."""

    weights: Floats
    velocity: Floats | None
    residual: Floats | None
    encoded: bytes = b""  # its delta


class _Target(NamedTuple):
    """Numbers of a version, and of the one after it before rounding."""

    current: Floats
    target: Doubles
    velocity: Floats | None


class _Files:
    """The files that merges read; they must have the same tensors."""

    def __init__(self, blobs: Blobs, current: Merged) -> None:
        self._blobs, self._current = blobs, current
        self._readers: list[ForwardReader] = []
        self._form = weights_form(blobs.reader(current.weights))
        self.header = canonical(self._form)

    def targets(self, rule: MergeRule, merges: Sequence[Merge]) -> Iterator[_Target]:
        """What the last of several merges gives. Valid only once all frames were read."""
        frames = self._frames(rule)
        for merge in merges[:-1]:
            frames = _rounded(self._merged(rule, merge, frames), merge.codec)
        return self._merged(rule, merges[-1], frames)

    def check(self) -> None:
        """Raise CorruptFileError if any file was altered."""
        for reader in self._readers:
            for index in range(reader.chunk_count):
                reader.chunk(index)

    def _frames(self, rule: MergeRule) -> Iterator[_Frame]:
        velocity, residual = self._current.velocity, self._current.residual
        velocities = self._weights(velocity) if velocity and rule.momentum else repeat(None)
        residuals = self._weights(residual) if residual else repeat(None)
        weights = self._weights(self._current.weights)
        return (_Frame(*each) for each in zip(weights, velocities, residuals, strict=False))

    def _merged(self, rule: MergeRule, merge: Merge, frames: Iterator[_Frame]) -> Iterator[_Target]:
        updates = sorted(merge.updates, key=lambda update: update.id)
        totals: Iterator[WeightedSum | None] = repeat(None)
        while len(updates) > UPDATES_AT_ONCE:  # only if this is the first merge
            group, updates = updates[:UPDATES_AT_ONCE], updates[UPDATES_AT_ONCE:]
            added = self._added(rule, group, self._frames(rule), totals)
            totals = _on_disk(total for _, total in added)
        for frame, total in self._added(rule, updates, frames, totals):
            target, velocity = rule.outer_step(frame.weights, total, frame.velocity)
            if frame.residual is not None:
                target = target + frame.residual
            yield _Target(frame.weights, target, velocity)

    def _added(
        self,
        rule: MergeRule,
        updates: Sequence[MergeInput],
        frames: Iterator[_Frame],
        totals: Iterator[WeightedSum | None],
    ) -> Iterator[tuple[_Frame, WeightedSum]]:
        """The frames, and `totals` with these updates added."""
        changes = zip(*map(self._contributions, updates), strict=True)
        # With `strict`, every file is read to its end and verified.
        for contributions, (frame, total) in zip(
            changes, zip(frames, totals, strict=False), strict=True
        ):
            yield frame, rule.total(frame.weights, contributions, total)

    def _contributions(self, update: MergeInput) -> Iterator[Contribution]:
        name, weight, shares = update.id, update.weight, self._shares(update)
        if update.encoded:  # the change is added to the newest weights even if it is late
            for change, share in zip(self._decoded(update.end), shares, strict=False):
                yield Contribution(name, change, weight, share=share, is_delta=True)
            return
        starts = self._weights(update.start) if update.start else repeat(None)
        for end, start, share in zip(self._weights(update.end), starts, shares, strict=False):
            yield Contribution(name, end, weight, start, share)

    def _shares(self, update: MergeInput) -> Iterator[float | Doubles]:
        """The share of an update that counts, frame by frame: of each number if it is clipped."""
        if update.clip is None:
            yield from repeat(update.share)
            return
        factors, ends = update.share * np.array(update.clip), np.cumsum(tensor_counts(self._form))
        for start in range(0, number_count(self._form), FRAME_NUMBERS):
            numbers = np.arange(start, min(start + FRAME_NUMBERS, ends[-1]))
            yield factors[np.searchsorted(ends, numbers, side="right")]

    def _weights(self, blob: Recipe | Blob) -> Iterator[Floats]:
        with self._reader(blob) as reader:
            check_form(reader, self._form)
            yield from weights_frames(reader, len(self.header))

    def _decoded(self, blob: Recipe | Blob) -> Iterator[Floats]:
        with self._reader(blob) as reader:
            yield from UpdateDecoder(reader.read, reader.size, number_count(self._form)).frames()
            reader.finish()

    def _reader(self, blob: Recipe | Blob) -> ForwardReader:
        reader = self._blobs.forward_reader(blob)
        self._readers.append(reader)
        return reader


def _rounded(targets: Iterator[_Target], codec: Codec | None) -> Iterator[_Frame]:
    """The next version as it is published: with a codec, the current one and a delta."""
    for current, target, velocity in targets:
        if codec is None:
            yield _Frame(finite_floats(target), velocity, None)
        else:
            delta = encode_delta(current, target, codec)
            yield _Frame(delta.weights, velocity, delta.residual, delta.encoded)


def _on_disk(totals: Iterator[WeightedSum]) -> Iterator[WeightedSum]:
    """Write all sums to a temporary file, then yield them from there."""
    weight = 0.0
    file = TemporaryFile()  # noqa: SIM115  closed once it is read
    try:
        for total in totals:
            file.write(total.numbers.data)
            weight = total.weight
        file.seek(0)
    except OSError as error:
        raise RunError(
            f"cannot write a merge to {gettempdir()}: {error.strerror}; free space or set TMPDIR"
        ) from None
    return _sums_in(file, weight)


def _sums_in(file: IO[bytes], weight: float) -> Iterator[WeightedSum]:
    with file:
        while data := file.read(FRAME_NUMBERS * np.dtype(np.float64).itemsize):
            yield WeightedSum(np.frombuffer(data), weight)


# Writing


def _write(blobs: Blobs, current: Merged, merges: Sequence[Merge], rule: MergeRule) -> Merged:
    """Write the version that these merges lead to, and the delta of the last one."""
    for merge in merges:
        if not merge.updates or len({each.id for each in merge.updates}) != len(merge.updates):
            raise ValueError("a merge needs at least one update, and each only once")
    files, codec = _Files(blobs, current), merges[-1].codec
    try:
        targets = read_ahead(files.targets(rule, merges), FRAMES_AHEAD)
        return _written(blobs, files.header, _rounded(targets, codec), rule, codec)
    except (DivergedError, ProtocolError):
        files.check()  # a file that was altered on disk is the cause, not the updates
        raise


def _written(
    blobs: Blobs, header: bytes, frames: Iterator[_Frame], rule: MergeRule, codec: Codec | None
) -> Merged:
    with blobs.writer() as weights, blobs.writer() as velocities, blobs.writer() as residuals:
        for writer in (weights, velocities, residuals):
            writer.write(header)
        deltas, delta = _deltas(frames, weights, velocities, residuals), None
        if codec:
            delta = blobs.write(enclose(codec, deltas))
        else:
            deque(deltas, maxlen=0)
        return Merged(
            weights.finish(),
            velocities.finish() if rule.momentum else None,
            delta,
            residuals.finish() if codec else None,
        )


def _deltas(
    frames: Iterator[_Frame], weights: BlobWriter, velocities: BlobWriter, residuals: BlobWriter
) -> Iterator[tuple[int, bytes]]:
    """The encoded delta, frame by frame. Writes everything else meanwhile."""
    for frame in frames:
        weights.write(frame.weights.data)
        if frame.velocity is not None:
            velocities.write(frame.velocity.data)
        if frame.residual is not None:
            residuals.write(frame.residual.data)
        yield frame.weights.size, frame.encoded


def read_ahead(items: Iterator[Item], most: int) -> Iterator[Item]:
    """The same items; another thread computes up to `most` of them in advance. An error is raised
    in place of its item. Both threads can run at once, since numpy, hashing and file access release
    the GIL."""
    with ThreadPoolExecutor(1) as thread:
        coming = deque(thread.submit(next, items, None) for _ in range(most))
        while (item := coming.popleft().result()) is not None:
            coming.append(thread.submit(next, items, None))
            yield item
