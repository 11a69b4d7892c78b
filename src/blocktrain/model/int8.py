"""A frozen linear map in 8 bits: one byte for each weight, one scale for each output.

Computes in the type of its input, with the weights widened as they are used. On a CUDA device with
Triton, few rows go through a kernel that reads each weight once, as a byte; everywhere else the
weights are widened first, which takes more time than weights that are held wide, not less.

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
# Beyond it a product is bound by computing, which the library does best.
MOST_FUSED_ROWS = 256

log = logging.getLogger(__name__)


class Int8Linear(nn.Module):
    def __init__(self, like: Linear) -> None:
        super().__init__()
        self.register_buffer("levels", torch.zeros_like(like.weight, dtype=torch.int8))
        self.register_buffer("scale", torch.zeros(like.out_features, 1, device=like.weight.device))

    def take(self, weight: Tensor) -> None:
        levels, scale = self._held()
        scale.copy_(weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / LEVELS)
        levels.copy_((weight.to(scale.device) / scale).round())

    def forward(self, x: Tensor) -> Tensor:
        return product(x, *self._held())

    def rows(self, x: Tensor, chosen: slice) -> Tensor:
        """Some of the outputs alone."""
        levels, scale = self._held()
        return product(x, levels[chosen], scale[chosen])

    def _held(self) -> tuple[Tensor, Tensor]:
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
    """The kernel, where it can be had. Tried once: a device that is too old, or Triton without a
    compiler, is found out no earlier."""
    try:
        from blocktrain.model.int8_kernel import linear

        x = torch.ones(1, 64, device=device, dtype=dtype)
        linear(x, x.to(torch.int8), torch.ones(1, device=device))
    except Exception:  # whatever it is, there is another way
        log.warning("no kernel for weights in 8 bits here: they are widened", exc_info=True)
        return None
    return linear


def in_8_bits(module: nn.Module) -> None:
    """Every linear map under it becomes one in 8 bits, without its weights yet."""
    for name, child in module.named_children():
        if isinstance(child, Linear):
            setattr(module, name, Int8Linear(child))
        else:
            in_8_bits(child)
