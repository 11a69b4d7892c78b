"""Error feedback: what an encoding leaves out of one update is owed, and goes into the next.

With it, sparse updates of one worker add up to what it learned. What is owed belongs to the caller,
who keeps it between updates and adds it to what is encoded next; here one frame is in memory.
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from blocktrain.core.codec import Codec, enclose, encode_frame, framed
from blocktrain.core.codec_numbers import Floats


def encode_and_owe(
    codec: Codec, deltas: Floats | Iterable[Floats], owe: Callable[[Floats], object]
) -> Iterator[bytes]:
    """An encoded update of numbers that hold all that was owed before; what it leaves out of them
    goes to `owe`, frame by frame."""

    def frames() -> Iterator[tuple[int, bytes]]:
        for delta in framed(deltas):
            data = encode_frame(codec, delta)
            owe(np.subtract(delta, codec.decode(data, delta.size)))
            yield delta.size, data

    return enclose(codec, frames())
