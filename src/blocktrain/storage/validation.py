"""Whether an update that a worker sent can be merged, and how far it moves its block."""

import math
from collections.abc import Sequence

import numpy as np

from blocktrain.codec.frames import UpdateDecoder
from blocktrain.codec.registry import Codec
from blocktrain.errors import ProtocolError
from blocktrain.protocol.messages import Blob, Recipe
from blocktrain.storage.blobs import Blobs
from blocktrain.storage.tensor_file import TensorSpec, canonical
from blocktrain.storage.weights_file import check_form, number_count, weights_frames


def check_update(blobs: Blobs, update: Recipe | Blob, form: Sequence[TensorSpec]) -> float:
    """The root mean square of weights; refused, with a ProtocolError, where they have another form
    than the block's, or numbers that are not finite."""
    check_form(blobs.reader(update), form)
    found = magnitude(blobs, update, form)
    if not math.isfinite(found):
        raise ProtocolError("the update holds numbers that are not finite, or far too large")
    return found


def magnitude(blobs: Blobs, file: Recipe | Blob, form: Sequence[TensorSpec]) -> float:
    """The root mean square of a file's numbers. It is not finite where one of them is not, or is
    too large to be squared: so this one pass finds those too."""
    with blobs.forward_reader(file) as reader, np.errstate(over="ignore", invalid="ignore"):
        frames = weights_frames(reader, len(canonical(form)))
        squares = sum(float(np.dot(frame, frame)) for frame in frames)
    return math.sqrt(squares / max(1, number_count(form)))


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
