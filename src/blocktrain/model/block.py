"""The frozen target table: one unit-norm row per byte, drawn from the run's seed, never trained.

Computed in float64 and rounded once, so that machines with different linear algebra libraries
arrive at the same float32 numbers.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from blocktrain.config import ModelConfig
from blocktrain.model.layer import Layer, Rotation, rotation
from blocktrain.vocabulary import BYTES, IDS

TABLE_STREAM = 0x7AB1E  # keeps the table's randomness apart from every other use of the seed


@lru_cache(maxsize=4)
def target_table(seed: int, dimensions: int) -> Tensor:
    """BYTES x dimensions; orthonormal rows where the dimensions allow it."""
    draws = np.random.Generator(np.random.Philox(key=[seed, TABLE_STREAM]))
    rows = draws.standard_normal((BYTES, dimensions))
    if dimensions >= BYTES:
        q, r = np.linalg.qr(rows.T)
        rows = (q * np.sign(np.diag(r))).T  # the sign of a QR factor is the library's choice
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return torch.from_numpy(rows.astype(np.float32))


T = TypeVar("T")

EMBED_STD = 0.1


class Block(nn.Module):
    def __init__(self, model: ModelConfig, layers: int, *, reads_bytes: bool = True) -> None:
        super().__init__()
        self.compute_dtype = torch.float32
        self.recompute = False
        self.embed = nn.Embedding(IDS, model.width) if reads_bytes else None
        if self.embed is not None:
            nn.init.normal_(self.embed.weight, std=EMBED_STD)
        self.layers = new_layers(model, layers)
        # Held, not computed where they are used: a compiler would work every cosine out again
        # for every sequence, head and layer, a third of the whole step. Real even where the
        # parameters are not yet: nobody brings these from elsewhere.
        positions = torch.arange(model.window, device="cpu")
        tables = rotation(model.width // model.heads, positions)
        self.register_buffer("cos_TR", tables.cos_TR, persistent=False)
        self.register_buffer("sin_TR", tables.sin_TR, persistent=False)

    def embedded(self, ids_BT: Tensor) -> Tensor:
        assert self.embed is not None
        out: Tensor = self.embed(ids_BT.long()).to(self.compute_dtype)
        return out

    def rotation(self, at: slice | Tensor) -> Rotation:
        tables = Rotation(cast("Tensor", self.cos_TR), cast("Tensor", self.sin_TR))
        if isinstance(at, slice) and at.stop > tables.cos_TR.size(0):
            raise ValueError(f"position {at.stop} is past the model's window")
        return Rotation(*(table[at].to(self.compute_dtype) for table in tables))

    def apply_layer(self, function: Callable[..., T], *inputs: object) -> T:
        if self.recompute and self.training:
            out: T = checkpoint(function, *inputs, use_reentrant=False)
            return out
        return function(*inputs)


def new_layers(model: ModelConfig, count: int) -> nn.ModuleList:
    return nn.ModuleList(
        Layer(
            model.width, model.heads, model.mlp_ratio, model.activation, model.taps, model.dropout
        )
        for _ in range(count)
    )


def typed(layers: nn.ModuleList) -> list[Layer]:
    return cast("list[Layer]", list(layers))
