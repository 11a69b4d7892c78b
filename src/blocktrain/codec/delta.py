"""From a version to the next one by a delta in few bytes.

A version is the one before it plus a decoded delta, added in float32, so that both ends arrive at
the same bits. What the encoding leaves out, the residual, belongs into the target of the version
after. Works on a frame of numbers; knows neither files nor where targets come from.
"""

from dataclasses import dataclass

import numpy as np

from blocktrain.codec.frames import encode_frame
from blocktrain.codec.registry import Codec
from blocktrain.numerics.merge import Doubles, finite_floats
from blocktrain.numerics.quantization import Floats


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
