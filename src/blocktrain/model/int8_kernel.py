"""A Triton kernel for a linear map with weights in 8 bits: it reads each weight once, as a byte.

Shapes: M rows of x, N outputs, K inputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

OUTPUTS = 64  # per program; the smallest tile of Hopper's tensor cores


@triton.jit(do_not_specialize=["rows"])
def _linear(  # type: ignore[no-untyped-def]
    x_ptr, levels_ptr, scale_ptr, y_ptr, rows, outputs, eighths,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Passed in eighths: the compiler then knows a multiple of 8 and loads several bytes at a time.
    inputs = eighths * 8
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    levels_at = levels_ptr + n.to(tl.int64)[:, None] * inputs + k[None, :]
    x_at = x_ptr + m.to(tl.int64)[None, :] * inputs + k[:, None]
    total = tl.zeros((BN, BM), dtype=tl.float32)
    for start in range(0, inputs, BK):
        inside = start + k < inputs
        levels = tl.load(levels_at, mask=(n < outputs)[:, None] & inside[None, :], other=0)
        x = tl.load(x_at, mask=inside[:, None] & (m < rows)[None, :], other=0.0)
        total = tl.dot(levels.to(x.dtype), x, total, input_precision=PRECISION)
        levels_at += BK
        x_at += BK
    scale = tl.load(scale_ptr + n, mask=n < outputs, other=0.0)
    y_at = y_ptr + m.to(tl.int64)[None, :] * outputs + n[:, None]
    y = (total * scale[:, None]).to(y_ptr.dtype.element_ty)
    tl.store(y_at, y, mask=(n < outputs)[:, None] & (m < rows)[None, :])


def tiles(rows: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Rows and inputs of a tile, and the number of pipeline stages. They fill the shared memory."""
    tile = next(size for size in (16, 32, 64, 128) if size >= min(rows, 128))
    inputs = 256 if tile == 16 else 128 if tile < 128 else 64
    if dtype == torch.float32:
        inputs //= 2
    return tile, inputs, 4


def linear(x_MK: Tensor, levels_NK: Tensor, scale_N: Tensor) -> Tensor:
    """The product of x and the transposed weights, which are levels times scale. The arguments must
    be contiguous, and K a multiple of 8."""
    rows, inputs = x_MK.shape
    outputs = levels_NK.size(0)
    y_MN = x_MK.new_empty(rows, outputs)
    tile, depth, stages = tiles(rows, x_MK.dtype)
    grid = (triton.cdiv(outputs, OUTPUTS), triton.cdiv(rows, tile))
    with torch.cuda.device(x_MK.device):
        _linear[grid](
            x_MK, levels_NK, scale_N, y_MN, rows, outputs, inputs // 8,
            BM=tile, BN=OUTPUTS, BK=depth, PRECISION="ieee", num_warps=4, num_stages=stages,
        )  # fmt: skip
    return y_MN
