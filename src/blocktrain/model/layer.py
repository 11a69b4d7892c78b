"""One Transformer layer that serves a clean stream and a noisy stream.

The clean stream holds the context; its step is an ordinary causal layer, and it alone writes keys
and values. The noisy stream sends queries to them under the same causal mask, through the same
weights. Knows nothing of sigma beyond a modulation handed in, and nothing of blocks.

Shapes: B batch, T positions, D width, H heads, K = D / H, R = K / 2 rotated pairs.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktrain.model.cache import CachedPositions, LayerCache

MODULATIONS = 6  # shift, scale and gate, for the attention and for the MLP


class Rotation(NamedTuple):
    """Cosines and sines of the rotary embedding for the positions at hand: the same for all
    sequences, or with a dimension for them in front."""

    cos_TR: Tensor
    sin_TR: Tensor


class Context(NamedTuple):
    """What the clean stream offers the noisy one at one layer."""

    held: CachedPositions
    local_BTD: Tensor | float


class Linear(nn.Linear):
    """A bias-free linear map that computes in the dtype of its input, weights kept as they are.

    `parts`: as many maps of one shape, whose outputs stand side by side.
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
        """Some of the outputs alone."""
        return F.linear(x, self.weight[chosen].to(x.dtype))


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


class Layer(nn.Module):
    def __init__(
        self, width: int, heads: int, mlp_ratio: float, activation: str, taps: int, dropout: float
    ) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = Linear(width, 3 * width, parts=3)
        self.out = Linear(width, width, zero=True)
        hidden = int(width * mlp_ratio)
        self.mlp: nn.Module = (
            SwiGLU(width, hidden) if activation == "swiglu" else PlainMLP(width, hidden, activation)
        )
        self.taps = nn.Parameter(torch.zeros(taps, width)) if taps else None

    def clean(
        self, x_BTD: Tensor, by: Rotation, cache: LayerCache | None = None
    ) -> tuple[Tensor, Context]:
        """The clean stream's step, and what it offers; a cache adds the positions before."""
        h = rms_norm(x_BTD)
        local = self._local_mix(h, cache)
        q, k, v = self.qkv(h + local).chunk(3, dim=-1)
        context = self._context(k, v, local, by, cache)
        x = x_BTD + self._drop(self._attend(q, context, by))
        return x + self._drop(self.mlp(rms_norm(x))), context

    def offer(self, x_BTD: Tensor, by: Rotation, cache: LayerCache | None = None) -> Context:
        """The context alone, where nothing will read the clean stream any more."""
        width = x_BTD.size(-1)
        h = rms_norm(x_BTD)
        local = self._local_mix(h, cache)
        k, v = self.qkv.rows(h + local, slice(width, None)).chunk(2, dim=-1)
        return self._context(k, v, local, by, cache)

    def noisy(
        self, x_BTD: Tensor, context: Context, by: Rotation, modulation_B1D: tuple[Tensor, ...]
    ) -> Tensor:
        """The noisy stream's step: modulated by sigma, reading the context, writing nothing."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = modulation_B1D
        h = (rms_norm(x_BTD) + context.local_BTD) * (1 + scale_a) + shift_a
        q = self.qkv.rows(h, slice(0, x_BTD.size(-1)))
        x = x_BTD + self._drop(self._attend(q, context, by)) * (1 + gate_a)
        mlp: Tensor = self.mlp(rms_norm(x) * (1 + scale_m) + shift_m)
        return x + self._drop(mlp) * (1 + gate_m)

    def _context(
        self,
        k_BTD: Tensor,
        v_BTD: Tensor,
        local_BTD: Tensor | float,
        by: Rotation,
        cache: LayerCache | None,
    ) -> Context:
        k = rotate(rms_norm(self._split(k_BTD)), by).transpose(1, 2)
        v = self._split(v_BTD).transpose(1, 2)
        held = cache.append(k, v) if cache is not None else CachedPositions(k, v, True, None)
        return Context(held, local_BTD)

    def _attend(self, q_BTD: Tensor, context: Context, by: Rotation) -> Tensor:
        q = rotate(rms_norm(self._split(q_BTD)), by).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            q,
            context.held.k_BHTK,
            context.held.v_BHTK,
            attn_mask=context.held.mask,
            is_causal=context.held.causal and q_BTD.size(1) > 1,
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
