"""How large blocks are, from settings alone: parameters and activations. Imports no torch.

A test compares the numbers of parameters with those of real blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from blocktrain.config.run_config import Config
from blocktrain.config.settings import ModelConfig

LARGEST_DIRECT = 1024  # size up to which a vocabulary's logits take no more memory than features
CHUNK_LOGITS = {"cuda": 1 << 27, "cpu": 1 << 24}  # logits in memory at once
# Of denoising blocks: sines and cosines of sigma; and tensors that modulate a layer, which are
# shift, scale and gate, for attention and for MLP.
SIGMA_FEATURES = 32
MODULATIONS = 6


def needs_chunks(tokens: int) -> bool:
    """Whether a vocabulary is so large that logits are computed for some positions at a time."""
    return tokens > LARGEST_DIRECT


@dataclass(frozen=True)
class LayerSize:
    """A layer's parameters, and its costs for one position."""

    matrices: int  # weights of linear maps
    vectors: int  # biases, weights of norms, the local filter
    context: int  # multiplications for keys and values, which only the clean stream computes
    attention: int  # multiplications between queries, keys and values, in each stream
    activations: int  # numbers that each stream keeps for the backward pass

    @property
    def parameters(self) -> int:
        return self.matrices + self.vectors


def layer_size(model: ModelConfig) -> LayerSize:
    width, head, hidden = model.width, model.head_width, model.hidden_width
    queries, keys = model.heads * head, model.key_heads * head
    up = 2 * hidden if model.activation == "swiglu" else hidden
    biases = {
        "none": 0,
        "qkv": queries + 2 * keys,
        "attention": queries + 2 * keys + width,
        "all": queries + 2 * keys + width + up + width,
    }
    if model.layer == "llama":
        others = 2 * width + (2 * head if model.qk_norm else 0)
    else:
        others = model.taps * width
    return LayerSize(
        matrices=width * (2 * queries + 2 * keys + up + hidden),
        vectors=biases[model.biases] + others,
        context=2 * width * keys,
        attention=queries * model.window,  # causal: half of T keys, two products
        activations=4 * width + 3 * queries + 2 * keys + 4 * hidden,
    )


@dataclass(frozen=True)
class BlockSize:
    """A block's parameters."""

    layer: LayerSize
    layers: int
    tail: int  # private layers
    vocabulary: int  # parameters of the embedding, and of the maps from and to tokens
    embedding: int  # those of them that belong to the embedding
    others: int  # the last norm; the maps that depend on sigma

    @property
    def parameters(self) -> int:
        return (self.layers + self.tail) * self.layer.parameters + self.vocabulary + self.others

    @property
    def matrices(self) -> int:
        """Weights of the layers' linear maps, the only ones that Muon trains."""
        return (self.layers + self.tail) * self.layer.matrices

    @property
    def trunk(self) -> int:
        """Parameters that later blocks of a cascade read."""
        return self.layers * self.layer.parameters + self.embedding


def block_sizes(config: Config) -> Iterator[BlockSize]:
    """The sizes of all blocks, in order."""
    layer = layer_size(config.model)
    for index, layers in enumerate(config.depths):
        embedding = config.vocabulary.ids * config.model.width * _reads_ids(config, index)
        maps, others = _denoising(config, layers) if config.kind.denoises else _head(config, index)
        tail = config.tail_layers(index)
        yield BlockSize(layer, layers, tail, embedding + maps, embedding, others)


def _reads_ids(config: Config, index: int) -> bool:
    return index == 0 or not config.kind.reads_predecessors


def _head(config: Config, index: int) -> tuple[int, int]:
    """Parameters of a causal block's head, and of the norm before it."""
    model = config.model
    if not config.has_head(index):
        return 0, 0
    is_tied = model.tied_embeddings and _reads_ids(config, index)
    head = 0 if is_tied else config.vocabulary.size * model.width
    return head, model.width if model.layer == "llama" else 0


def _denoising(config: Config, layers: int) -> tuple[int, int]:
    """Parameters of a denoising block's maps from z and to F, and of what depends on sigma."""
    objective, width = config.objective, config.model.width
    tokens = config.vocabulary.size
    coordinates = objective.target_dim if needs_chunks(tokens) else tokens
    modulation = objective.sigma_rank * (SIGMA_FEATURES + layers * MODULATIONS * width)
    scale = objective.logit_scale == "learned"
    return 2 * coordinates * width, modulation + scale
