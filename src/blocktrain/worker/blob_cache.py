"""The blobs on this machine's disk, and the places a download can go to.

A cache: nothing in it is worth waiting for the disk, and what is damaged counts as missing.
"""

import threading
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from blocktrain.errors import CorruptFileError, NotFoundError, ProtocolError
from blocktrain.protocol.messages import CHUNK_BYTES, Blob, Recipe
from blocktrain.storage.blobs import Blobs
from blocktrain.storage.chunks import LocalChunks, name_of


class BlobCache(Blobs):
    def __init__(self, folder: Path) -> None:
        super().__init__(LocalChunks(folder, sync=False))

    def has(self, blob: Blob) -> bool:
        """Whether all chunks of a blob are here."""
        if not self.chunks.has([blob.name]):
            return False
        try:
            needed = self.chunks_of(blob.name)
        except (CorruptFileError, ProtocolError):
            self.chunks.delete(blob.name)
            return False
        return self.chunks.has(needed) == needed

    def keep_only(self, blobs: Iterable[Blob]) -> None:
        """Delete all blobs from the cache except these."""
        needed: set[str] = set()
        for blob in blobs:
            if self.has(blob):
                needed |= self.chunks_of(blob.name)
        for name in [name for name, _ in self.chunks.stored() if name not in needed]:
            self.chunks.delete(name)


class Destination(Protocol):
    """Where the chunks of one download go."""

    def missing(self, recipe: Recipe) -> list[int]:
        """Indices of the chunks that have to be downloaded."""
        ...

    def buffer(self, index: int, size: int) -> memoryview:
        """Where a chunk is received."""
        ...

    def put(self, index: int, name: str, data: memoryview) -> None:
        """Take a chunk that has arrived in its buffer and was checked."""
        ...


class CacheDestination:
    def __init__(self, cache: BlobCache) -> None:
        self._chunks = cache.chunks

    def missing(self, recipe: Recipe) -> list[int]:
        cached = self._chunks.has(recipe.chunks)
        first = {name: index for index, name in reversed(list(enumerate(recipe.chunks)))}
        return sorted(index for name, index in first.items() if name not in cached)

    def buffer(self, index: int, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def put(self, index: int, name: str, data: memoryview) -> None:
        self._chunks.put(data, name)


class MemoryDestination:
    """All of a blob in memory; what is downloaded for it goes to the cache as well."""

    def __init__(self, cache: BlobCache, memory: memoryview) -> None:
        self._memory, self._chunks = memory, cache.chunks
        self._places: dict[str, list[int]] = {}  # a chunk may occur several times

    def missing(self, recipe: Recipe) -> list[int]:
        self._places = defaultdict(list)
        for index, name in enumerate(recipe.chunks):
            self._places[name].append(index)
        cached = self._chunks.has(self._places)
        return sorted(
            places[0]
            for name, places in self._places.items()
            if name not in cached or not self._load(name)
        )

    def buffer(self, index: int, size: int) -> memoryview:
        start = index * CHUNK_BYTES
        return self._memory[start : start + size]

    def put(self, index: int, name: str, data: memoryview) -> None:
        self._chunks.put(data, name)
        self._copy(name, data, self._places[name][1:])

    def _load(self, name: str) -> bool:
        """Copy a cached chunk to its places; False: it is damaged."""
        try:
            data = self._chunks.get(name)
        except (CorruptFileError, NotFoundError):
            self._chunks.delete(name)
            return False
        self._copy(name, memoryview(data), self._places[name])
        return True

    def _copy(self, name: str, data: memoryview, places: Iterable[int]) -> None:
        for place in places:
            buffer = self.buffer(place, CHUNK_BYTES)
            if len(buffer) != len(data):
                raise ProtocolError(f"chunk {name} has {len(data)} bytes, not {len(buffer)}")
            buffer[:] = data


class FileDestination:
    """A file that fills up in any order. It is its own record of what has arrived."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self._file = path.open("r+b")
        self._lock = threading.Lock()

    def __enter__(self) -> "FileDestination":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def missing(self, recipe: Recipe) -> list[int]:
        self._file.truncate(recipe.size)
        self._file.seek(0)
        return [
            index
            for index, name in enumerate(recipe.chunks)
            if name_of(self._file.read(CHUNK_BYTES)) != name
        ]

    def buffer(self, index: int, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def put(self, index: int, name: str, data: memoryview) -> None:
        with self._lock:
            self._file.seek(index * CHUNK_BYTES)
            self._file.write(data)
