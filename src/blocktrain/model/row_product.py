"""The product of one row and a matrix on a CPU, compiled by torch.

One row is what decoding computes for a single request, and its time is that of reading the weights.
The matrix product of torch's libraries reads them at half the speed of memory or less, and 8-bit
weights only after widening them. This reads each weight once, in the type that it is stored in. It
is used where torch can compile, and where a trial is faster.

Shapes: N outputs, K inputs.
"""

import getpass
import logging
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from filelock import FileLock
from torch import Tensor

# x (K), weights (N x K), and their scale (N x 1) if they are in 8 bits.
RowProduct = Callable[[Tensor, Tensor, Tensor | None], Tensor]

LEAST_WEIGHTS = 1 << 20  # of a matrix; for smaller ones a call costs more than it saves
TRIAL_SHAPE, TRIALS = (8192, 2048), 3
log = logging.getLogger(__name__)


def _product(x_K: Tensor, weight_NK: Tensor, scale_N1: Tensor | None) -> Tensor:
    y_N = (weight_NK.float() * x_K.float()).sum(dim=-1)
    return (y_N if scale_N1 is None else y_N * scale_N1.view(-1)).to(x_K.dtype)


@lru_cache
def row_product(weights: torch.dtype, inputs: torch.dtype) -> RowProduct | None:
    """The product for weights and inputs of these types; None if torch's own is as fast, or if it
    cannot compile here. Compiling takes seconds, less if torch has compiled it before; so one of
    several processes compiles, and the others wait for it."""
    started = time.monotonic()
    try:
        compiled: RowProduct = torch.compile(_product, dynamic=True)
        with torch.inference_mode(), FileLock(lock_path()):
            faster = _is_faster(compiled, weights, inputs)
    except Exception as error:  # without a C++ compiler, among many other reasons
        log.info(
            "torch cannot compile a faster matrix product on this machine, and uses its own: %s",
            str(error).strip().partition("\n")[0],
        )
        return None
    seconds = time.monotonic() - started
    kind = str(weights).removeprefix("torch.")
    log.info(
        "matrix product for one row, %s: %s (%.1f s)",
        kind,
        "compiled for this processor" if faster else "torch's own is as fast",
        seconds,
    )
    return compiled if faster else None


def lock_path() -> Path:
    return Path(tempfile.gettempdir()) / f"blocktrain-compile-{getpass.getuser()}.lock"


def _is_faster(compiled: RowProduct, weights: torch.dtype, inputs: torch.dtype) -> bool:
    outputs, width = TRIAL_SHAPE
    x = torch.ones(width, dtype=inputs)
    small = torch.ones(64, width // 2, dtype=weights)  # another shape, so that all are dynamic
    scale = torch.ones(outputs, 1) if weights == torch.int8 else None
    compiled(x[: width // 2], small, None if scale is None else scale[:64])
    matrix = torch.ones(outputs, width, dtype=weights)

    def own() -> Tensor:
        return F.linear(x[None], matrix.to(inputs))

    return _seconds(lambda: compiled(x, matrix, scale)) < _seconds(own)


def _seconds(function: Callable[[], Tensor]) -> float:
    function()
    times = []
    for _ in range(TRIALS):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return min(times)
