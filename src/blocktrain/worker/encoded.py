"""An encoded update as tensors."""

import numpy as np

from blocktrain.codec import Codec
from blocktrain.codec.frames import UpdateDecoder
from blocktrain.storage.tensor_file import Tensors


def decoded(data: memoryview, like: Tensors) -> Tensors:
    """The change that an update contains, as tensors of these names and shapes."""
    names = sorted(like)
    sizes = [like[name].size for name in names]
    numbers = np.concatenate(list(_decoder(data, sum(sizes)).frames()))
    parts = np.split(numbers, np.cumsum(sizes)[:-1])
    return {name: part.reshape(like[name].shape) for name, part in zip(names, parts, strict=True)}


def codec_of_update(data: memoryview, count: int) -> Codec:
    """The codec of an update of this many numbers."""
    return _decoder(data, count).codec


def _decoder(data: memoryview, count: int) -> UpdateDecoder:
    def read(start: int, length: int) -> bytes:
        return bytes(data[start : start + length])

    return UpdateDecoder(read, len(data), count)
