"""Where a process that serves gets its blocks from, and what it knows them by.

A run's files, or whatever else makes blocks of a config. Knows no connections.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import nn

from blocktrain.config import Config
from blocktrain.serve import fingerprint
from blocktrain.storage.run_dir import RunDir
from blocktrain.train.assemble import load_unit
from blocktrain.train.device import Compute


class Blocks(Protocol):
    @property
    def config(self) -> Config: ...

    def load(self, block: int, compute: Compute) -> nn.Module:
        """On the device, to compute with and not to train."""
        ...

    def fingerprint(self, block: int) -> str:
        """The same for the same weights, wherever they are and however they are held."""
        ...


@dataclass(frozen=True)
class StoredBlocks:
    """A run's, in the number type they are used in: a step in bf16 then reads half the bytes; or
    the layers' matrices in 8 bits."""

    run: RunDir
    held: str = "full"

    @property
    def config(self) -> Config:
        return self.run.config

    def load(self, block: int, compute: Compute) -> nn.Module:
        return load_unit(self.run, block, compute, compute.dtype, self.held)

    def fingerprint(self, block: int) -> str:
        return fingerprint.of_weights(self.run.read_block(block))
