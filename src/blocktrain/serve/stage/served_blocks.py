"""What a router and a stage must agree on before they work together: settings and weights."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import nn

from blocktrain.config import Config, stored_values
from blocktrain.storage.run_dir import RunDir
from blocktrain.train.device import Compute
from blocktrain.train.loading import load_stored_block


def of_settings(config: Config) -> str:
    """Of the settings that make the model; where and how it was trained does not matter.

    Of the settings as they are stored: one that a later release adds changes nothing as long as it
    has its default, so that stages of both releases go on working together.
    """
    values = stored_values(config)
    made_of = [values["model"], values["objective"], values["train"]["seed"]]
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:16]


def of_weights(weights: Iterable[tuple[str, np.ndarray]]) -> str:
    """Of one block, whatever kind of file it lies in; tensors come in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in weights:
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        digest.update(tensor.data if tensor.flags.c_contiguous else tensor.tobytes())
    return digest.hexdigest()[:16]


def mismatch(said: Mapping[str, Any], settings: str, weights: Sequence[str]) -> str | None:
    """What is wrong with a stage that says this of itself, for a router whose model has these
    blocks; it may say anything."""
    told = said.get("blocks")
    blocks = told if isinstance(told, list) else []
    first = blocks[0] if blocks else None
    if type(first) is not int or first < 1 or blocks != list(range(first, first + len(blocks))):
        return "a stage holds consecutive blocks after the first"
    held = list(weights[first : first + len(blocks)])
    if said.get("settings") != settings or said.get("weights") != held:
        return "this stage holds another version of the model"
    return None if isinstance(said.get("address"), str) else "a stage says where it is"


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
        return load_stored_block(self.run, block, compute, compute.dtype, self.held)

    def fingerprint(self, block: int) -> str:
        return of_weights(self.run.read_block(block))
