"""The frozen blocks before a block in files, of which one at a time is mapped into memory.

The numbers are those that `frozen.Prefix` has in memory, so the features have the same bits.
"""

import shutil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from blocktrain.config import Config
from blocktrain.files import atomic_write
from blocktrain.model.block import Trunk
from blocktrain.model.stack import initial_block
from blocktrain.storage.tensor_file import decode, encode
from blocktrain.training.device import Compute
from blocktrain.training.frozen import Prefix, Published, empty_trunk, in_bf16, take_weights

FOLDER = "frozen"


class StreamedPrefix:
    """The trunks of blocks 0 to count - 1, each in a file; untrained until `refresh` is called."""

    def __init__(self, config: Config, count: int, compute: Compute, folder: Path) -> None:
        """The files are in a folder of their own in `folder`."""
        self._config, self._compute = config, compute
        self._folder = folder / FOLDER
        self._trunks = [_Features(empty_trunk(config, block, compute)) for block in range(count)]
        self.versions: list[int | None] = [None] * count
        shutil.rmtree(self._folder, ignore_errors=True)  # of a process that was killed
        self._folder.mkdir(parents=True)
        for block in range(count):
            self._write(block, None)

    def refresh(self, published: Published) -> None:
        """Replace the files of blocks that have a newer version."""
        for block, before in enumerate(self.versions):
            version = published.version(block)
            if version != before:
                self._write(block, published)
                self.versions[block] = version

    @torch.no_grad()
    def features(self, context_BT: Tensor) -> Tensor:
        x = context_BT
        for block, trunk in enumerate(self._trunks):
            x = functional_call(trunk, self._mapped(block), (x,))
        return x

    def close(self) -> None:
        """Delete the files."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, block: int, published: Published | None) -> None:
        """Store a block, of which only one is in memory at a time. `published`: None for its
        untrained weights."""
        trunk = in_bf16(empty_trunk(self._config, block, self._compute).to_empty(device="cpu"))
        if published:
            take_weights(trunk, published.weights(block))
        else:
            take_weights(trunk, dict(initial_block(self._config, block).named_parameters()))
        state = _Features(trunk).state_dict()
        with atomic_write(self._path(block), sync=False) as file:
            for piece in encode({name: _to_numpy(tensor) for name, tensor in state.items()}):
                file.write(piece)

    def _mapped(self, block: int) -> dict[str, Tensor]:
        """A block's weights as views of its file; on a GPU they are copies."""
        # In mode c the arrays are writable, as torch demands. Nothing writes to them.
        arrays = decode(np.memmap(self._path(block), np.uint8, "c").data)
        return {name: _to_torch(a).to(self._compute.device) for name, a in arrays.items()}

    def _path(self, block: int) -> Path:
        return self._folder / f"block-{block}.safetensors"


AnyPrefix = Prefix | StreamedPrefix


class _Features(nn.Module):
    def __init__(self, trunk: Trunk) -> None:
        super().__init__()
        self.trunk = trunk

    def forward(self, inputs: Tensor) -> Tensor:
        return self.trunk.features(inputs)


def _to_numpy(tensor: Tensor) -> np.ndarray:
    """An array of the same bytes; numpy lacks bfloat16."""
    is_bf16 = tensor.dtype == torch.bfloat16
    found: np.ndarray = (tensor.view(torch.int16) if is_bf16 else tensor).cpu().numpy()
    return found


def _to_torch(array: np.ndarray) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor
