"""What a block of a cascade reads at each of its steps: features of the blocks before it.

Every `refresh_every` steps it looks for newer versions of them. With a feature cache, the
features of all steps up to the next look are computed there and then, and the blocks before are
dropped from memory until they are needed again.
"""

from pathlib import Path

import torch
from torch import Tensor

from blocktrain.config import Config
from blocktrain.data.windows import TrainingWindows, shifted
from blocktrain.train.device import Compute
from blocktrain.train.feature_cache import new_cache
from blocktrain.train.prefix import Prefix, Published


class Predecessors:
    def __init__(
        self,
        config: Config,
        block: int,
        compute: Compute,
        published: Published,
        windows: TrainingWindows,
        folder: Path | None,
    ) -> None:
        self.config, self.block, self.compute = config, block, compute
        self.published, self.windows = published, windows
        self.versions: list[int | None] = [None] * block
        self._next_look = 0
        self._prefix: Prefix | None = None
        self._cache = new_cache(config, folder)

    def features(self, step: int) -> Tensor:
        """What the blocks before make of the context of one step."""
        if step >= self._next_look:
            self._look(step)
        if self._cache:
            return self._cache[step].to(self.compute.device)
        assert self._prefix
        return self._prefix.features(self._context(step))

    def look_now(self) -> None:
        """Take over newer versions before the next step, whenever the last look was."""
        self._next_look = 0

    def prefix(self) -> Prefix:
        """The blocks before as they are held, or where they are not, the newest."""
        return self._prefix or self._newest()

    def close(self) -> None:
        self._next_look = 0
        if self._cache:
            self._cache.close()

    def _look(self, step: int) -> None:
        """Take over newer versions; with a cache, use them now for every step until next time."""
        prefix = self._newest()
        self.versions = prefix.versions
        every = self.config.objective.refresh_every
        self._next_look = min(step + every, self.config.train.steps)
        if self._cache:
            steps = range(step, self._next_look)
            self._cache.fill(steps, lambda step: prefix.features(self._context(step)))
        else:
            self._prefix = prefix

    def _newest(self) -> Prefix:
        prefix = self._prefix or Prefix(self.config, self.block, self.compute)
        prefix.refresh(self.published)
        return prefix

    def _context(self, step: int) -> Tensor:
        return torch.tensor(shifted(self.windows[step])).to(self.compute.device)
