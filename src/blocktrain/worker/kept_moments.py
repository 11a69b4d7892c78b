"""An optimizer's moments on disk, for a worker that comes back to a block.

A cache, nothing more: what cannot be read, or belongs to a block of another shape, is as good as
not there.
"""

from collections.abc import Mapping
from pathlib import Path

from blocktrain.errors import ProtocolError
from blocktrain.protocol import tensors
from blocktrain.storage.run_dir import Tensors, write_atomically


class KeptMoments:
    def __init__(self, path: Path) -> None:
        self._path = path

    def save(self, moments: Tensors) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, b"".join(tensors.encode(moments)))

    def load(self, shapes: Mapping[str, tuple[int, ...]]) -> Tensors | None:
        """Moments of exactly these shapes; None where there are none."""
        try:
            found = tensors.decode(bytearray(self._path.read_bytes()))
        except (OSError, ProtocolError):
            return None
        fits = {name: moment.shape for name, moment in found.items()} == shapes
        return found if fits else None

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
