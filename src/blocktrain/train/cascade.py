"""The frozen blocks before a block of a cascade: ids in, features out, forward only.

They are stored in bf16 or int8, without gradients, optimizer state, tails and heads. They are
snapshots: every so many steps the trainer looks for newer versions, and until then the block trains
on features that are some steps stale. A feature cache computes them ahead, so that the blocks
before leave memory.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from blocktrain.config import Config
from blocktrain.data.windows import TrainingWindows, shifted
from blocktrain.errors import ConfigError, RunError
from blocktrain.model.causal import Trunk
from blocktrain.model.int8 import Int8Linear, in_8_bits
from blocktrain.model.stack import initial_block
from blocktrain.storage.run_dir import RunDir
from blocktrain.storage.tensor_file import Tensors
from blocktrain.train.device import Compute


class Published(Protocol):
    """A source of the newest version of every block."""

    def version(self, block: int) -> int | None:
        """The step of the newest version; None if there is only the seed's untrained block."""
        ...

    def weights(self, block: int) -> Mapping[str, Tensor]: ...


class Prefix(nn.Module):
    """The trunks of blocks 0 to count - 1; untrained until they are refreshed."""

    def __init__(self, config: Config, count: int, compute: Compute) -> None:
        super().__init__()
        self.trunks = nn.ModuleList(_frozen_trunk(config, block, compute) for block in range(count))
        self.versions: list[int | None] = [None] * count
        self._compute, self._compiles = compute, config.train.compile

    def refresh(self, published: Published) -> None:
        """Load the weights of blocks that have a newer version."""
        for block, trunk in enumerate(self.trunks):
            version = published.version(block)
            if version != self.versions[block]:
                take_weights(cast("Trunk", trunk), published.weights(block))
                self.versions[block] = version

    def forward(self, context_BT: Tensor) -> Tensor:
        x = context_BT
        for trunk in self.trunks:
            x = cast("Trunk", trunk).features(x)
        return x

    @torch.no_grad()
    def features(self, context_BT: Tensor) -> Tensor:
        forward = self._compute.compiled(self) if self._compiles else self
        features: Tensor = forward(context_BT)
        return features


@torch.no_grad()
def take_weights(trunk: Trunk, weights: Mapping[str, Tensor]) -> None:
    """Copy the weights that the trunk needs of a block, in the trunk's number type."""
    for name, parameter in trunk.named_parameters():
        parameter.copy_(weights[name])
    for name, module in trunk.named_modules():
        if isinstance(module, Int8Linear):
            module.take(weights[f"{name}.weight"])


def _frozen_trunk(config: Config, block: int, compute: Compute) -> Trunk:
    start = initial_block(config, block)
    trunk = Trunk(config, block)
    if config.objective.frozen == "int8":
        in_8_bits(trunk)
    trunk.requires_grad_(False)
    take_weights(trunk, dict(start.named_parameters()))
    trunk.compute_dtype = compute.dtype
    trunk.eval()
    return _rounded(trunk).to(compute.device)


def _rounded(trunk: Trunk) -> Trunk:
    """Round parameters to bf16; scales and rotary tables stay exact."""
    for parameter in trunk.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return trunk


WARM_START = -1  # the version of a block that has none of its own but starts from another run's
READ_ATTEMPTS = 5


class PublishedRun:
    """The versions of blocks that a run on this machine has saved."""

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
        """Read again if a process that trains the block replaced the file after it was chosen."""
        for _ in range(READ_ATTEMPTS - 1):
            try:
                return self.run.block(block).load_weights()
            except RunError:
                continue
        return self.run.block(block).load_weights()


def _tensors(weights: Tensors) -> Mapping[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in weights.items()}


Rows = npt.NDArray[np.int16]

BYTES_PER_NUMBER = 2
FILE = "features.bin"


def cache_bytes(config: Config) -> int:
    """Bytes of one worker's cache."""
    objective = config.objective
    reads = config.kind.reads_predecessors and config.block_count > 1
    if not reads or objective.feature_cache == "off":
        return 0
    return _steps(config) * BYTES_PER_NUMBER * int(np.prod(_shape(config)))


class FeatureCache:
    """The features of the steps up to the next refresh, in bf16."""

    def __init__(self, config: Config, path: Path | None) -> None:
        """In the file at `path`, or in RAM if that is None."""
        self._steps = range(0)
        self._path = path
        self._shape = (_steps(config), *_shape(config))
        self._rows: Rows | None = None

    def __getitem__(self, step: int) -> Tensor:
        assert self._rows is not None
        row = torch.tensor(self._rows[self._steps.index(step)])
        return row.view(torch.bfloat16)

    def fill(self, steps: range, compute: Callable[[int], Tensor]) -> None:
        """Compute and store the features of these steps, in place of all others."""
        if self._rows is None:
            self._rows = self._new_rows()
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
        raise ConfigError(
            "objective.feature_cache = disk needs a run directory for its file; use ram instead"
        )
    return FeatureCache(config, folder / FILE if folder and where == "disk" else None)


def _steps(config: Config) -> int:
    return min(config.objective.refresh_every, config.train.steps)


def _shape(config: Config) -> tuple[int, int, int]:
    return config.train.batch, config.model.window, config.model.width


class Predecessors:
    """What a block reads at each step: features of the blocks before it."""

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

    def features(self, step: int, context_BT: Tensor) -> Tensor:
        """The features of a step's context, which is on the device already."""
        if step >= self._next_look:
            self._look(step)
        if self._cache:
            return self._cache[step].to(self.compute.device)
        assert self._prefix
        return self._prefix.features(context_BT)

    def look_now(self) -> None:
        """Look for newer versions at the next step, even if that is not due yet."""
        self._next_look = 0

    def prefix(self) -> Prefix:
        """The blocks before as they were last loaded; the newest if a cache replaced them."""
        return self._prefix or self._newest()

    def close(self) -> None:
        """Free a feature cache; the next step looks for newer versions again."""
        self._next_look = 0
        if self._cache:
            self._cache.close()

    def _look(self, step: int) -> None:
        """Load newer versions; fill a cache with the features of all steps up to the next look."""
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
        return torch.tensor(shifted(self.windows[step], self.config.vocabulary)).to(
            self.compute.device
        )
