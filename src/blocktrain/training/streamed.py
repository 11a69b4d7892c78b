"""The frozen blocks that a block trains with, in files, of which one at a time is in memory.

The numbers are those that `frozen` keeps in memory, so features and gradients have the same bits.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from blocktrain.config import Config
from blocktrain.errors import ConfigError
from blocktrain.files import atomic_write
from blocktrain.model.block import CausalBlock, LogitsAt, Trunk
from blocktrain.model.stack import initial_block
from blocktrain.storage.tensor_file import decode, encode
from blocktrain.training.device import Compute
from blocktrain.training.frozen import (
    Prefix,
    Published,
    Suffix,
    empty_trunk,
    has_successors,
    in_bf16,
    suffix_of,
    take_weights,
)


class StreamedBlocks:
    """Consecutive frozen blocks, each in a file; they can be used after `refresh`."""

    def __init__(
        self, config: Config, indices: Sequence[int], compute: Compute, folder: Path
    ) -> None:
        """`folder`: for the files; nothing else may be in it."""
        self.indices = indices
        self.versions: list[int | None] = [None] * len(indices)
        self._config, self._compute, self._folder = config, compute, folder
        shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed

    def refresh(self, published: Published) -> None:
        """Write the files of blocks that have a newer version, or none yet."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for place, block in enumerate(self.indices):
            version = published.version(block)
            if version != self.versions[place] or not self._path(block).exists():
                self._write(block, None if version is None else published)
                self.versions[place] = version

    def close(self) -> None:
        """Delete the files; `refresh` writes them again."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, block: int, published: Published | None) -> None:
        """Store a block. `published`: None for its untrained weights."""
        trunk = in_bf16(empty_trunk(self._config, block, self._compute).to_empty(device="cpu"))
        if published:
            take_weights(trunk, published.weights(block))
        else:
            take_weights(trunk, dict(initial_block(self._config, block).named_parameters()))
        arrays = {name: _to_numpy(tensor) for name, tensor in trunk.state_dict().items()}
        with atomic_write(self._path(block), sync=False) as file:
            for piece in encode(arrays):
                file.write(piece)

    def _opened(self, block: int) -> Trunk:
        """A block whose weights are views of its file; on a GPU they are copies. They leave memory
        with it."""
        # In mode c the arrays are writable, as torch demands. Nothing writes to them.
        arrays = decode(np.memmap(self._path(block), np.uint8, "c").data)
        trunk = empty_trunk(self._config, block, self._compute)
        device = self._compute.device
        weights = {name: _to_torch(array).to(device) for name, array in arrays.items()}
        trunk.load_state_dict(weights, assign=True)
        return trunk

    def _path(self, block: int) -> Path:
        return self._folder / f"block-{block}.safetensors"


class StreamedPrefix(StreamedBlocks):
    """The trunks of blocks 0 to count - 1, whose features a block reads."""

    def __init__(self, config: Config, count: int, compute: Compute, folder: Path) -> None:
        super().__init__(config, range(count), compute, folder / "frozen-before")

    @torch.no_grad()
    def features(self, context_BT: Tensor) -> Tensor:
        x = context_BT
        for block in self.indices:
            x = self._opened(block).features(x)
        return x


class StreamedSuffix(StreamedBlocks):
    """The blocks after a block, through which it predicts. Each is read again in the backward pass,
    and computed again for it."""

    def __init__(self, config: Config, block: int, compute: Compute, folder: Path) -> None:
        after = range(block + 1, config.block_count)
        super().__init__(config, after, compute, folder / "frozen-after")

    def __call__(self, features_BTD: Tensor, *targets: Tensor) -> Tensor:
        """Logits or, with targets, their cross entropy, as of a `CausalBlock`."""
        return _recomputed(self._last, self._between(features_BTD), *targets)

    def logits_of(self, features_BTD: Tensor) -> LogitsAt:
        last = cast("CausalBlock", self._opened(self.indices[-1]))
        return last.logits_of(last.features(self._between(features_BTD)))

    def _between(self, x: Tensor) -> Tensor:
        for block in self.indices[:-1]:
            x = _recomputed(lambda x, block=block: self._opened(block).features(x), x)
        return x

    def _last(self, x: Tensor, *targets: Tensor) -> Tensor:
        out: Tensor = self._opened(self.indices[-1])(x, *targets)
        return out


AnyPrefix = Prefix | StreamedPrefix
AnySuffix = Suffix | StreamedSuffix


def placed_prefix(config: Config, count: int, compute: Compute, folder: Path | None) -> AnyPrefix:
    """The blocks before a block where `train.frozen_in` says. `folder`: for their files."""
    if config.train.frozen_in == "memory":
        return Prefix(config, count, compute)
    return StreamedPrefix(config, count, compute, _existing(folder))


def placed_suffix(
    config: Config, block: int, compute: Compute, folder: Path | None
) -> AnySuffix | None:
    """The frozen blocks after a block, if it is trained inside the complete model."""
    if config.train.frozen_in == "memory" or not has_successors(config, block):
        return suffix_of(config, block, compute)
    return StreamedSuffix(config, block, compute, _existing(folder))


def _existing(folder: Path | None) -> Path:
    if folder is None:
        raise ConfigError(
            "train.frozen_in = disk needs a run's folder for its files; set it to memory"
        )
    return folder


def _recomputed(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return function(*inputs)
    out: Tensor = checkpoint(function, *inputs, use_reentrant=False)
    return out


def _to_numpy(tensor: Tensor) -> npt.NDArray[np.generic]:
    """An array of the same bytes; numpy lacks bfloat16."""
    is_bf16 = tensor.dtype == torch.bfloat16
    array: npt.NDArray[np.generic] = (tensor.view(torch.int16) if is_bf16 else tensor).numpy()
    return array


def _to_torch(array: npt.NDArray[np.generic]) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor
