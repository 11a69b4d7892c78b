"""The residual of a block on disk: what the encoded updates have left out so far.

A lease's new residual counts once its update is accepted. Until then it waits under the lease's
name, if need be for the next process, which asks the coordinator what became of the update. If
that is unknown, both the old and the new residual are dropped: sending something twice does harm,
and what is never sent is learned again. A cache: an unreadable residual counts as none. It passes
through memory in pieces.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import numpy as np

from blocktrain.errors import ProtocolError
from blocktrain.files import UNFINISHED, atomic_write
from blocktrain.numerics.quantization import Floats
from blocktrain.storage.tensor_file import header_bytes, parse_header

NAME, ENDING = "residual", ".safetensors"
PIECE = 1 << 16  # numbers at a time


class ResidualFile:
    def __init__(self, folder: Path, block: int) -> None:
        self._path = folder / f"{NAME}-{block}{ENDING}"

    def add_to(self, parts: Sequence[Floats]) -> None:
        """Add the residual to these arrays in order; nothing if it has another size."""
        try:
            with FileIO(self._path) as file:
                if _has_count(file, sum(part.size for part in parts)):
                    for part in parts:
                        _add(part.reshape(-1), file)
        except (OSError, ProtocolError):
            return

    @contextmanager
    def proposal(self, lease: str, count: int) -> Iterator[Callable[[Floats], object]]:
        """Takes, in pieces, the residual that counts if the lease's update is accepted. Proposals
        of earlier leases are deleted: their updates are settled."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        for stale in self._path.parent.glob(f"{self._path.name}.*"):
            stale.unlink(missing_ok=True)
        with atomic_write(self._waiting(lease), sync=False) as file:
            file.write(header_bytes([(NAME, "F32", (count,))]))
            yield lambda piece: file.write(piece.astype("<f4", copy=False).data)

    def settle(self, lease: str, *, accepted: bool | None) -> None:
        """None: whether the update was accepted is not known."""
        _settle(self._waiting(lease), accepted)

    def _waiting(self, lease: str) -> Path:
        return self._path.with_name(f"{self._path.name}.{lease}")


def settle_leftover_residuals(folder: Path, was_accepted: Callable[[str], bool | None]) -> None:
    """Settle the updates that were being sent when an earlier process ended. `was_accepted`: what
    became of a lease's update; if it raises, this one and the others stay for the next time."""
    for waiting in sorted(folder.glob(f"{NAME}-*{ENDING}.*")):
        if waiting.suffix == UNFINISHED:  # of a process that was killed while writing it
            waiting.unlink()
            continue
        _settle(waiting, was_accepted(waiting.suffix.removeprefix(".")))


def _settle(waiting: Path, accepted: bool | None) -> None:
    residual = waiting.with_suffix("")
    if accepted and waiting.exists():
        waiting.replace(residual)
    elif accepted is None and waiting.exists():
        residual.unlink(missing_ok=True)
    waiting.unlink(missing_ok=True)


def _has_count(file: FileIO, count: int) -> bool:
    """Whether a file holds a residual of this many numbers; then its position is at the first."""
    size = file.seek(0, 2)

    def read(offset: int, length: int) -> bytes:
        file.seek(offset)
        return file.read(length)

    specs = parse_header(read, size)
    if [(spec.name, spec.dtype, spec.shape) for spec in specs] != [(NAME, "F32", (count,))]:
        return False
    file.seek(specs[0].start)
    return True


def _add(numbers: Floats, file: FileIO) -> None:
    buffer = np.empty(min(PIECE, numbers.size), "<f4")
    for start in range(0, numbers.size, PIECE):
        here = numbers[start : start + PIECE]
        residual = buffer[: here.size]
        file.readinto(residual.data)
        np.add(here, residual, out=here)
