"""Error feedback: what an encoding leaves out of one update is added to the next.

With it, sparse updates of one worker add up to what it learned. The residual belongs to the
caller, who keeps it between updates as a plain array; beside it one frame is in memory.
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from blocktrain.core.codec import Codec, enclose, encode_frame, framed
from blocktrain.core.codec_numbers import Floats


class ErrorFeedback:
    """Encodes updates of one block and keeps in `residual` what they still owe.

    With a decay of 1 nothing is ever lost; below that old debts fade, because they were learned
    from weights long gone (others train with 0.95).
    """

    def __init__(self, codec: Codec, residual: Floats, decay: float = 1.0) -> None:
        if residual.dtype != np.float32 or residual.ndim != 1:
            raise ValueError(f"a residual is one row of float32, not {residual.shape}")
        if not 0 <= decay <= 1:
            raise ValueError(f"a decay is between 0 and 1, not {decay}")
        self.codec = codec
        self.residual = residual
        self.decay = np.float32(decay)

    def encode(self, deltas: Floats | Iterable[Floats]) -> Iterator[bytes]:
        """The encoded update: as many numbers as the residual has.

        The residual changes in place while the bytes are taken. Whoever does not deliver all of
        them goes back to a copy of the residual from before.
        """
        return enclose(self.codec, self._frames(deltas))

    def _frames(self, deltas: Floats | Iterable[Floats]) -> Iterator[tuple[int, bytes]]:
        done = 0
        for delta in framed(deltas):
            owed = self.residual[done : done + delta.size]
            if owed.size != delta.size:
                raise ValueError(f"the update has more than {self.residual.size} numbers")
            yield delta.size, self._encode_frame(delta, owed)
            done += delta.size
        if done != self.residual.size:
            raise ValueError(f"the update has {done} numbers, not {self.residual.size}")

    def _encode_frame(self, delta: Floats, owed: Floats) -> bytes:
        with np.errstate(over="ignore"):  # the encoder refuses what is not finite
            wanted = delta + self.decay * owed
        data = encode_frame(self.codec, wanted)
        np.subtract(wanted, self.codec.decode(data, wanted.size), out=owed)
        return data


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
