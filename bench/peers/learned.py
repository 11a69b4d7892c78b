"""What both workers of a round have learned: noise that differs for every worker and round.

Repeated numbers would favour a system that sends equal pieces once, or compresses. Needs numpy
only, since it is imported in every system's own virtual environment.
"""

from collections.abc import Sequence

import numpy as np

SCALE = np.float32(2e-5)  # the coordinator refuses what one step cannot have moved
LOOKED_AT = 1000  # numbers whose mean is checked
WORKERS = (0, 1)


def learned(worker: int, number: int, size: int) -> np.ndarray:
    """The same in every process, so that each knows what the mean has to be."""
    return SCALE * np.random.default_rng([worker, number]).standard_normal(size, np.float32)


def mean_of(ends: Sequence[np.ndarray]) -> np.ndarray:
    return np.mean([end[:LOOKED_AT] for end in ends], axis=0)


def check(there: np.ndarray, expected: np.ndarray) -> None:
    assert np.allclose(there[:LOOKED_AT], expected, atol=1e-6), "that is not the mean"
