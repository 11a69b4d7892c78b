"""Updates as they arrive: whole, or as much as the run's codec lets through.

What an encoding leaves out of one update of a worker is added to its next of the same block.
"""

from dataclasses import dataclass

import numpy as np

from blocktrain.config import SwarmConfig
from blocktrain.core.codec import Codec, Decoder, codec_named
from blocktrain.core.codec_feedback import ErrorFeedback
from blocktrain.core.codec_numbers import Floats
from blocktrain.simulate.block import VirtualLease
from blocktrain.storage.run_dir import Tensors


@dataclass(frozen=True)
class Parcel:
    """Weights after training; where those it was trained from are no longer the block's, they too.
    What was learned is as good as weights that were trained from zero."""

    end: Tensors
    start: Tensors | None


class Parcels:
    def __init__(self, swarm: SwarmConfig) -> None:
        self._codec = codec_named(swarm.codec, swarm.kept)
        self._owed: dict[tuple[str, int], Floats] = {}  # by worker and block

    def sent(self, lease: VirtualLease, base: Tensors, end: Tensors) -> Parcel:
        if self._codec:
            learned = self._received(lease, base, end, self._codec)
            return Parcel(learned, {name: np.zeros_like(array) for name, array in end.items()})
        late = lease.base_version != lease.block.version
        return Parcel(end, base if late else None)

    def _received(self, lease: VirtualLease, base: Tensors, end: Tensors, codec: Codec) -> Tensors:
        count = sum(array.size for array in end.values())
        residual = self._owed.setdefault(
            (lease.worker, lease.block.index), np.zeros(count, np.float32)
        )
        learned = (np.subtract(end[name], base[name]) for name in sorted(end))
        data = b"".join(ErrorFeedback(codec, residual).encode(learned))
        decoder = Decoder(lambda offset, size: data[offset : offset + size], len(data), count)
        received: Tensors = {}
        done = 0
        for name in sorted(end):
            numbers = decoder.numbers(done, end[name].size)
            received[name] = numbers.reshape(end[name].shape)
            done += numbers.size
        return received
