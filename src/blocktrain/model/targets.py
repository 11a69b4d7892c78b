"""The frozen target table: one unit-norm row per byte, drawn from the run's seed, never trained.

Computed in float64 and rounded once, so that machines with different linear algebra libraries
arrive at the same float32 numbers.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from blocktrain.core.vocabulary import BYTES

TABLE_STREAM = 0x7AB1E  # keeps the table's randomness apart from every other use of the seed


@lru_cache(maxsize=4)
def target_table(seed: int, dimensions: int) -> Tensor:
    """BYTES x dimensions; orthonormal rows where the dimensions allow it."""
    draws = np.random.Generator(np.random.Philox(key=[seed, TABLE_STREAM]))
    rows = draws.standard_normal((BYTES, dimensions))
    if dimensions >= BYTES:
        q, r = np.linalg.qr(rows.T)
        rows = (q * np.sign(np.diag(r))).T  # the sign of a QR factor is the library's choice
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return torch.from_numpy(rows.astype(np.float32))
