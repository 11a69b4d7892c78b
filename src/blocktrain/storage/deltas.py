"""From one version to the next by an encoded delta: of arrays, and of stored files by chunks."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce

import numpy as np

from blocktrain.codec.frames import UpdateDecoder, encode_frame
from blocktrain.codec.registry import Codec
from blocktrain.numerics.merge import Doubles, finite_floats
from blocktrain.numerics.quantization import Floats
from blocktrain.protocol.messages import Blob
from blocktrain.storage.blobs import Blobs
from blocktrain.storage.tensor_file import canonical
from blocktrain.storage.weights_file import number_count, weights_form, weights_frames


@dataclass(frozen=True)
class DeltaFrame:
    """A frame of the next version, and what leads there."""

    encoded: bytes
    weights: Floats
    residual: Floats


def encode_delta(current: Floats, target: Doubles, codec: Codec) -> DeltaFrame:
    """The frame nearest to the target that the codec can lead to from `current`."""
    change = finite_floats(target - current)
    _zero_what_moves_nothing(current, change)
    encoded = encode_frame(codec, change)
    weights = apply_delta(current, codec.decode(encoded, current.size))
    # Rounding counts too: steps too small for their weight add up until they are not.
    return DeltaFrame(encoded, weights, finite_floats(target - weights))


def _zero_what_moves_nothing(current: Floats, change: Floats) -> None:
    """A change too small to move its weight would take the place of numbers that matter."""
    with np.errstate(over="ignore"):
        np.copyto(change, np.float32(0), where=current + change == current)


def apply_delta(current: Floats, delta: Floats) -> Floats:
    with np.errstate(over="ignore"):  # the result is checked instead
        return finite_floats(np.add(current, delta, dtype=np.float32))


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
