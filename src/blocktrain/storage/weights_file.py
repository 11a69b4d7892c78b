"""A weights file as one long array of float32, frame by frame.

Weights, velocities and residuals of a block are canonical safetensors files with the same header,
so the same frame of each of them holds the same numbers. Knows nothing of what the numbers mean.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from blocktrain.codec.frames import FRAME_NUMBERS
from blocktrain.errors import ProtocolError
from blocktrain.numerics.quantization import Floats
from blocktrain.storage.blobs import BlobReader, ForwardReader
from blocktrain.storage.tensor_file import TensorSpec, canonical, check_like, parse_header

FLOAT = np.dtype("<f4")
FRAME_BYTES = FRAME_NUMBERS * FLOAT.itemsize


def weights_form(reader: BlobReader) -> list[TensorSpec]:
    """The tensors of a weights file: canonical, and of float32 only."""
    specs = parse_header(reader.read, reader.size)
    if odd := next((spec for spec in specs if spec.dtype != "F32"), None):
        raise ProtocolError(f"tensor {odd.name!r} is {odd.dtype}; weights are F32")
    header = canonical(specs)
    if reader.read(0, min(len(header), reader.size)) != header:
        raise ProtocolError("a weights file is sorted by name and has no metadata")
    return specs


def check_form(reader: BlobReader, form: Sequence[TensorSpec]) -> None:
    """Refuse a file that is not a weights file of these tensors."""
    header = canonical(form)
    has_size = reader.size == len(header) + FLOAT.itemsize * number_count(form)
    if not has_size or reader.read(0, len(header)) != header:
        check_like(weights_form(reader), form)  # its error says what is wrong


def weights_frames(reader: ForwardReader, header_size: int) -> Iterator[Floats]:
    """A file's numbers, FRAME_NUMBERS at a time. They may count once the last one was taken."""
    for start in range(header_size, reader.size, FRAME_BYTES):
        yield np.frombuffer(reader.read(start, min(FRAME_BYTES, reader.size - start)), FLOAT)


def number_count(form: Sequence[TensorSpec]) -> int:
    """Numbers of a weights file."""
    return sum(math.prod(spec.shape) for spec in form)
