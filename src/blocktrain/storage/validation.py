"""Whether an update that a worker sent can be merged, and how far it moves its block."""

import math
from collections.abc import Sequence

import numpy as np

from blocktrain.codec.frames import UpdateDecoder
from blocktrain.codec.registry import Codec
from blocktrain.errors import ProtocolError
from blocktrain.storage.blobs import ForwardReader
from blocktrain.storage.tensor_file import TensorSpec, canonical
from blocktrain.storage.weights_file import check_form, number_count, weights_frames


def check_update(reader: ForwardReader, form: Sequence[TensorSpec]) -> float:
    """The root mean square of weights; refused, with a ProtocolError, where they have another form
    than the block's, or numbers that are not finite."""
    check_form(reader, form)
    found = magnitude(reader, form)
    if not math.isfinite(found):
        raise ProtocolError("the update holds numbers that are not finite, or far too large")
    return found


def magnitude(reader: ForwardReader, form: Sequence[TensorSpec]) -> float:
    """The root mean square of a file's numbers. It is not finite where one of them is not, or is
    too large to be squared: so this one pass finds those too."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = sum(
            float(np.dot(frame, frame)) for frame in weights_frames(reader, len(canonical(form)))
        )
    return math.sqrt(squares / max(1, number_count(form)))


def check_encoded(reader: ForwardReader, form: Sequence[TensorSpec], most: Codec) -> float:
    """The root mean square of an encoded change; refused, with a ProtocolError, if its codec is not
    `most` or keeps more, or if it does not decode to as many finite numbers as the block has."""
    numbers = number_count(form)
    decoder = UpdateDecoder(reader.read, reader.size, numbers)
    codec = decoder.codec
    if codec.code != most.code or codec.parameter > most.parameter:
        raise ProtocolError(f"the update is encoded by {codec}; the run allows {most} at most")
    with np.errstate(over="ignore"):
        squares = sum(float(np.dot(frame, frame)) for frame in decoder.frames())
    reader.finish()
    return math.sqrt(squares / max(1, numbers))
