"""What all kinds of blocks share (embedding, layers, rotary tables), the target table, and causal
blocks.

A causal block that reads ids and has no tail is an ordinary language model: the end-to-end
reference. In a cascade the first block reads ids, and every later one reads the features of the
block before it. Each block predicts the next token through its own tail and head; other blocks read
only its trunk. model/stack.py joins blocks to a model.

Shapes: B batch, T positions, D width.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from blocktrain.config import BYTE_VOCABULARY, Config, ModelConfig
from blocktrain.model.cache import BlockCache, LayerCache
from blocktrain.model.layer import Layer, Rotation, layer_class
from blocktrain.model.linear import (
    Linear,
    linear_cross_entropy,
    matrix_product,
    row_product_for,
    use_row_products,
)
from blocktrain.model.row_product import RowProduct

EMBED_STD, TIED_EMBED_STD = 0.1, 0.02
# Multiplies the logits, so that under AdamW a zero-initialised head learns as fast as the layers.
CAUSAL_GAIN = 8.0
TABLE_STREAM = 0x7AB1E  # separates the table's random stream from other uses of the seed

T = TypeVar("T")
# Computes a block's logits (B x t x V) at some of a batch's positions; all of them may not fit in
# memory.
LogitsAt = Callable[[slice], Tensor]


@lru_cache(maxsize=4)
def target_table(seed: int, dimensions: int, tokens: int = BYTE_VOCABULARY.size) -> Tensor:
    """One unit-norm row per token, drawn from the run's seed and never trained. With at least as
    many dimensions as tokens the rows are orthonormal.

    Computed in float64 and rounded once, so that machines with different linear algebra libraries
    get the same float32 numbers.
    """
    draws = np.random.Generator(np.random.Philox(key=[seed, TABLE_STREAM]))
    rows = draws.standard_normal((tokens, dimensions))
    if dimensions >= tokens:
        q, r = np.linalg.qr(rows.T)
        rows = (q * np.sign(np.diag(r))).T  # libraries choose different signs
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return torch.from_numpy(rows.astype(np.float32))


def run_targets(config: Config, device: torch.device) -> Tensor:
    """The target table of a run."""
    dimensions = config.objective.target_dim
    return target_table(config.train.seed, dimensions, config.vocabulary.size).to(device)


class Block(nn.Module):
    """What every kind of block has: layers, and an embedding if it reads ids."""

    def __init__(self, config: Config, index: int) -> None:
        super().__init__()
        model = config.model
        reads_ids = index == 0 or not config.kind.reads_predecessors
        self.compute_dtype = torch.float32
        self.recompute = False
        self.embed = nn.Embedding(config.vocabulary.ids, model.width) if reads_ids else None
        if self.embed is not None:
            std = TIED_EMBED_STD if model.tied_embeddings else EMBED_STD
            nn.init.normal_(self.embed.weight, std=std)
        self.layers = new_layers(model, config.depths[index])
        # Stored, since a compiled model would recompute every cosine for every sequence, head and
        # layer, a third of a step's time. On the CPU even under the meta device, since checkpoints
        # do not contain them.
        positions = torch.arange(model.window, device="cpu")
        tables = layer_class(model).rotation(model, positions)
        self.register_buffer("cos_TR", tables.cos_TR, persistent=False)
        self.register_buffer("sin_TR", tables.sin_TR, persistent=False)

    def undecayed(self) -> Iterator[nn.Parameter]:
        """Parameters without weight decay, except those of the block's layers."""
        return iter(())

    def use_row_products(self) -> None:
        """Compute single rows faster on a CPU. Call it once the weights are final."""
        use_row_products(self, self.compute_dtype)

    def embedded(self, ids_BT: Tensor) -> Tensor:
        assert self.embed is not None
        out: Tensor = self.embed(ids_BT.long()).to(self.compute_dtype)
        return out

    def rotation(self, count: int, caches: Sequence[LayerCache] | None = None) -> Rotation:
        """Rotary tables of the first `count` positions or, with caches, of each sequence's next
        `count` positions."""
        tables = Rotation(cast("Tensor", self.cos_TR), cast("Tensor", self.sin_TR))
        if not caches and count > tables.cos_TR.size(0):
            raise ValueError(f"{count} positions exceed the model's window; shorten the input")
        at = caches[0].positions(count) if caches else slice(count)
        return Rotation(*(table[at].to(self.compute_dtype) for table in tables))

    def apply_layer(self, function: Callable[..., T], *inputs: object) -> T:
        if self.recompute and torch.is_grad_enabled():
            out: T = checkpoint(function, *inputs, use_reentrant=False)
            return out
        return function(*inputs)


