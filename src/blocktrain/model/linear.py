"""Linear maps: in the number type of their input, frozen ones with weights in 8 bits, and the cross
entropy of a linear head over a large vocabulary.

Shapes, in a matrix product: M rows, N outputs, K inputs; in a cross entropy: N positions, D width,
V tokens.
"""

import logging
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktrain.config.sizes import CHUNK_LOGITS
from blocktrain.model.row_product import LEAST_WEIGHTS, RowProduct, row_product

INT8_LEVELS = 127
# Larger products are compute-bound, and torch's own matmul is faster.
MOST_FUSED_ROWS = 256
MOST_WIDENED = 1 << 19  # 8-bit weights that are widened at once on a CPU
log = logging.getLogger(__name__)


class Linear(nn.Linear):
    """A linear map that computes in the dtype of its input, whatever the dtype of its weights.

    `parts`: the numbers of outputs of the maps fused into this one, such as q, k and v. Empty: it
    is a single map.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        parts: tuple[int, ...] = (),
        zero: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.parts = parts or (outputs,)
        self.row_product: RowProduct | None = None
        if bias:
            nn.init.zeros_(self.bias)
        if zero:
            nn.init.zeros_(self.weight)
        else:
            nn.init.normal_(self.weight, std=inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(x, slice(None))

    def rows(self, x: Tensor, chosen: slice) -> Tensor:
        """Compute the chosen outputs only."""
        bias = _rows_of(self.bias, chosen, x.dtype)
        return matrix_product(x, self.weight[chosen], bias, self.row_product)


class Int8Linear(nn.Module):
    """A frozen linear map in 8 bits: one byte per weight, one scale per output.

    It computes in the dtype of its input. On a CUDA device with Triton, small products run in a
    kernel that reads each weight once, as a byte. On a CPU they are cast to the input's dtype in
    parts that fit into its cache. Elsewhere all are cast first, which saves memory but is slower
    than storing them in that dtype. A bias is not rounded.
    """

    def __init__(self, like: Linear) -> None:
        super().__init__()
        self.register_buffer("levels", torch.zeros_like(like.weight, dtype=torch.int8))
        self.register_buffer("scale", torch.zeros(like.out_features, 1, device=like.weight.device))
        self.bias = like.bias
        self.row_product: RowProduct | None = None

    def take(self, weight: Tensor) -> None:
        """Round a weight matrix to 8 bits and store it; a map on the meta device moves to the
        matrix's device."""
        for name, buffer in list(self.named_buffers()):
            if buffer.is_meta:
                self.register_buffer(name, torch.empty_like(buffer, device=weight.device))
        levels, scale = self._levels_and_scale()
        scale.copy_(weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / INT8_LEVELS)
        levels.copy_((weight.to(scale.device) / scale).round())

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(x, slice(None))

    def rows(self, x: Tensor, chosen: slice) -> Tensor:
        """Compute the chosen outputs only."""
        levels, scale = self._levels_and_scale()
        if self.row_product and is_row(x):
            y = self.row_product(x.view(-1), levels[chosen], scale[chosen])
            y = y.view(*x.shape[:-1], -1)
        else:
            y = product(x, levels[chosen], scale[chosen])
        bias = _rows_of(self.bias, chosen, x.dtype)
        return y if bias is None else y + bias

    def _levels_and_scale(self) -> tuple[Tensor, Tensor]:
        return cast("Tensor", self.levels), cast("Tensor", self.scale)


