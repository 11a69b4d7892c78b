"""The newest versions of a run's blocks, as the blocks after them see them: from its directory."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from blocktrain.errors import RunError
from blocktrain.storage.run_dir import RunDir, Tensors

WARM_START = -1  # the version of a block that has none yet but does not start from nothing
READ_ATTEMPTS = 5


class PublishedRun:
    def __init__(self, run: RunDir) -> None:
        self.run = run

    def version(self, block: int) -> int | None:
        store = self.run.block(block)
        if store.versions():
            return store.current().step
        return WARM_START if self.run.config.train.warm_start else None

    def weights(self, block: int) -> Mapping[str, Tensor]:
        if self.version(block) == WARM_START:
            origin = RunDir.open(Path(self.run.config.train.warm_start))
            return _tensors(origin.block_weights(block))
        return _tensors(self._current(block))

    def _current(self, block: int) -> Tensors:
        """A process that trains the block may replace the file between our looking and reading."""
        for _ in range(READ_ATTEMPTS - 1):
            try:
                return self.run.block(block).load_weights()
            except RunError:
                continue
        return self.run.block(block).load_weights()


def _tensors(weights: Tensors) -> Mapping[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in weights.items()}