def new_layers(model: ModelConfig, count: int) -> nn.ModuleList:
    return nn.ModuleList(layer_class(model)(model) for _ in range(count))


def typed(layers: nn.ModuleList) -> list[Layer]:
    return cast("list[Layer]", list(layers))


def with_caches(
    layers: nn.ModuleList, caches: Sequence[LayerCache] | None
) -> Iterator[tuple[Layer, LayerCache | None]]:
    each: Sequence[LayerCache | None] = caches or [None] * len(layers)
    return zip(typed(layers), each, strict=True)


class Trunk(Block):
    """The part of a causal block that later blocks read."""

    def features(self, inputs: Tensor, cache: BlockCache | None = None) -> Tensor:
        """The output of the block's layers. With a cache, inputs are new positions only.

        Inputs are ids (B x T) if the block has an embedding, else features (B x T x D).
        """
        return self.run(self.layers, self.entered(inputs), cache.layers if cache else None)

    def entered(self, inputs: Tensor) -> Tensor:
        """What the first layer reads: embedded ids, or features in the type to compute in."""
        return self.embedded(inputs) if self.embed is not None else inputs.to(self.compute_dtype)

    def run(
        self, layers: nn.ModuleList, x_BTD: Tensor, caches: Sequence[LayerCache] | None
    ) -> Tensor:
        by = self.rotation(x_BTD.size(1), caches)
        for layer, cache in with_caches(layers, caches):
            x_BTD = self.apply_layer(_step, layer, x_BTD, by, cache)
        return x_BTD


class CausalBlock(Trunk):
    def __init__(self, config: Config, index: int) -> None:
        super().__init__(config, index)
        model, tokens = config.model, config.vocabulary.size
        self.tokens, self.gain = tokens, logit_gain(model)
        self.tail = new_layers(model, config.tail_layers(index))
        self.row_product: RowProduct | None = None  # of the head
        self.norm: nn.Module | None = None
        self.head: Linear | None = None
        if config.has_head(index):
            self.norm = layer_class(model).norm(model, model.width)
            if not (model.tied_embeddings and self.embed):
                self.head = Linear(model.width, tokens, zero=True)

    def forward(
        self, inputs: Tensor, targets_BT: Tensor | None = None, shares_BT: Tensor | None = None
    ) -> Tensor:
        """Logits of the next token at every position. With targets, their mean cross entropy
        instead (or its sum with these shares), computed without storing all logits."""
        private = self.private(self.features(inputs))
        if targets_BT is None:
            return self.predict(private)
        x_ND = self.normed(private).flatten(0, 1)
        shares_N = None if shares_BT is None else shares_BT.flatten()
        targets_N = targets_BT.flatten()
        return linear_cross_entropy(x_ND, self.head_weight, targets_N, self.gain, shares_N)[0]

    def private(self, features_BTD: Tensor, cache: BlockCache | None = None) -> Tensor:
        """The output of the tail, which only the head reads."""
        return self.run(self.tail, features_BTD, cache.tail if cache else None)

    def predict(self, private: Tensor) -> Tensor:
        logits = matrix_product(self.normed(private), self.head_weight, None, self.row_product)
        return self.gain * logits.float()

    def use_row_products(self) -> None:
        super().use_row_products()
        if self.norm is not None:
            self.row_product = row_product_for(self.head_weight, self.compute_dtype)

    def logits_of(self, features_BTD: Tensor) -> LogitsAt:
        private_BTD = self.private(features_BTD)
        return lambda at: self.predict(private_BTD[:, at])

    def normed(self, private: Tensor) -> Tensor:
        """The input of the head."""
        assert self.norm is not None, "only blocks with a head predict"
        out: Tensor = self.norm(private)
        return out

    @property
    def head_weight(self) -> Tensor:
        """V x D: the head's own weight, or the embedding's if they are tied."""
        if self.head is not None:
            return self.head.weight
        assert self.embed is not None
        return self.embed.weight[: self.tokens]


def logit_gain(model: ModelConfig) -> float:
    """The factor by which a head's output is multiplied to give logits."""
    return model.logit_gain or (1.0 if model.tied_embeddings else CAUSAL_GAIN)


def _step(layer: Layer, x_BTD: Tensor, by: Rotation, cache: LayerCache | None) -> Tensor:
    return layer.clean(x_BTD, by, cache)[0]
