"""An optimizer's moments on disk, for a worker that comes back to a block.

A cache, nothing more: what cannot be read, or belongs to a block of another shape, is as good as
not there.
"""

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

    def load(self, weights: Tensors) -> Tensors | None:
        """The moments of these weights; None where there are none that fit."""
        try:
            found = tensors.decode(bytearray(self._path.read_bytes()))
        except (OSError, ProtocolError):
            return None
        owners = {moment: moment.rpartition(".")[0] for moment in found}
        if set(owners.values()) != set(weights):
            return None
        fits = all(  # a count of steps, or shaped as the weight it belongs to
            found[moment].shape in ((), weights[owner].shape) for moment, owner in owners.items()
        )
        return found if fits else None

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
