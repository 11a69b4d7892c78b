"""The chunks that were stored last, in memory that is used again and again.

An update is read when it is merged, and a version is fetched by its workers, a moment after they
were stored. From here they need neither a disk nor the system's cache of files, whose memory would
have to be found and cleared for every one of them. The oldest chunk that nobody reads makes room
for the next. May be used by several threads. Knows nothing of files.
"""

import threading
from io import SEEK_SET, RawIOBase
from typing import Any

from blocktrain.protocol.messages import CHUNK_BYTES
from blocktrain.storage.memory import own_memory


class CacheSlot:
    """Room for one chunk; its memory begins where a page does."""

    def __init__(self) -> None:
        self.memory = memoryview(own_memory(CHUNK_BYTES))
        self.size = 0
        self.readers = 0


class ChunkCache:
    def __init__(self, places: int) -> None:
        self._lock = threading.Lock()
        self._not_made, self._places = places, places
        self._empty: list[CacheSlot] = []
        self._held: dict[str, CacheSlot] = {}  # the oldest first

    def suits(self, size: int) -> bool:
        """Whether a file of this size may be here as a whole, with others beside it."""
        return size <= self._places * CHUNK_BYTES // 2

    def empty_place(self) -> CacheSlot | None:
        """For a chunk that comes, until it is kept or given back. None: all are in use."""
        with self._lock:
            place = self._unused_place()
        if place:
            place.size = 0  # what was there before is not of this chunk
        return place

    def give_back(self, place: CacheSlot) -> None:
        with self._lock:
            self._empty.append(place)

    def keep(self, name: str, place: CacheSlot) -> None:
        """The place holds this chunk from now on."""
        with self._lock:
            if name in self._held:
                self._empty.append(place)
            else:
                self._held[name] = place

    def open(self, name: str) -> "CachedChunkFile | None":
        """The chunk to be read, if it is here."""
        with self._lock:
            place = self._held.get(name)
            if place is None:
                return None
            place.readers += 1
            return CachedChunkFile(self, name, place)

    def forget(self, name: str) -> None:
        with self._lock:
            place = self._held.pop(name, None)
            if place and not place.readers:
                self._empty.append(place)

    def close(self, name: str, place: CacheSlot) -> None:
        """Somebody has read it."""
        with self._lock:
            place.readers -= 1
            if not place.readers and self._held.get(name) is not place:
                self._empty.append(place)

    def _unused_place(self) -> CacheSlot | None:
        if self._empty:
            return self._empty.pop()
        if self._not_made:
            self._not_made -= 1
            return CacheSlot()
        oldest = next((name for name, place in self._held.items() if not place.readers), None)
        return self._held.pop(oldest) if oldest else None


class CachedChunkFile(RawIOBase):
    """A chunk that stays where it is until it is closed."""

    def __init__(self, shelf: ChunkCache, name: str, place: CacheSlot) -> None:
        self.size, self._at = place.size, 0
        self._shelf, self._name, self._place = shelf, name, place

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        assert whence == SEEK_SET, "chunks are read from a place on"
        self._at = min(offset, self.size)
        return self._at

    def read(self, size: int = -1) -> bytes:
        return bytes(self.view(self.size if size < 0 else size))

    def readinto(self, buffer: Any) -> int:
        part = self.view(len(buffer))
        buffer[: len(part)] = part
        return len(part)

    def view(self, length: int) -> memoryview:
        """The next bytes where they are: not to be looked at once it is closed."""
        start, self._at = self._at, min(self._at + length, self.size)
        return self._place.memory[start : self._at].toreadonly()

    def close(self) -> None:
        if not self.closed:
            self._shelf.close(self._name, self._place)
        super().close()
