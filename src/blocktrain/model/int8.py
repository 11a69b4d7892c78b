"""A frozen linear map in 8 bits: one byte for each weight, one scale for each output.

Computes in the type of its input. On a CUDA device with Triton, products of few rows go through a
kernel that reads each weight once, as a byte; otherwise the weights are widened first, which saves
memory but takes more time than weights that are stored wide.

Shapes: M rows, N outputs, K inputs.
"""

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktrain.model.layer import Linear

LEVELS = 127
# With more rows a product is limited by arithmetic, and torch's own is faster.
MOST_FUSED_ROWS = 256

log = logging.getLogger(__name__)


class Int8Linear(nn.Module):
    def __init__(self, like: Linear) -> None:
        super().__init__()
        self.register_buffer("levels", torch.zeros_like(like.weight, dtype=torch.int8))
        self.register_buffer("scale", torch.zeros(like.out_features, 1, device=like.weight.device))

    def take(self, weight: Tensor) -> None:
        """Round a weight to 8 bits and store it."""
        levels, scale = self._rounded_weight()
        scale.copy_(weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / LEVELS)
        levels.copy_((weight.to(scale.device) / scale).round())

    def forward(self, x: Tensor) -> Tensor:
        return product(x, *self._rounded_weight())

    def rows(self, x: Tensor, chosen: slice) -> Tensor:
        """Only some of the outputs."""
        levels, scale = self._rounded_weight()
        return product(x, levels[chosen], scale[chosen])

    def _rounded_weight(self) -> tuple[Tensor, Tensor]:
        return cast("Tensor", self.levels), cast("Tensor", self.scale)


def product(x: Tensor, levels_NK: Tensor, scale_N1: Tensor) -> Tensor:
    few = x.numel() <= MOST_FUSED_ROWS * x.size(-1) and x.size(-1) % 8 == 0
    if few and x.is_cuda and (fused := fused_linear(x.device, x.dtype)):
        y_MN = fused(x.reshape(-1, x.size(-1)).contiguous(), levels_NK, scale_N1)
        return y_MN.view(*x.shape[:-1], -1)
    return (F.linear(x, levels_NK.to(x.dtype)) * scale_N1.view(-1)).to(x.dtype)


@lru_cache
def fused_linear(
    device: torch.device, dtype: torch.dtype
) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """The kernel, or None if it does not work here. Tried once, since a device that is too old or a
    Triton without a compiler fails no earlier."""
    try:
        from blocktrain.model.int8_kernel import linear

        x = torch.ones(1, 64, device=device, dtype=dtype)
        linear(x, x.to(torch.int8), torch.ones(1, device=device))
    except Exception:  # of any kind: there is the slower way
        log.warning("the 8-bit kernel does not work here; using the slower way", exc_info=True)
        return None
    return linear


def in_8_bits(module: nn.Module) -> None:
    """Replace every linear map in a module by one in 8 bits, without weights yet."""
    for name, child in module.named_children():
        if isinstance(child, Linear):
            setattr(module, name, Int8Linear(child))
        else:
            in_8_bits(child)
