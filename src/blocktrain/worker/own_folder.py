"""A worker's folder, which is its alone while it works: two would drop each other's chunks."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from blocktrain.errors import RunError
from blocktrain.storage.blobs import Blobs


@contextmanager
def alone_in(folder: Path, cache: Blobs) -> Iterator[None]:
    """Hold the folder, without what a worker that was killed in it has left half written."""
    try:
        held = filelock.FileLock(folder / ".lock", timeout=0).acquire()
    except filelock.Timeout:
        raise RunError(f"another worker works in {folder}; name another folder") from None
    with held:
        cache.chunks.clear_leftovers(math.inf)
        yield
