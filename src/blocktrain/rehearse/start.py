"""What a lease builds on, kept as long as somebody may still train it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blocktrain.storage.run_dir import Tensors


@dataclass(frozen=True)
class Version:
    number: int
    weights: Tensors


@dataclass(frozen=True)
class Start:
    base: Version
    before: "FrozenVersions"  # in a cascade
    losses: int  # how often its worker had lost its moments of the block before


class FrozenVersions:
    """The blocks before a block of a cascade, as they stood once."""

    def __init__(self, versions: Sequence[Version]) -> None:
        self._versions = tuple(versions)

    def version(self, block: int) -> int:
        return self._versions[block].number

    def weights(self, block: int) -> Mapping[str, Tensor]:
        held = self._versions[block].weights
        return {name: torch.from_numpy(array) for name, array in held.items()}
