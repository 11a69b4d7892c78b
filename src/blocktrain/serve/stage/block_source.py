"""Where a stage loads its blocks from, and fingerprints to check that all stages have one model."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import nn

from blocktrain.config import Config, stored_values
from blocktrain.storage.run_dir import RunDir
from blocktrain.train.assemble import load_stored_block
from blocktrain.train.device import Compute


def settings_fingerprint(config: Config) -> str:
    """Of the settings that define the model, not of how it was trained.

    Settings that a later release adds do not count while they have their defaults, so stages of
    both releases work together.
    """
    values = stored_values(config)
    defining = [values["model"], values["objective"], values["train"]["seed"]]
    return hashlib.sha256(json.dumps(defining, sort_keys=True).encode()).hexdigest()[:16]


def weights_fingerprint(weights: Iterable[tuple[str, np.ndarray]]) -> str:
    """Of one block's tensors in the order of their names, whatever file they come from."""
    digest = hashlib.sha256()
    for name, tensor in weights:
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        digest.update(tensor.data if tensor.flags.c_contiguous else tensor.tobytes())
    return digest.hexdigest()[:16]


def stage_mismatch(hello: Mapping[str, Any], settings: str, weights: Sequence[str]) -> str | None:
    """What is wrong with a stage's HELLO, for a router with these fingerprints; its content is
    unchecked input."""
    listed = hello.get("blocks")
    blocks = listed if isinstance(listed, list) else []
    first = blocks[0] if blocks else None
    if type(first) is not int or first < 1 or blocks != list(range(first, first + len(blocks))):
        return "the stage does not name consecutive blocks after block 0"
    own = list(weights[first : first + len(blocks)])
    if hello.get("settings") != settings or hello.get("weights") != own:
        return "the stage has another version of the model"
    return None if isinstance(hello.get("address"), str) else "the stage does not name its address"


class BlockSource(Protocol):
    @property
    def config(self) -> Config: ...

    def load(self, block: int, compute: Compute) -> nn.Module:
        """A block on the device, for inference."""
        ...

    def fingerprint(self, block: int) -> str:
        """The same for the same weights, in whatever number type they are held."""
        ...


@dataclass(frozen=True)
class RunBlockSource:
    """A run's blocks, held in the compute type or, with `weights` "int8", with 8-bit matrices."""

    run: RunDir
    weights: str = "full"

    @property
    def config(self) -> Config:
        return self.run.config

    def load(self, block: int, compute: Compute) -> nn.Module:
        return load_stored_block(self.run, block, compute, compute.dtype, self.weights)

    def fingerprint(self, block: int) -> str:
        return weights_fingerprint(self.run.read_block(block))
