"""Features of the steps to come, computed ahead so that the blocks before can leave memory.

Kept as bf16 in RAM or in a file; one entry per step of the range that was computed last.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blocktrain.config import Config
from blocktrain.errors import ConfigError

Rows = npt.NDArray[np.int16]

BYTES_PER_NUMBER = 2
FILE = "features.bin"


def cache_bytes(config: Config) -> int:
    """What one worker's cache takes when it is full."""
    objective = config.objective
    if objective.kind != "cascade" or objective.feature_cache == "off" or config.units == 1:
        return 0
    return _steps(config) * BYTES_PER_NUMBER * int(np.prod(_shape(config)))


class FeatureCache:
    def __init__(self, config: Config, path: Path | None) -> None:
        """In the file at path, or in RAM where there is none."""
        self._steps = range(0)
        self._path = path
        self._shape = (_steps(config), *_shape(config))
        self._rows: Rows | None = None

    def __getitem__(self, step: int) -> Tensor:
        assert self._rows is not None
        row = torch.tensor(self._rows[self._steps.index(step)])
        return row.view(torch.bfloat16)

    def fill(self, steps: range, compute: Callable[[int], Tensor]) -> None:
        """Compute and keep the features of these steps, and of no others."""
        if self._rows is None:
            self._rows = self._new_rows()
        for index, step in enumerate(steps):
            features = compute(step).to(torch.bfloat16).cpu()
            self._rows[index] = features.view(torch.int16).numpy()
        self._steps = steps

    def close(self) -> None:
        """Give the memory, or the file, back."""
        self._steps = range(0)
        self._rows = None
        if self._path:
            self._path.unlink(missing_ok=True)

    def _new_rows(self) -> Rows:
        if self._path is None:
            return np.empty(self._shape, np.int16)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return np.memmap(self._path, np.int16, "w+", shape=self._shape)


def new_cache(config: Config, folder: Path | None) -> FeatureCache | None:
    where = config.objective.feature_cache
    if where == "off":
        return None
    if where == "disk" and folder is None:
        raise ConfigError("objective.feature_cache = disk needs a run directory to lie in")
    return FeatureCache(config, folder / FILE if folder and where == "disk" else None)


def _steps(config: Config) -> int:
    return min(config.objective.refresh_every, config.train.steps)


def _shape(config: Config) -> tuple[int, int, int]:
    return config.train.batch, config.model.window, config.model.width
