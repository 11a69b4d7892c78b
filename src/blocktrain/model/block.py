"""What all kinds of block share: an embedding, layers, rotary tables; and the frozen target table.

Knows neither losses nor how blocks are joined.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from blocktrain.config import Config, ModelConfig
from blocktrain.model.layer import Layer, Rotation, rotation
from blocktrain.model.two_stream import TwoStreamLayer
from blocktrain.vocabulary import BYTE_VOCABULARY

EMBED_STD = 0.1
TABLE_STREAM = 0x7AB1E  # keeps the table's randomness apart from every other use of the seed
# The layers that model.layer can choose.
LAYERS: dict[str, type[Layer]] = {"two_stream": TwoStreamLayer}

T = TypeVar("T")


@lru_cache(maxsize=4)
def target_table(seed: int, dimensions: int, tokens: int = BYTE_VOCABULARY.size) -> Tensor:
    """One unit-norm row per token, drawn from the run's seed and never trained; the rows are
    orthonormal if there are at least as many dimensions.

    Computed in float64 and rounded once, so that machines with different linear algebra libraries
    get the same float32 numbers.
    """
    draws = np.random.Generator(np.random.Philox(key=[seed, TABLE_STREAM]))
    rows = draws.standard_normal((tokens, dimensions))
    if dimensions >= tokens:
        q, r = np.linalg.qr(rows.T)
        rows = (q * np.sign(np.diag(r))).T  # the sign of a QR factor is the library's choice
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return torch.from_numpy(rows.astype(np.float32))


def run_targets(config: Config, device: torch.device) -> Tensor:
    """The target table of a run."""
    dimensions = config.objective.target_dim
    return target_table(config.train.seed, dimensions, config.vocabulary.size).to(device)


class Block(nn.Module):
    """The parts that every kind of block has: an embedding if it reads ids, and layers."""

    def __init__(self, config: Config, index: int) -> None:
        super().__init__()
        model = config.model
        reads_ids = index == 0 or not config.kind.reads_predecessors
        self.compute_dtype = torch.float32
        self.recompute = False
        self.embed = nn.Embedding(config.vocabulary.ids, model.width) if reads_ids else None
        if self.embed is not None:
            nn.init.normal_(self.embed.weight, std=EMBED_STD)
        self.layers = new_layers(model, config.depths[index])
        # Stored, since a compiler would compute every cosine again for every sequence, head and
        # layer: a third of the whole step. On the CPU even under the meta device, since no
        # checkpoint holds them.
        positions = torch.arange(model.window, device="cpu")
        tables = rotation(layer_class(model).rotary_width(model), positions)
        self.register_buffer("cos_TR", tables.cos_TR, persistent=False)
        self.register_buffer("sin_TR", tables.sin_TR, persistent=False)

    def undecayed(self) -> Iterator[nn.Parameter]:
        """Parameters of the block itself, not of its layers, without weight decay."""
        return iter(())

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


def layer_class(model: ModelConfig) -> type[Layer]:
    return LAYERS[model.layer]


def new_layers(model: ModelConfig, count: int) -> nn.ModuleList:
    return nn.ModuleList(layer_class(model)(model) for _ in range(count))


def typed(layers: nn.ModuleList) -> list[Layer]:
    return cast("list[Layer]", list(layers))
