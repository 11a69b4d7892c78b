"""The predecessors of a block of a cascade: frozen blocks that turn ids into features.

They are stored in bf16 or int8, without gradients, optimizer state, tails and heads. They are
snapshots: the trainer loads newer versions every `objective.refresh_every` steps, so features may
be some steps stale. A feature cache stores the features of all steps up to the next refresh, so
that the predecessors need no memory in between.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blocktrain.config import Config
from blocktrain.data.corpus import TrainingWindows, shifted
from blocktrain.errors import ConfigError, RunError
from blocktrain.storage.run_dir import RunDir
from blocktrain.storage.tensor_file import Tensors
from blocktrain.training.device import Compute
from blocktrain.training.estimation import feature_cache_shape
from blocktrain.training.frozen import Published
from blocktrain.training.stored_models import first_weights
from blocktrain.training.streamed import AnyPrefix, StreamedPrefix, placed_prefix

# The version of a block that has no version yet but starts from another run's weights.
WARM_START = -1
READ_ATTEMPTS = 5


class PublishedRun:
    """The versions that a run on this machine has saved."""

    def __init__(self, run: RunDir) -> None:
        self.run = run

    def version(self, block: int) -> int | None:
        store = self.run.block(block)
        if store.versions():
            return store.current().step
        return WARM_START if self.run.config.train.warm_start else None

    def weights(self, block: int) -> Tensors:
        if self.version(block) == WARM_START:
            return first_weights(self.run.config, block)
        for _ in range(READ_ATTEMPTS - 1):
            try:
                return self.run.block(block).load_weights()
            except RunError:  # the process that trains the block replaced the file: read again
                continue
        return self.run.block(block).load_weights()


Rows = npt.NDArray[np.int16]

FILE = "features.bin"


class FeatureCache:
    """The features of the steps up to the next refresh, in bf16."""

    def __init__(self, config: Config, path: Path | None) -> None:
        """The features are stored in the file `path`, or in RAM if `path` is None."""
        self._steps = range(0)
        self._path = path
        self._shape = feature_cache_shape(config)
        self._rows: Rows | None = None

    def __getitem__(self, step: int) -> Tensor:
        assert self._rows is not None
        return torch.tensor(self._rows[self._steps.index(step)]).view(torch.bfloat16)

    def fill(self, steps: range, compute: Callable[[int], Tensor]) -> None:
        """Compute and store the features of these steps, replacing all others."""
        if self._rows is None and self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._rows = np.memmap(self._path, np.int16, "w+", shape=self._shape)
        elif self._rows is None:
            self._rows = np.empty(self._shape, np.int16)
        for index, step in enumerate(steps):
            features = compute(step).to(torch.bfloat16).cpu()
            self._rows[index] = features.view(torch.int16).numpy()
        self._steps = steps

    def close(self) -> None:
        """Free the memory or remove the file."""
        self._steps = range(0)
        self._rows = None
        if self._path:
            self._path.unlink(missing_ok=True)


def new_cache(config: Config, folder: Path | None) -> FeatureCache | None:
    where = config.objective.feature_cache
    if where == "off":
        return None
    if where == "disk" and folder is None:
        raise ConfigError(
            "objective.feature_cache = disk needs a run's folder for its file; set it to ram"
        )
    return FeatureCache(config, folder / FILE if folder and where == "disk" else None)


class Predecessors:
    """Gives a block the features that it reads at each step."""

    def __init__(
        self,
        config: Config,
        block: int,
        compute: Compute,
        published: Published,
        windows: TrainingWindows,
        folder: Path | None,
        until: int,
    ) -> None:
        """`until`: the step at which they are no longer needed."""
        self.config, self.block, self.compute = config, block, compute
        self.published, self.windows, self._until = published, windows, until
        self.versions: list[int | None] = [None] * block
        self._next_refresh = 0
        self._prefix: AnyPrefix | None = None
        self._folder = folder
        self._cache = new_cache(config, folder)

    def features(self, step: int, context_BT: Tensor) -> Tensor:
        """The features that a step trains on. `context_BT`: its tokens, on the device."""
        if step >= self._next_refresh:
            self._refresh(step)
        if self._cache:
            return self._cache[step].to(self.compute.device)
        assert self._prefix
        return self._prefix.features(context_BT)

    def prefix(self) -> AnyPrefix:
        """The predecessors in memory. If a feature cache replaced them, load the newest ones."""
        return self._prefix or self._newest()

    def close(self) -> None:
        """Free the feature cache and the files of frozen blocks; the next step needs them anew."""
        self._next_refresh = 0
        if self._cache:
            self._cache.close()
        if isinstance(self._prefix, StreamedPrefix):
            self._prefix.close()
            self._prefix = None

    def _refresh(self, step: int) -> None:
        """Load newer versions; fill the cache with features of all steps up to the next refresh."""
        prefix = self._newest()
        self.versions = prefix.versions
        every = self.config.objective.refresh_every
        self._next_refresh = min(step + every, self._until)
        if self._cache:
            steps = range(step, self._next_refresh)
            self._cache.fill(steps, lambda step: prefix.features(self._context(step)))
        if not self._cache or isinstance(prefix, StreamedPrefix):
            self._prefix = prefix

    def _newest(self) -> AnyPrefix:
        prefix = self._prefix or placed_prefix(self.config, self.block, self.compute, self._folder)
        prefix.refresh(self.published)
        return prefix

    def _context(self, step: int) -> Tensor:
        context = torch.tensor(shifted(self.windows[step], self.config.vocabulary))
        return context.to(self.compute.device)
