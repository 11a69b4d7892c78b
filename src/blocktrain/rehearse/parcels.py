"""Updates as they arrive: whole, or as much as the run's codec lets through.

What an encoding leaves out of an update, its worker begins the next lease of the block with, as in
worker/held_block.py.

Two things of a real run are not modelled. There are no last words: a worker's final update of a
block leaves out as much as any other, where a real one tells many times more of what is owed. And
versions are not compressed on their way down: each is the merge itself, and nothing is owed by it.
"""

from dataclasses import dataclass

import numpy as np

from blocktrain.config import SwarmConfig
from blocktrain.core.codec import Codec, Decoder, codec_named
from blocktrain.core.codec_feedback import encode_and_owe
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
        self._owed: dict[tuple[str, int], Tensors] = {}  # by worker and block
        self._told: dict[tuple[str, int], tuple[int, Tensors]] = {}  # by lease, its last update

    def begun(self, lease: VirtualLease, base: Tensors) -> Tensors:
        """What a worker starts from: a version, what it has told since, and what not yet."""
        owed = self._owed.get((lease.worker, lease.block.index))
        known = self._known(lease, base)
        return {name: known[name] + owed[name] for name in known} if owed else known

    def _known(self, lease: VirtualLease, base: Tensors) -> Tensors:
        """A version, and in a lease that continues another, what was told of that one."""
        number, told = self._told.get((lease.worker, lease.block.index), (None, {}))
        if lease.continues is None or lease.continues != number:
            return base
        return {name: base[name] + told[name] for name in base}

    def sent(self, lease: VirtualLease, base: Tensors, end: Tensors) -> Parcel:
        if self._codec:
            learned = self._received(lease, self._known(lease, base), end, self._codec)
            self._told[lease.worker, lease.block.index] = (lease.lease, learned)
            return Parcel(learned, {name: np.zeros_like(array) for name, array in end.items()})
        late = lease.base_version != lease.block.version
        return Parcel(end, base if late else None)

    def _received(self, lease: VirtualLease, base: Tensors, end: Tensors, codec: Codec) -> Tensors:
        count = sum(array.size for array in end.values())
        left_out: list[Floats] = []
        ahead = (np.subtract(end[name], base[name]) for name in sorted(end))
        data = b"".join(encode_and_owe(codec, ahead, left_out.append))
        decoder = Decoder(lambda offset, size: data[offset : offset + size], len(data), count)
        self._owed[lease.worker, lease.block.index] = _shaped(np.concatenate(left_out), end)
        return _shaped(decoder.numbers(0, count), end)


def _shaped(numbers: Floats, like: Tensors) -> Tensors:
    """One long row, in the order of the names, as tensors."""
    names = sorted(like)
    parts = np.split(numbers, np.cumsum([like[name].size for name in names])[:-1])
    return {name: part.reshape(like[name].shape) for name, part in zip(names, parts, strict=True)}
