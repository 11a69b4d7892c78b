"""Transformer layers: attention, then an MLP, each after a norm.

A layer serves two streams. The clean stream is an ordinary causal Transformer over the context; it
computes keys and values. The noisy stream exists only in denoising blocks. It computes queries
only, and attends to the clean stream's keys and values with the same weights and causal mask.

To add a layer, subclass `Layer`, list it in `LAYERS`, and add its size to config/sizes.py. Caches
and the optimizer get everything else from its methods.

Shapes: B batch, T positions, D width, H heads, K width of a head, R = K / 2 rotated pairs.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktrain.config import ModelConfig
from blocktrain.config.sizes import MODULATIONS
from blocktrain.model.cache import CachedPositions, CacheShape, LayerCache
from blocktrain.model.linear import Linear

LOCAL_THETA = 10_000.0


class Rotation(NamedTuple):
    """Cosines and sines of the rotary embedding. A leading batch dimension, if there is one, gives
    each sequence positions of its own."""

    cos_TR: Tensor
    sin_TR: Tensor


class Context(NamedTuple):
    """What a layer's noisy stream reads from its clean stream."""

    cached: CachedPositions
    local_BTD: Tensor | None  # the local filter's output, if there is a filter


class RMSNorm(nn.Module):
    """RMSNorm with weights. It computes in the dtype of its input."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.size(-1),), self.weight.to(x.dtype), self.eps)


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


def rotate(x_BTHK: Tensor, by: Rotation) -> Tensor:
    cos, sin = by.cos_TR.unsqueeze(-2), by.sin_TR.unsqueeze(-2)
    first, second = x_BTHK.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attention_of_one(q_BH1K: Tensor, cached: CachedPositions) -> Tensor:
    """Attention of one new position per sequence, on a CPU. Query heads that share a key head are
    rows of one product, so its keys are read once. In fp32, because torch's bf16 attention on a CPU
    packs all keys again for every query head."""
    k, v = cached.k_BHTK, cached.v_BHTK
    grouped = q_BH1K.reshape(q_BH1K.size(0), k.size(1), -1, q_BH1K.size(-1))
    mixed = F.scaled_dot_product_attention(
        grouped.float(), k.float(), v.float(), attn_mask=cached.mask
    )
    return mixed.reshape(q_BH1K.shape).to(q_BH1K.dtype)


class MLP(nn.Module):
    """The feed-forward network. `swiglu` is silu(a) * b, where one product gives both a and b."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.activation, hidden = model.activation, model.hidden_width
        parts = (hidden, hidden) if self.activation == "swiglu" else (hidden,)
        bias = model.biases == "all"
        self.up = Linear(model.width, sum(parts), parts=parts, bias=bias)
        self.down = Linear(hidden, model.width, zero=True, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.activation == "swiglu":
            gate, value = x.chunk(2, dim=-1)
            x = F.silu(gate) * value
        else:
            x = F.gelu(x) if self.activation == "gelu" else F.relu(x).square()
        out: Tensor = self.down(x)
        return out


class Layer(nn.Module, ABC):
    modulations = MODULATIONS

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        head, width = model.head_width, model.width
        queries, keys = model.heads * head, model.key_heads * head
        self.head_width, self.widths, self.dropout = head, (queries, keys, keys), model.dropout
        has_bias = model.biases != "none"
        self.attention_norm = self.norm(model, width)
        self.qkv = Linear(width, sum(self.widths), parts=self.widths, bias=has_bias)
        self.q_norm = self.norm(model, head) if model.qk_norm else nn.Identity()
        self.k_norm = self.norm(model, head) if model.qk_norm else nn.Identity()
        self.out = Linear(queries, width, zero=True, bias=has_bias and model.biases != "qkv")
        self.mlp_norm = self.norm(model, width)
        self.mlp = MLP(model)

    @classmethod
    @abstractmethod
    def norm(cls, model: ModelConfig, width: int) -> nn.Module:
        """A new norm, for use inside the layer or between the last layer and the head."""

    @classmethod
    @abstractmethod
    def frequencies(cls, model: ModelConfig, pairs_R: Tensor) -> Tensor:
        """Frequencies of the rotary embedding; `pairs_R` are 0, 2, 4, ... below a head's width."""

    @classmethod
    def rotation(cls, model: ModelConfig, positions_T: Tensor) -> Rotation:
        """The rotary embedding at these positions."""
        pairs_R = torch.arange(0, model.head_width, 2, device=positions_T.device)
        frequencies_R = cls.frequencies(model, pairs_R.float())
        angles = positions_T.float()[:, None] * frequencies_R[None, :]
        return Rotation(angles.cos(), angles.sin())

    @classmethod
    def cache_shape(cls, model: ModelConfig) -> CacheShape:
        return CacheShape(model.key_heads, model.head_width, model.head_width)

    def undecayed(self) -> Iterator[nn.Parameter]:
        """Parameters without weight decay: norm weights and biases."""
        yield from (p for p in self.parameters() if p.dim() == 1)

    def clean(
        self, x_BTD: Tensor, by: Rotation, cache: LayerCache | None = None
    ) -> tuple[Tensor, Context]:
        """Run the clean stream. Returns its output, and what the noisy stream reads.

        With a cache, `x_BTD` contains new positions only. The layer stores their keys and values
        in the cache, and attends to the earlier ones there.
        """
        h, local = self._read(x_BTD, cache)
        q, k, v = self.qkv(h).split(self.widths, dim=-1)
        context = self.context(k, v, local, by, cache)
        x = x_BTD + self._drop(self._attend(q, context, by))
        return x + self._drop(self.mlp(self.mlp_norm(x))), context

    def offer(self, x_BTD: Tensor, by: Rotation, cache: LayerCache | None = None) -> Context:
        """Compute only the context that `clean` returns. Nothing reads the clean stream's output of
        a block's last layer."""
        h, local = self._read(x_BTD, cache)
        k, v = self.qkv.rows(h, slice(self.widths[0], None)).chunk(2, dim=-1)
        return self.context(k, v, local, by, cache)

    def noisy(
        self, x_BTD: Tensor, context: Context, by: Rotation, modulation_B1D: Sequence[Tensor]
    ) -> Tensor:
        """Run the noisy stream, modulated by `modulations` tensors that depend on sigma. Stores
        nothing in a cache."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = modulation_B1D
        h = self.attention_norm(x_BTD)
        if context.local_BTD is not None:
            h = h + context.local_BTD
        q = self.qkv.rows(h * (1 + scale_a) + shift_a, slice(0, self.widths[0]))
        x = x_BTD + self._drop(self._attend(q, context, by)) * (1 + gate_a)
        mlp: Tensor = self.mlp(self.mlp_norm(x) * (1 + scale_m) + shift_m)
        return x + self._drop(mlp) * (1 + gate_m)

    def context(
        self,
        k_BTD: Tensor,
        v_BTD: Tensor,
        local_BTD: Tensor | None,
        by: Rotation,
        cache: LayerCache | None,
    ) -> Context:
        """Normalise and rotate the keys. With a cache, the context includes earlier positions."""
        k = rotate(self.k_norm(self._split(k_BTD)), by).transpose(1, 2)
        v = self._split(v_BTD).transpose(1, 2)
        cached = cache.append(k, v) if cache is not None else CachedPositions(k, v, True, None)
        return Context(cached, local_BTD)

    def local_mix(self, h_BTD: Tensor, cache: LayerCache | None) -> Tensor | None:
        """A causal depthwise convolution over the positions just before each one; None if the layer
        has no such filter."""
        return None

    def _read(self, x_BTD: Tensor, cache: LayerCache | None) -> tuple[Tensor, Tensor | None]:
        """The input of queries, keys and values, and the local filter's share of it."""
        h = self.attention_norm(x_BTD)
        local = self.local_mix(h, cache)
        return h if local is None else h + local, local

    def _attend(self, q_BTD: Tensor, context: Context, by: Rotation) -> Tensor:
        q = rotate(self.q_norm(self._split(q_BTD)), by).transpose(1, 2)
        if q.size(2) == 1 and q.device.type == "cpu":
            mixed = attention_of_one(q, context.cached)
        else:
            mixed = F.scaled_dot_product_attention(
                q,
                context.cached.k_BHTK,
                context.cached.v_BHTK,
                attn_mask=context.cached.mask,
                is_causal=context.cached.causal and q_BTD.size(1) > 1,
                enable_gqa=self.widths[0] != self.widths[1],
            )
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(q_BTD.shape))
        return out

    def _split(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.view(*x_BTD.shape[:-1], -1, self.head_width)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class LocalLayer(Layer):
    """The project's own layer: norms without weights, and a causal filter over nearby positions."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model)
        self.taps = nn.Parameter(torch.zeros(model.taps, model.width)) if model.taps else None

    @classmethod
    def norm(cls, model: ModelConfig, width: int) -> nn.Module:
        return nn.RMSNorm(width, elementwise_affine=False)

    @classmethod
    def frequencies(cls, model: ModelConfig, pairs_R: Tensor) -> Tensor:
        frequencies: Tensor = LOCAL_THETA ** -(pairs_R / model.head_width)
        return frequencies

    @classmethod
    def cache_shape(cls, model: ModelConfig) -> CacheShape:
        inputs = (model.width, model.taps) if model.taps else (0, 0)
        return CacheShape(*super().cache_shape(model)[:3], *inputs)

    def undecayed(self) -> Iterator[nn.Parameter]:
        if self.taps is not None:
            yield self.taps

    def local_mix(self, h_BTD: Tensor, cache: LayerCache | None) -> Tensor | None:
        if self.taps is None:
            return None
        count, length = self.taps.size(0), h_BTD.size(1)
        padded = F.pad(h_BTD, (0, 0, count, 0)) if cache is None else cache.extend_inputs(h_BTD)
        taps = self.taps.to(h_BTD.dtype)
        mix = taps[0] * padded[:, count - 1 : count - 1 + length]
        for back in range(2, count + 1):
            mix = mix + taps[back - 1] * padded[:, count - back : count - back + length]
        return mix


class LlamaLayer(Layer):
    """The layer of Llama, Qwen and Mistral. Its tensors are those of a Hugging Face checkpoint,
    some of them fused (see `interop`)."""

    @classmethod
    def norm(cls, model: ModelConfig, width: int) -> nn.Module:
        return RMSNorm(width, model.norm_eps)

    @classmethod
    def frequencies(cls, model: ModelConfig, pairs_R: Tensor) -> Tensor:
        frequencies: Tensor = 1.0 / model.rope_theta ** (pairs_R / model.head_width)
        if not model.rope_scaling:
            return frequencies
        factor, *llama3 = model.rope_scaling
        if not llama3:
            return frequencies / factor
        # Divide slow rotations by the factor, keep fast ones, and interpolate between them.
        low, high, window = llama3
        turns = window * frequencies / (2 * math.pi)  # in the original window
        share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return share * frequencies + (1.0 - share) * frequencies / factor


# The layers that model.layer can choose.
LAYERS: dict[str, type[Layer]] = {"local": LocalLayer, "llama": LlamaLayer}


def layer_class(model: ModelConfig) -> type[Layer]:
    return LAYERS[model.layer]
