"""A weights file as one long array of float32, chunk by chunk.

Weights, velocities and residuals of a block are canonical safetensors files with the same header,
so the same chunk of every one of them holds the same numbers. Knows nothing of what is done with
the numbers.
"""

import math
from collections.abc import Sequence

import numpy as np

from blocktrain.core.codec_numbers import Floats
from blocktrain.errors import ProtocolError
from blocktrain.protocol.messages import CHUNK_BYTES
from blocktrain.protocol.tensors import TensorSpec, canonical, parse_header
from blocktrain.storage.blobs import BlobReader

FLOAT = np.dtype("<f4")
PIECE = 1 << 16  # numbers: what the arithmetic takes at a time, so that it stays in the cache


def weights_form(reader: BlobReader) -> list[TensorSpec]:
    """The tensors of a weights file: canonical, and of float32 only."""
    specs = parse_header(reader.read, reader.size)
    if odd := next((spec for spec in specs if spec.dtype != "F32"), None):
        raise ProtocolError(f"tensor {odd.name!r} is {odd.dtype}; weights are F32")
    header = canonical(specs)
    if reader.read(0, min(len(header), reader.size)) != header:
        raise ProtocolError("a weights file is sorted by name and has no metadata")
    reader.forget()
    return specs


def finite(reader: BlobReader, form: Sequence[TensorSpec]) -> bool:
    """Whether every number of a weights file is one."""
    start = len(canonical(form))
    for index in range(reader.chunk_count):
        numbers = chunk_numbers(reader, index, start)
        if not all(np.isfinite(numbers[cut]).all() for cut in cuts(numbers.size)):
            return False
    return True


def chunk_numbers(reader: BlobReader, index: int, header: int) -> Floats:
    """What one chunk holds of a file's numbers: whole ones, as header and chunks are multiples
    of 8 bytes."""
    skipped = max(0, header - index * CHUNK_BYTES)
    return np.frombuffer(memoryview(reader.chunk(index))[skipped:], FLOAT)


def first_number(index: int, header: int) -> int:
    """The place of a chunk's first number among all of the file."""
    return max(0, index * CHUNK_BYTES - header) // FLOAT.itemsize


def number_count(form: Sequence[TensorSpec]) -> int:
    """Numbers of a weights file."""
    return sum(math.prod(spec.shape) for spec in form)


def cuts(size: int) -> list[slice]:
    return [slice(start, start + PIECE) for start in range(0, size, PIECE)]