def _rows_of(bias: Tensor | None, chosen: slice, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias[chosen].to(dtype)


def product(x: Tensor, levels_NK: Tensor, scale_N1: Tensor) -> Tensor:
    if x.requires_grad:
        passed: Tensor = _FrozenProduct.apply(  # type: ignore[no-untyped-call]
            x, levels_NK, scale_N1
        )
        return passed
    fits = x.numel() <= MOST_FUSED_ROWS * x.size(-1) and x.size(-1) % 8 == 0
    if fits and x.is_cuda and (fused := fused_linear(x.device, x.dtype)):
        y_MN = fused(x.reshape(-1, x.size(-1)).contiguous(), levels_NK, scale_N1)
        return y_MN.view(*x.shape[:-1], -1)
    if x.device.type == "cpu":
        y = _product_in_parts(x, levels_NK)
    else:
        y = F.linear(x, levels_NK.to(x.dtype))
    return (y * scale_N1.view(-1)).to(x.dtype)


def _product_in_parts(x: Tensor, levels_NK: Tensor) -> Tensor:
    """Widen the 8-bit weights in parts that stay in the processor's cache: 20 times as fast as
    writing all of them to memory first."""
    outputs, rows = levels_NK.size(0), max(1, MOST_WIDENED // levels_NK.size(1))
    y = x.new_empty(*x.shape[:-1], outputs)
    for start in range(0, outputs, rows):
        part = slice(start, start + rows)
        y[..., part] = F.linear(x, levels_NK[part].to(x.dtype))
    return y


class _FrozenProduct(torch.autograd.Function):
    """The product with a gradient for `x`. It keeps the 8-bit weights for the backward pass, not a
    copy in the dtype of `x`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, levels_NK: Tensor, scale_N1: Tensor) -> Tensor:
        ctx.save_for_backward(levels_NK, scale_N1)
        return (F.linear(x, levels_NK.to(x.dtype)) * scale_N1.view(-1)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        levels_NK, scale_N1 = ctx.saved_tensors
        by = slopes[0]
        return (by * scale_N1.view(-1)).to(by.dtype) @ levels_NK.to(by.dtype), None, None


@lru_cache
def fused_linear(
    device: torch.device, dtype: torch.dtype
) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """The kernel, or None if it does not run on this device. A trial run decides: an old device, or
    a Triton without a C compiler, fails only when a kernel runs."""
    try:
        from blocktrain.model.int8_kernel import linear

        x = torch.ones(1, 64, device=device, dtype=dtype)
        linear(x, x.to(torch.int8), torch.ones(1, device=device))
    except Exception:  # whatever it is, torch's own matmul works
        log.warning(
            "the 8-bit kernel does not run on %s; using torch's slower matmul instead",
            device,
            exc_info=True,
        )
        return None
    return linear


def in_8_bits(module: nn.Module) -> None:
    """Replace every linear map in a module by an `Int8Linear`; `take` fills in its weights."""
    for name, child in module.named_children():
        if isinstance(child, Linear):
            setattr(module, name, Int8Linear(child))
        else:
            in_8_bits(child)


def matrix_product(
    x: Tensor, weight_NK: Tensor, bias: Tensor | None, compiled: RowProduct | None
) -> Tensor:
    """A linear map in the dtype of its input, whatever that of its weights. `compiled` computes
    single rows, if there is such a product."""
    if compiled is None or not is_row(x):
        return F.linear(x, weight_NK.to(x.dtype), bias)
    y = compiled(x.view(-1), weight_NK, None).view(*x.shape[:-1], -1)
    return y if bias is None else y + bias


def is_row(x: Tensor) -> bool:
    return x.numel() == x.size(-1)


def use_row_products(module: nn.Module, inputs: torch.dtype) -> None:
    """Let the large linear maps in a frozen module on a CPU compute single rows by a compiled
    product, if that is faster. `inputs`: the type to compute in."""
    for child in module.modules():
        if isinstance(child, Linear):
            child.row_product = row_product_for(child.weight, inputs)
        elif isinstance(child, Int8Linear):
            child.row_product = row_product_for(child.get_buffer("levels"), inputs)


def row_product_for(weight: Tensor, inputs: torch.dtype) -> RowProduct | None:
    is_large = weight.device.type == "cpu" and weight.numel() >= LEAST_WEIGHTS
    return row_product(weight.dtype, inputs) if is_large else None


def chunks(positions: int, tokens: int, device: torch.device) -> Iterator[slice]:
    """Slices of positions so short that `tokens` logits per position fit in memory."""
    size = max(1, CHUNK_LOGITS.get(device.type, CHUNK_LOGITS["cpu"]) // tokens)
    for start in range(0, positions, size):
        yield slice(start, min(start + size, positions))


def linear_cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, gain: float, shares_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the weighted sum of the positions' cross entropies, and the cross entropies.

    Positions are processed in chunks. The gradient of a chunk is computed together with its loss,
    while its logits are in memory. So nothing is recomputed, and a larger vocabulary needs no more
    memory for logits.

    Logits are `gain` times the product of `x` and `weight`. The weights of the sum are `shares_N`,
    by default 1 / N, which makes it a mean. Only the sum has a gradient.
    """
    if shares_N is None:
        shares_N = torch.full_like(targets_N, 1.0 / targets_N.numel(), dtype=torch.float32)
    result: tuple[Tensor, Tensor] = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        gain * x_ND, weight_VD, targets_N, shares_N
    )
    return result


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, shares_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Computes the gradients too; `backward` only scales them."""
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        weight = weight_VD.to(x_ND.dtype)
        grad_x = torch.empty_like(x_ND) if wants_x else None
        grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32) if wants_weight else None
        losses_N = torch.empty_like(shares_N)
        for rows in chunks(x_ND.size(0), weight.size(0), x_ND.device):
            x, targets, shares = x_ND[rows], targets_N[rows, None], shares_N[rows, None]
            logits = (x @ weight.T).float()
            target_logits = logits.gather(1, targets)
            largest = logits.amax(dim=1, keepdim=True)
            slopes = logits.sub_(largest).exp_()  # in place: a chunk's memory is there once
            total = slopes.sum(dim=1, keepdim=True)
            losses_N[rows] = (total.log() + largest - target_logits).squeeze(1)
            if grad_x is None and grad_weight is None:
                continue
            slopes.mul_(shares / total).scatter_add_(1, targets, -shares)
            slopes = slopes.to(x.dtype)
            if grad_x is not None:
                grad_x[rows] = slopes @ weight
            if grad_weight is not None:
                if x.dtype == grad_weight.dtype:
                    grad_weight.addmm_(slopes.T, x)
                else:
                    grad_weight += slopes.T @ x
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.mark_non_differentiable(losses_N)
        ctx.weight_dtype = weight_VD.dtype
        return (losses_N * shares_N).sum(), losses_N

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        by = slopes[0]
        if grad_x is not None:
            grad_x = grad_x * by.to(grad_x.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * by).to(ctx.weight_dtype)
        return grad_x, grad_weight, None, None
