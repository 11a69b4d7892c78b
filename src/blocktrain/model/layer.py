"""What a block asks of a Transformer layer, and the parts that layers are made of.

A layer serves two streams. The clean stream holds the context; its step is an ordinary causal
layer, and it alone writes keys and values. The noisy stream sends queries to them under the same
causal mask, through the same weights. Caches, the optimizer and estimates ask a layer for what they
need, so that a new one is a subclass of `Layer` and a line in model/block.py.

Shapes: B batch, T positions, D width, H heads, K width of a head, R = K / 2 rotated pairs.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktrain.config import ModelConfig
from blocktrain.model.cache import CachedPositions, CacheShape, LayerCache


class Rotation(NamedTuple):
    """Cosines and sines of the rotary embedding at some positions: the same for all sequences, or
    with a leading dimension for them."""

    cos_TR: Tensor
    sin_TR: Tensor


class Context(NamedTuple):
    """What the clean stream of a layer offers to the noisy one."""

    cached: CachedPositions
    local_BTD: Tensor | float


class LayerCosts(NamedTuple):
    """Estimates for one position."""

    context: int  # multiplications for keys and values, which only the clean stream computes
    attention: int  # multiplications between queries, keys and values, in each stream
    activations: float  # numbers that each stream keeps for the backward pass


class Linear(nn.Linear):
    """A bias-free linear map that computes in the dtype of its input; its weights keep theirs.

    `parts`: this many maps of one shape, whose outputs stand side by side.
    """

    def __init__(self, inputs: int, outputs: int, *, parts: int = 1, zero: bool = False) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.parts = parts
        if zero:
            nn.init.zeros_(self.weight)
        else:
            nn.init.normal_(self.weight, std=inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))

    def rows(self, x: Tensor, chosen: slice) -> Tensor:
        """Only some of the outputs."""
        return F.linear(x, self.weight[chosen].to(x.dtype))


class Layer(nn.Module, ABC):
    modulations: ClassVar[int]  # tensors by which sigma modulates a noisy step

    @abstractmethod
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()

    @abstractmethod
    def clean(
        self, x_BTD: Tensor, by: Rotation, cache: LayerCache | None = None
    ) -> tuple[Tensor, Context]:
        """The clean stream's step, and its context; a cache adds the positions before."""

    @abstractmethod
    def offer(self, x_BTD: Tensor, by: Rotation, cache: LayerCache | None = None) -> Context:
        """The context alone, for the last layer that a clean stream reaches."""

    @abstractmethod
    def noisy(
        self, x_BTD: Tensor, context: Context, by: Rotation, modulation_B1D: Sequence[Tensor]
    ) -> Tensor:
        """The noisy stream's step: it is modulated by sigma, reads the context, writes nothing."""

    @classmethod
    @abstractmethod
    def rotary_width(cls, model: ModelConfig) -> int:
        """The width of a head that positions rotate."""

    @classmethod
    @abstractmethod
    def cache_shape(cls, model: ModelConfig) -> CacheShape: ...

    @classmethod
    @abstractmethod
    def costs(cls, model: ModelConfig) -> LayerCosts: ...

    def muon_matrices(self) -> list[Linear]:
        """The maps whose weights Muon steps, each with its `parts`."""
        return [module for module in self.modules() if isinstance(module, Linear)]

    def undecayed(self) -> Iterator[nn.Parameter]:
        """Parameters without weight decay."""
        return iter(())


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


def rotation(head_width: int, positions: Tensor) -> Rotation:
    pairs = torch.arange(0, head_width, 2, dtype=torch.float32, device=positions.device)
    frequencies = 10_000.0 ** -(pairs / head_width)
    angles = positions.float()[:, None] * frequencies[None, :]
    return Rotation(angles.cos(), angles.sin())


def rotate(x_BTHK: Tensor, by: Rotation) -> Tensor:
    cos, sin = by.cos_TR.unsqueeze(-2), by.sin_TR.unsqueeze(-2)
    first, second = x_BTHK.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
