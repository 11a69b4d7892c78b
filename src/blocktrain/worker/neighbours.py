"""The workers of one user on one machine, which share its cores.

Each worker locks a file of its own in a folder that they share, so that the others can count it.
The system releases the lock of a worker that was killed.
"""

import getpass
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock

MOST_WORKERS = 256
# A machine with this many cores keeps one for other programs.
SPARE_FROM = 4


class Neighbours:
    def __init__(self, folder: Path, own: Path) -> None:
        self._folder, self._own = folder, own

    def count(self) -> int:
        """The workers that run now, this one included."""
        others = (file for file in self._folder.glob("*.lock") if file != self._own)
        return 1 + sum(map(_is_locked, others))

    def threads(self, cores: int) -> int:
        """How many threads this worker should use."""
        return max(1, (cores - (cores >= SPARE_FROM)) // self.count())


@contextmanager
def neighbours(folder: Path | None = None) -> Iterator[Neighbours]:
    """Be counted among the user's workers until the context ends."""
    folder = folder or _user_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for number in range(MOST_WORKERS):
        own = folder / f"{number}.lock"
        try:
            lock = filelock.FileLock(own, timeout=0).acquire()
        except filelock.Timeout:
            continue
        with lock:
            yield Neighbours(folder, own)
        return
    yield Neighbours(folder, folder / "uncounted")


def _user_folder() -> Path:
    user = os.getuid() if hasattr(os, "getuid") else getpass.getuser()
    return Path(tempfile.gettempdir()) / f"blocktrain-workers-{user}"


def _is_locked(file: Path) -> bool:
    with suppress(filelock.Timeout), filelock.FileLock(file, timeout=0):
        return False
    return True
