"""Causal blocks: features in, features out, and a private way to predict from them.

One causal block that reads ids and has no tail is an ordinary language model: the end-to-end
reference. In a cascade the first block reads ids, every later one the features of the block before
it, and each predicts the next token through a tail of its own. Later blocks need only the trunk;
tail and head are private.

Shapes: B batch, T positions, D width.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from blocktrain.config import Config
from blocktrain.model.block import Block, new_layers, typed
from blocktrain.model.cache import BlockCache, LayerCache
from blocktrain.model.layer import Layer, Linear, Rotation, rms_norm

# A zero-initialised head behind a gain learns at the pace of the layers under AdamW.
CAUSAL_GAIN = 8.0


class Trunk(Block):
    """The part of a causal block that others build on."""

    def features(self, inputs: Tensor, cache: BlockCache | None = None) -> Tensor:
        """The stream after the block's layers; a cache continues what it holds.

        Inputs are ids (B x T) if the block has an embedding, else features (B x T x D).
        """
        x = self.embedded(inputs) if self.embed is not None else inputs.to(self.compute_dtype)
        return self.run(self.layers, x, cache.layers if cache else None)

    def run(
        self, layers: nn.ModuleList, x_BTD: Tensor, caches: Sequence[LayerCache] | None
    ) -> Tensor:
        count = x_BTD.size(1)
        by = self.rotation(caches[0].positions(count) if caches else slice(0, count))
        memories: Sequence[LayerCache | None] = caches or [None] * len(layers)
        for layer, memory in zip(typed(layers), memories, strict=True):
            x_BTD = self.apply_layer(_step, layer, x_BTD, by, memory)
        return x_BTD


class CausalBlock(Trunk):
    def __init__(self, config: Config, index: int) -> None:
        super().__init__(config, index)
        self.tail = new_layers(config.model, config.tail_layers(index))
        self.head = Linear(config.model.width, config.vocabulary.size, zero=True)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of the next token at every position."""
        return self.logits(self.features(inputs))

    def logits(self, features_BTD: Tensor, cache: BlockCache | None = None) -> Tensor:
        return self.predict(self.private(features_BTD, cache))

    def private(self, features_BTD: Tensor, cache: BlockCache | None = None) -> Tensor:
        """The stream after the tail, which only the head reads."""
        return self.run(self.tail, features_BTD, cache.tail if cache else None)

    def predict(self, private: Tensor) -> Tensor:
        logits: Tensor = self.head(rms_norm(private))
        return CAUSAL_GAIN * logits.float()


def _step(layer: Layer, x_BTD: Tensor, by: Rotation, memory: LayerCache | None) -> Tensor:
    return layer.clean(x_BTD, by, memory)[0]
