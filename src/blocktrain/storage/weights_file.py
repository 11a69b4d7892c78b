"""A weights file as one float32 array: checks of updates, and deltas between versions."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce

import numpy as np

from blocktrain.codec import Codec
from blocktrain.codec.frames import FRAME_NUMBERS, UpdateDecoder, encode_frame
from blocktrain.errors import ProtocolError
from blocktrain.numerics import Doubles, Floats
from blocktrain.numerics.merge import finite_floats
from blocktrain.numerics.tensors import Sizes, sizes
from blocktrain.protocol.messages import Blob, Recipe
from blocktrain.storage.blobs import BlobReader, Blobs, ForwardReader
from blocktrain.storage.tensor_file import (
    PIECE_BYTES,
    TensorSpec,
    canonical,
    check_like,
    parse_header,
)

FLOAT = np.dtype("<f4")
FRAME_BYTES = FRAME_NUMBERS * FLOAT.itemsize
AT_ONCE = 4  # deltas per pass: fewer mean more writing, more mean more open files


def weights_form(reader: BlobReader) -> list[TensorSpec]:
    """The tensors of a weights file. ProtocolError if it is not canonical or not all float32."""
    specs = parse_header(reader.read, reader.size)
    if odd := next((spec for spec in specs if spec.dtype != "F32"), None):
        raise ProtocolError(f"tensor {odd.name!r} is {odd.dtype}; weights must be F32")
    header = canonical(specs)
    if reader.read(0, min(len(header), reader.size)) != header:
        raise ProtocolError("a weights file must be sorted by name and have no metadata")
    return specs


def check_form(reader: BlobReader, form: Sequence[TensorSpec]) -> None:
    """Raise ProtocolError unless the file is a weights file of these tensors."""
    header = canonical(form)
    has_size = reader.size == len(header) + FLOAT.itemsize * number_count(form)
    if not has_size or reader.read(0, len(header)) != header:
        check_like(weights_form(reader), form)  # raises the error


def weights_frames(reader: ForwardReader, header_size: int) -> Iterator[Floats]:
    """A file's numbers, FRAME_NUMBERS at a time. They are verified once all were read."""
    for start in range(header_size, reader.size, FRAME_BYTES):
        yield np.frombuffer(reader.read(start, min(FRAME_BYTES, reader.size - start)), FLOAT)


def tensor_counts(form: Sequence[TensorSpec]) -> list[int]:
    """How many numbers each tensor has."""
    return [math.prod(spec.shape) for spec in form]


def number_count(form: Sequence[TensorSpec]) -> int:
    """The count of numbers in a weights file."""
    return sum(tensor_counts(form))


def weights_sizes(blobs: Blobs, weights: Blob, form: Sequence[TensorSpec]) -> Sizes:
    with blobs.forward_reader(weights) as reader:
        return sizes(weights_frames(reader, len(canonical(form))), tensor_counts(form))


def check_update(
    blobs: Blobs, update: Recipe | Blob, base: Blob, form: Sequence[TensorSpec]
) -> Sizes:
    """How far an update's weights are from their base. ProtocolError if the tensors are not the
    block's, or numbers are not finite."""
    check_form(blobs.reader(update), form)
    header_size = len(canonical(form))
    with (
        blobs.forward_reader(update) as after,
        blobs.forward_reader(base) as before,
        np.errstate(over="ignore", invalid="ignore"),
    ):
        frames = (weights_frames(reader, header_size) for reader in (after, before))
        changes = (new - old for new, old in zip(*frames, strict=True))
        return _finite(sizes(changes, tensor_counts(form)))


def check_encoded(
    blobs: Blobs, update: Recipe | Blob, form: Sequence[TensorSpec], most: Codec
) -> tuple[Sizes, Codec]:
    """The sizes of an encoded change, and its codec. ProtocolError if the codec is not of the kind
    of `most` or keeps more numbers, or if the change does not decode to as many finite numbers as
    the block has."""
    with blobs.forward_reader(update) as reader:
        decoder = UpdateDecoder(reader.read, reader.size, number_count(form))
        codec = decoder.codec
        if codec.code != most.code or codec.parameter > most.parameter:
            raise ProtocolError(
                f"the update is encoded by {codec}, but the run allows only {most}; encode it with"
                " the run's settings"
            )
        found = _finite(sizes(decoder.frames(), tensor_counts(form)))
        reader.finish()
    return found, codec


def _finite(found: Sizes) -> Sizes:
    if not np.isfinite(found.rms).all():
        raise ProtocolError("the update has numbers that are NaN, infinite or far too large")
    return found


@dataclass(frozen=True)
class DeltaFrame:
    """A frame of the next version, its encoded delta, and the residual."""

    encoded: bytes
    weights: Floats
    residual: Floats


def encode_delta(current: Floats, target: Doubles, codec: Codec) -> DeltaFrame:
    """Encode the change from `current` to `target`, and apply it as it will be decoded."""
    change = finite_floats(target - current)
    # Omit changes too small to move their weight: the codec has room for a few numbers only.
    with np.errstate(over="ignore"):
        np.copyto(change, np.float32(0), where=current + change == current)
    encoded = encode_frame(codec, change)
    weights = apply_delta(current, codec.decode(encoded, current.size))
    # Includes what rounding lost: small changes add up in the residual until they move the weight.
    return DeltaFrame(encoded, weights, finite_floats(target - weights))


def apply_delta(current: Floats, delta: Floats) -> Floats:
    with np.errstate(over="ignore"):  # finite_floats checks the result instead
        return finite_floats(np.add(current, delta, dtype=np.float32))


def follow_blobs(blobs: Blobs, base: Blob, deltas: Sequence[Blob]) -> Blob:
    """Apply deltas in order to `base` and write the resulting version. The caller must compare the
    result's name with the expected one."""
    for start in range(0, len(deltas), AT_ONCE):
        with ExitStack() as files:
            parts = _followed(blobs, base, deltas[start : start + AT_ONCE], files)
            base = blobs.write(parts)
    return base


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


def write_with_sources(
    blobs: Blobs, own: Blob, other: Blob, source_of: Callable[[str], str | None]
) -> Blob:
    """Write a file with the tensors of `own`. `source_of` names the tensor of `other` whose numbers
    a tensor takes, or None if it keeps its own."""
    return blobs.write(_with_sources(blobs.reader(own), blobs.reader(other), source_of))


def _with_sources(
    own: BlobReader, other: BlobReader, source_of: Callable[[str], str | None]
) -> Iterator[bytes]:
    form = weights_form(own)
    others = {spec.name: spec for spec in weights_form(other)}
    yield canonical(form)
    for spec in form:
        source = source_of(spec.name)
        reader, place = (own, spec) if source is None else (other, others[source])
        for start in range(place.start, place.end, PIECE_BYTES):
            yield reader.read(start, min(PIECE_BYTES, place.end - start))
