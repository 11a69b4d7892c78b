"""An optimizer's moments on disk, for a worker that comes back to a block.

A cache, nothing more: what cannot be read, or belongs to a block of another shape, is as good as
not there.
"""

from pathlib import Path

from blocktrain.errors import ProtocolError
from blocktrain.protocol import tensors
from blocktrain.storage.run_dir import Tensors, write_atomically

OF_EACH = ("exp_avg", "exp_avg_sq")  # shaped as the weight they belong to


class KeptMoments:
    def __init__(self, path: Path) -> None:
        self._path = path

    def save(self, moments: Tensors) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, b"".join(tensors.encode(moments)))

    def load(self, weights: Tensors) -> Tensors | None:
        """The moments of these weights; None where there are none that fit."""
        try:
            found = tensors.decode(bytearray(self._path.read_bytes()))
        except (OSError, ProtocolError):
            return None
        fits = all(
            f"{name}.{key}" in found and found[f"{name}.{key}"].shape == weight.shape
            for name, weight in weights.items()
            for key in OF_EACH
        )
        return found if fits and all(f"{name}.step" in found for name in weights) else None

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
