"""Writes a version's file from an older one and the deltas between them, frame by frame."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import reduce

from blocktrain.codec.delta import apply_delta
from blocktrain.codec.frames import UpdateDecoder
from blocktrain.protocol.messages import Blob
from blocktrain.storage.blobs import Blobs
from blocktrain.storage.tensor_file import canonical
from blocktrain.storage.weights_file import number_count, weights_form, weights_frames

AT_ONCE = 4  # deltas in one pass: more passes write more, larger ones keep more files open


def follow_blobs(
    blobs: Blobs, base: Blob, deltas: Sequence[Blob], into: memoryview | None = None
) -> Blob:
    """The version that the deltas lead to, in their order, from `base`. `into`: memory of its size
    that gets a copy. The caller compares the result with the name it must have."""
    for start in range(0, len(deltas), AT_ONCE):
        with ExitStack() as files:
            parts = _followed(blobs, base, deltas[start : start + AT_ONCE], files)
            base = blobs.write(parts if into is None else _copied(parts, into))
    return base


def _copied(parts: Iterable[bytes | memoryview], into: memoryview) -> Iterator[memoryview]:
    for part in parts:
        view = memoryview(part).cast("B")
        into[: len(view)] = view
        into = into[len(view) :]
        yield view


def _followed(
    blobs: Blobs, base: Blob, deltas: Sequence[Blob], files: ExitStack
) -> Iterator[bytes | memoryview]:
    form = weights_form(blobs.reader(base))
    header = canonical(form)
    weights = files.enter_context(blobs.forward_reader(base))
    readers = [files.enter_context(blobs.forward_reader(blob)) for blob in deltas]
    decoders = [UpdateDecoder(file.read, file.size, number_count(form)) for file in readers]
    yield header
    frames = weights_frames(weights, len(header))
    for numbers, *changes in zip(frames, *(decoder.frames() for decoder in decoders), strict=True):
        yield reduce(apply_delta, changes, numbers).data
    for reader in readers:
        reader.finish()
