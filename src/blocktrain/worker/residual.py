"""What the encoded updates of a block still owe, on disk between leases.

A lease's new residual counts once its update was accepted; until then it waits under the lease's
name, if need be for the next process, which asks what became of it. Where nobody knows whether it
was, neither the old one nor the new one counts: what is told twice does harm, what is never told is
learned again. A cache like the moments: what cannot be read
is as good as nothing owed, and the disk is not waited for. Both ways it passes through memory
frame by frame.
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
        """Add what is owed to these numbers, one array behind the other; nothing where what is kept
        is not of their count."""
        try:
            with FileIO(self._path) as file:
                if _is_of(file, sum(part.size for part in parts)):
                    for part in parts:
                        _add(part.reshape(-1), file)
        except (OSError, ProtocolError):
            return

    @contextmanager
    def proposal(self, lease: str, count: int) -> Iterator[Callable[[Floats], object]]:
        """Takes, in pieces, what will be owed if the lease's update is accepted. Of the leases
        before, no news is to be expected any more."""
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
    """Updates that were on their way when an earlier process ended. `was_accepted`: what became of
    a lease's; what it raises leaves the others, and this one, for the next time."""
    for waiting in sorted(folder.glob(f"{NAME}-*{ENDING}.*")):
        if waiting.suffix == UNFINISHED:  # of a process that was killed while writing it
            waiting.unlink()
            continue
        _settle(waiting, was_accepted(waiting.suffix.removeprefix(".")))


def _settle(waiting: Path, accepted: bool | None) -> None:
    owed = waiting.with_suffix("")
    if accepted and waiting.exists():
        waiting.replace(owed)
    elif accepted is None and waiting.exists():
        owed.unlink(missing_ok=True)
    waiting.unlink(missing_ok=True)


def _is_of(file: FileIO, count: int) -> bool:
    """Whether a file holds a residual of so many numbers; then it stands at the first."""
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
        owed = buffer[: here.size]
        file.readinto(owed.data)
        np.add(here, owed, out=here)
