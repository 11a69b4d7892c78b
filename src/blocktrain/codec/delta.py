"""From a version to the next one by a difference in few bytes.

A version is the one before it plus a decoded difference, added in float32: whoever has the one
and is given the other arrives at the same bits. What the encoding leaves out of where the version
should be is owed, and belongs into the target of the version after. Works on a frame of numbers;
knows neither files nor where targets come from.
"""

from dataclasses import dataclass

import numpy as np

from blocktrain.codec.dense import Floats
from blocktrain.codec.frames import Codec, encode_frame
from blocktrain.numerics.merge import Doubles, finite_floats


@dataclass(frozen=True)
class DeltaFrame:
    """A frame of the next version, and what leads there."""

    difference: bytes
    following: Floats
    owed: Floats


def encode_delta(current: Floats, target: Doubles, codec: Codec) -> DeltaFrame:
    """The frame nearest to the target that the codec can lead to from `current`."""
    wanted = finite_floats(target - current)
    _leave_out_what_moves_nothing(current, wanted)
    difference = encode_frame(codec, wanted)
    following = apply_delta(current, codec.decode(difference, current.size))
    # Of the rounding too: a step too small for its weight adds up until it is not.
    return DeltaFrame(difference, following, finite_floats(target - following))


def _leave_out_what_moves_nothing(current: Floats, wanted: Floats) -> None:
    """What is too small to move its weight: what rounding left of earlier steps would take the
    place of numbers that matter."""
    with np.errstate(over="ignore"):
        np.copyto(wanted, np.float32(0), where=current + wanted == current)


def apply_delta(current: Floats, difference: Floats) -> Floats:
    with np.errstate(over="ignore"):  # the result is checked instead
        return finite_floats(np.add(current, difference, dtype=np.float32))
