"""Merges updates into a block's next version, frame by frame.

All files of a merge are read from start to end at the same pace, so memory holds one frame of each.
How the numbers are combined is a MergeRule's business; which updates are merged, the coordinator's.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import repeat
from typing import TypeVar

from blocktrain.codec.frames import UpdateDecoder, enclose
from blocktrain.codec.registry import Codec
from blocktrain.errors import DivergedError, ProtocolError
from blocktrain.numerics.merge import Contribution, Doubles, MergeRule, finite_floats
from blocktrain.numerics.quantization import Floats
from blocktrain.protocol.messages import Blob, Recipe
from blocktrain.storage.blobs import Blobs, BlobWriter, ForwardReader
from blocktrain.storage.deltas import encode_delta
from blocktrain.storage.tensor_file import canonical
from blocktrain.storage.weights_file import check_form, number_count, weights_form, weights_frames

FRAMES_AHEAD = 8

Item = TypeVar("Item")


@dataclass(frozen=True)
class MergeInput:
    """An update: a block's weights after training, and if it is late those before; or if it is
    `encoded`, the change that was learned. `share`: how much of the change is taken."""

    id: str
    end: Recipe | Blob
    weight: float
    start: Blob | None = None
    share: float = 1.0
    encoded: bool = False


@dataclass(frozen=True)
class Compression:
    """How the delta between two versions is encoded, and the residual of the deltas before. Without
    a codec the version is exact, and there is no residual any more."""

    codec: Codec | None
    residual: Blob | None


@dataclass(frozen=True)
class Merged:
    """The next version. `velocity` is None without outer momentum; `delta` and `residual` are None
    without a codec."""

    weights: Blob
    velocity: Blob | None
    delta: Blob | None = None
    residual: Blob | None = None


def merge_blobs(
    blobs: Blobs,
    current: Blob,
    updates: Sequence[MergeInput],
    velocity: Blob | None,
    rule: MergeRule,
    compression: Compression | None = None,
) -> Merged:
    """Write the next version of `current`; it does not depend on the order of the updates."""
    if not updates or len({update.id for update in updates}) != len(updates):
        raise ValueError("a merge needs updates, and each of them once")
    codec, residual = (compression.codec, compression.residual) if compression else (None, None)
    with ExitStack() as stack:
        files = _Files(blobs, current, stack)
        try:
            files.open(updates, velocity if rule.momentum else None, residual)
            return _write(blobs, files, rule, codec)
        except (DivergedError, ProtocolError):
            files.check()  # if a file was altered on the disk, the updates are not to blame
            raise


# What a merge reads


class _WholeUpdate:
    def __init__(self, files: "_Files", update: MergeInput) -> None:
        self._update, self._header_size = update, len(files.header)
        self._end = files.weights(update.end)
        self._start = files.weights(update.start) if update.start else None

    def frames(self) -> Iterator[Contribution]:
        update = self._update
        ends = weights_frames(self._end, self._header_size)
        starts = weights_frames(self._start, self._header_size) if self._start else repeat(None)
        for end, start in zip(ends, starts, strict=False):
            yield Contribution(update.id, end, update.weight, start, update.share)

    def finish(self) -> None:
        """Nothing is left: with its last frame the last chunk was checked."""


class _EncodedUpdate:
    """Fresh or late, its change is added to the newest weights."""

    def __init__(self, files: "_Files", update: MergeInput) -> None:
        self._update = update
        self._file = files.reader(update.end)
        count = number_count(files.form)
        self._decoder = UpdateDecoder(self._file.read, self._file.size, count)

    def frames(self) -> Iterator[Contribution]:
        update = self._update
        for change in self._decoder.frames():
            yield Contribution(update.id, change, update.weight, share=update.share, is_delta=True)

    def finish(self) -> None:
        self._file.finish()


class _Files:
    """All that a merge reads, found to be of one form."""

    def __init__(self, blobs: Blobs, current: Blob, stack: ExitStack) -> None:
        self._blobs, self._stack = blobs, stack
        self._readers: list[ForwardReader] = []
        self.form = weights_form(blobs.reader(current))
        self.header = canonical(self.form)
        self._current = self.reader(current)
        self._velocity: ForwardReader | None = None
        self._residual: ForwardReader | None = None
        self._updates: list[_WholeUpdate | _EncodedUpdate] = []

    def open(
        self, updates: Sequence[MergeInput], velocity: Blob | None, residual: Blob | None
    ) -> None:
        self._velocity = self.weights(velocity) if velocity else None
        self._residual = self.weights(residual) if residual else None
        self._updates = [
            _EncodedUpdate(self, update) if update.encoded else _WholeUpdate(self, update)
            for update in updates
        ]

    def reader(self, blob: Recipe | Blob) -> ForwardReader:
        reader = self._stack.enter_context(self._blobs.forward_reader(blob))
        self._readers.append(reader)
        return reader

    def weights(self, blob: Recipe | Blob) -> ForwardReader:
        reader = self.reader(blob)
        check_form(reader, self.form)
        return reader

    def targets(self, rule: MergeRule) -> Iterator["_Frame"]:
        """The next version, before it is rounded. It may count once the last frame was taken."""
        current = weights_frames(self._current, len(self.header))
        velocities, residuals = (
            weights_frames(file, len(self.header)) if file else repeat(None)
            for file in (self._velocity, self._residual)
        )
        updates = zip(*(update.frames() for update in self._updates), strict=True)
        for here, velocity, residual, changes in zip(
            current, velocities, residuals, updates, strict=False
        ):
            target, next_velocity = rule.combine(here, changes, velocity)
            yield _Frame(here, target if residual is None else target + residual, next_velocity)
        for update in self._updates:
            update.finish()

    def check(self) -> None:
        """Raise CorruptFileError if any file was altered."""
        for reader in self._readers:
            for index in range(reader.chunk_count):
                reader.chunk(index)


@dataclass(frozen=True)
class _Frame:
    """Numbers of a version, where those of the next one should be, and their velocity."""

    current: Floats
    target: Doubles
    velocity: Floats | None


# What it writes


def _write(blobs: Blobs, files: _Files, rule: MergeRule, codec: Codec | None) -> Merged:
    with blobs.writer() as weights, blobs.writer() as velocities, blobs.writer() as residuals:
        for writer in (weights, velocities, residuals):
            writer.write(files.header)
        frames = _velocities_written(read_ahead(files.targets(rule), FRAMES_AHEAD), velocities)
        delta = None
        if codec:
            delta = blobs.write(enclose(codec, _deltas(frames, codec, weights, residuals)))
        else:
            for frame in frames:
                weights.write(finite_floats(frame.target).data)
        return Merged(
            weights.finish(),
            velocities.finish() if rule.momentum else None,
            delta,
            residuals.finish() if codec else None,
        )


def _velocities_written(frames: Iterator[_Frame], velocities: BlobWriter) -> Iterator[_Frame]:
    for frame in frames:
        if frame.velocity is not None:
            velocities.write(frame.velocity.data)
        yield frame


def _deltas(
    frames: Iterator[_Frame], codec: Codec, weights: BlobWriter, residuals: BlobWriter
) -> Iterator[tuple[int, bytes]]:
    """The encoded delta, frame by frame; weights and residuals are written on the way."""
    for frame in frames:
        delta = encode_delta(frame.current, frame.target, codec)
        weights.write(delta.weights.data)
        residuals.write(delta.residual.data)
        yield frame.current.size, delta.encoded


def read_ahead(items: Iterator[Item], most: int) -> Iterator[Item]:
    """The same items, up to `most` of them made in advance by another thread; an error is raised in
    the place of its item. Numpy, hashing and files let both threads work at the same time."""
    with ThreadPoolExecutor(1) as thread:
        coming = deque(thread.submit(next, items, None) for _ in range(most))
        while (item := coming.popleft().result()) is not None:
            coming.append(thread.submit(next, items, None))
            yield item
