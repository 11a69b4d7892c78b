"""The project's own layer: QK-normalised attention, a local filter and an MLP, all without biases.

Shapes: B batch, T positions, D width, H heads, K = D / H.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktrain.config import ModelConfig
from blocktrain.model.cache import CachedPositions, CacheShape, LayerCache
from blocktrain.model.layer import Context, Layer, LayerCosts, Linear, Rotation, rms_norm, rotate


class SwiGLU(nn.Module):
    """silu(a) * b with both halves from one product; hidden is sized to equal parameters."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        hidden = max(8, round(hidden * 2 / 3 / 8) * 8)
        self.up = Linear(width, 2 * hidden, parts=2)
        self.down = Linear(hidden, width, zero=True)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate) * value)
        return out


class PlainMLP(nn.Module):
    def __init__(self, width: int, hidden: int, activation: str) -> None:
        super().__init__()
        self.up = Linear(width, hidden)
        self.down = Linear(hidden, width, zero=True)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        x = F.gelu(x) if self.activation == "gelu" else F.relu(x).square()
        out: Tensor = self.down(x)
        return out


def new_mlp(width: int, hidden: int, activation: str) -> nn.Module:
    if activation == "swiglu":
        return SwiGLU(width, hidden)
    return PlainMLP(width, hidden, activation)


class TwoStreamLayer(Layer):
    modulations = 6  # shift, scale and gate, for the attention and for the MLP

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model)
        width = model.width
        self.heads = model.heads
        self.dropout = model.dropout
        self.qkv = Linear(width, 3 * width, parts=3)
        self.out = Linear(width, width, zero=True)
        self.mlp = new_mlp(width, int(width * model.mlp_ratio), model.activation)
        self.taps = nn.Parameter(torch.zeros(model.taps, width)) if model.taps else None

    @classmethod
    def rotary_width(cls, model: ModelConfig) -> int:
        return model.width // model.heads

    @classmethod
    def cache_shape(cls, model: ModelConfig) -> CacheShape:
        head = model.width // model.heads
        return CacheShape(model.heads, head, head, model.width if model.taps else 0, model.taps)

    @classmethod
    def costs(cls, model: ModelConfig) -> LayerCosts:
        return LayerCosts(
            context=2 * model.width**2,
            attention=model.width * model.window,  # causal: half of T keys, two products
            activations=(8 + 3 * model.mlp_ratio) * model.width,
        )

    def undecayed(self) -> Iterator[nn.Parameter]:
        if self.taps is not None:
            yield self.taps

    def clean(
        self, x_BTD: Tensor, by: Rotation, cache: LayerCache | None = None
    ) -> tuple[Tensor, Context]:
        h = rms_norm(x_BTD)
        local = self._local_mix(h, cache)
        q, k, v = self.qkv(h + local).chunk(3, dim=-1)
        context = self.context(k, v, local, by, cache)
        x = x_BTD + self._drop(self._attend(q, context, by))
        return x + self._drop(self.mlp(rms_norm(x))), context

    def offer(self, x_BTD: Tensor, by: Rotation, cache: LayerCache | None = None) -> Context:
        width = x_BTD.size(-1)
        h = rms_norm(x_BTD)
        local = self._local_mix(h, cache)
        k, v = self.qkv.rows(h + local, slice(width, None)).chunk(2, dim=-1)
        return self.context(k, v, local, by, cache)

    def noisy(
        self, x_BTD: Tensor, context: Context, by: Rotation, modulation_B1D: Sequence[Tensor]
    ) -> Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = modulation_B1D
        h = (rms_norm(x_BTD) + context.local_BTD) * (1 + scale_a) + shift_a
        q = self.qkv.rows(h, slice(0, x_BTD.size(-1)))
        x = x_BTD + self._drop(self._attend(q, context, by)) * (1 + gate_a)
        mlp: Tensor = self.mlp(rms_norm(x) * (1 + scale_m) + shift_m)
        return x + self._drop(mlp) * (1 + gate_m)

    def context(
        self,
        k_BTD: Tensor,
        v_BTD: Tensor,
        local_BTD: Tensor | float,
        by: Rotation,
        cache: LayerCache | None,
    ) -> Context:
        """The context of normalised and rotated keys, with the positions before from a cache."""
        k = rotate(rms_norm(self._split(k_BTD)), by).transpose(1, 2)
        v = self._split(v_BTD).transpose(1, 2)
        cached = cache.append(k, v) if cache is not None else CachedPositions(k, v, True, None)
        return Context(cached, local_BTD)

    def _attend(self, q_BTD: Tensor, context: Context, by: Rotation) -> Tensor:
        q = rotate(rms_norm(self._split(q_BTD)), by).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            q,
            context.cached.k_BHTK,
            context.cached.v_BHTK,
            attn_mask=context.cached.mask,
            is_causal=context.cached.causal and q_BTD.size(1) > 1,
        )
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(q_BTD.shape))
        return out

    def _local_mix(self, h_BTD: Tensor, cache: LayerCache | None) -> Tensor | float:
        """A causal depthwise filter over the positions just before each one."""
        if self.taps is None:
            return 0.0
        count = self.taps.size(0)
        padded = F.pad(h_BTD, (0, 0, count, 0)) if cache is None else cache.extend_inputs(h_BTD)
        taps = self.taps.to(h_BTD.dtype)
        length = h_BTD.size(1)
        mix = taps[0] * padded[:, count - 1 : count - 1 + length]
        for back in range(2, count + 1):
            mix = mix + taps[back - 1] * padded[:, count - back : count - back + length]
        return mix

    def _split(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.view(*x_BTD.shape[:-1], self.heads, x_BTD.size(-1) // self.heads)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)
