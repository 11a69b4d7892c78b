"""What the encoded updates of a block still owe, on disk between leases.

A lease's new residual counts once its update was accepted; until then it waits under the lease's
name. A cache like the moments: what cannot be read is as good as nothing owed.
"""

from pathlib import Path

import numpy as np

from blocktrain.core.codec_numbers import Floats
from blocktrain.errors import ProtocolError
from blocktrain.protocol import tensors
from blocktrain.storage.run_dir import write_atomically

NAME = "residual"


class KeptResidual:
    def __init__(self, folder: Path, block: int) -> None:
        self._path = folder / f"residual-{block}.safetensors"

    def load(self, count: int) -> Floats:
        """An array of the caller's own; zeros where nothing is kept."""
        try:
            found = tensors.decode(bytearray(self._path.read_bytes()))[NAME]
        except (OSError, ProtocolError, KeyError):
            return np.zeros(count, np.float32)
        fits = found.shape == (count,) and found.dtype == np.float32
        return found if fits else np.zeros(count, np.float32)

    def propose(self, lease: str, residual: Floats) -> None:
        """What will be owed if the lease's update is accepted. Of the leases before, no news is to
        be expected any more."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        for stale in self._path.parent.glob(f"{self._path.name}.*"):
            stale.unlink(missing_ok=True)
        write_atomically(self._waiting(lease), b"".join(tensors.encode({NAME: residual})))

    def settle(self, lease: str, *, accepted: bool) -> None:
        waiting = self._waiting(lease)
        if accepted and waiting.exists():
            waiting.replace(self._path)
        else:
            waiting.unlink(missing_ok=True)

    def _waiting(self, lease: str) -> Path:
        return self._path.with_name(f"{self._path.name}.{lease}")
