"""The chunk store: bytes named by their BLAKE3 hash, on a disk or in S3-compatible storage.

    ab/cdef...                       a chunk, by the first two and the other 62 digits of its name
    partial/RANDOM                   a chunk that is being written (disk)
    spare/RANDOM                     a file to be written over (disk)
    quarantine/UPLOAD/NAME           what came through a presigned URL and nobody has checked (S3)

A chunk is written whole before it has its name, so a store survives being killed at any instant;
putting a chunk again changes nothing but its age. Every read is checked against the name. All
methods may be called from several threads at once. Knows nothing of what the chunks mean or who
still needs them: that is the business of blobs and of the ledger.
"""

import os
import re
import secrets
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BytesIO, FileIO
from pathlib import Path
from typing import Protocol, Self
from urllib.parse import urlsplit
from urllib.request import url2pathname

from blake3 import blake3

from blocktrain.errors import ConfigError, CorruptFileError, NotFoundError, ProtocolError, RunError
from blocktrain.protocol.messages import CHUNK_BYTES
from blocktrain.storage.shelf import CachedChunkFile, CacheSlot, ChunkCache

Buffer = bytes | bytearray | memoryview
Opened = FileIO | BytesIO | CachedChunkFile

NAME = re.compile(r"[0-9a-f]{64}")
COMPARED_BYTES = 1024 * 1024  # at a time
SECTOR_BYTES = 4096  # what is written past the system's cache is a multiple of this


class ChunkStore(Protocol):
    takes_from_anyone: bool  # by `put_url`, so that chunks need not come through a coordinator

    def put(self, data: Buffer, name: str | None = None) -> str:
        """Store a chunk, whole or not at all, and return its name; `name` where the caller has
        hashed it already."""
        ...

    def incoming(self, of: int | None = None) -> "Incoming":
        """A chunk that comes in parts. `of`: the size of the file that it is a part of, where that
        is known."""
        ...

    def get(self, name: str) -> bytes:
        """The chunk, checked. NotFoundError, or CorruptFileError where it was altered."""
        ...

    def open(self, name: str) -> tuple[Opened, int]:
        """The chunk to be read in parts, and its size. Unchecked, for those who check it
        themselves."""
        ...

    def has(self, names: Iterable[str]) -> set[str]:
        """Those of the names that are stored."""
        ...

    def delete(self, name: str) -> None:
        """Whether or not it is there."""
        ...

    def stored(self) -> Iterator[tuple[str, float]]:
        """Every chunk's name and when it was last put, in seconds since 1970."""
        ...

    def get_url(self, name: str, seconds: int) -> str | None:
        """Where anybody may GET the chunk for so long; None where the store has no such thing."""
        ...

    def put_url(self, upload: str, name: str, seconds: int) -> str | None:
        """Where anybody may PUT what will be checked by `admit`; None as above."""
        ...

    def admit(self, upload: str, name: str, size: int) -> bool:
        """Check what was put into quarantine and make it a chunk; whether it is one now.
        Anything else than these bytes of this size is removed."""
        ...

    def clear_quarantine(self, upload: str) -> None:
        """Remove what an upload left in quarantine."""
        ...

    def clear_leftovers(self, before: float) -> None:
        """Remove what was begun before this time (seconds since 1970) and became no chunk."""
        ...


class Incoming(Protocol):
    """Ends as a chunk if it was kept, and otherwise as nothing."""

    size: int

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...

    def write(self, part: Buffer) -> None: ...

    def keep(self, name: str | None = None) -> str:
        """Make it a chunk, and return its name; a ProtocolError where it is not the given one."""
        ...


def name_of(data: Buffer) -> str:
    return blake3(data).hexdigest()


def open_chunks(url: str, shelf: ChunkCache | None = None) -> ChunkStore:
    """The store at a path, a file:// URL, or s3://BUCKET/PREFIX?endpoint=URL&region=NAME. `shelf`:
    what a disk's newest chunks are held by."""
    scheme, separator, _ = url.partition("://")
    if not url:
        raise ConfigError("the chunk store needs a path or an s3:// address")
    if not separator:
        return LocalChunks(Path(url).expanduser(), shelf=shelf)
    if scheme == "file":
        return LocalChunks(_path_of_file_url(url), shelf=shelf)
    if scheme == "s3":
        from blocktrain.storage.s3_chunks import open_s3

        return open_s3(url)
    raise ConfigError(f"a chunk store is a path, file:// or s3://, not {scheme}://")


class LocalChunks:
    """Chunks as files. `sync`: a chunk that was put survives a power cut too. `spares`: so many
    files of chunks that were deleted are written over by those that come; only for who deletes
    nothing that is still being read. What is written to a new file has to find its memory first,
    which can take longer than all else that is done with it. `shelf`: chunks of files that suit it
    are held there and written past the system's cache; without one, only the part of a chunk that
    is at hand is in memory."""

    takes_from_anyone = False

    def __init__(
        self, folder: Path, sync: bool = True, spares: int = 0, shelf: ChunkCache | None = None
    ) -> None:
        self.folder = folder
        self._sync, self._shelf = sync, shelf or ChunkCache(0)
        self._partial, self._spare = folder / "partial", folder / "spare"
        with self._translated():
            for needed in (self._partial, self._spare):
                needed.mkdir(parents=True, exist_ok=True)
            self._spares: deque[Path] = deque(self._spare.iterdir())
        self._most_spares = spares

    def __str__(self) -> str:
        return str(self.folder)

    def put(self, data: Buffer, name: str | None = None) -> str:
        name = checked_name_of(data, name)
        with self._translated():
            if not _refreshed(self._path(name), data):
                self._write(name, data)
        return name

    def incoming(self, of: int | None = None) -> "_IncomingFile | _IncomingInMemory":
        if of is not None and self._shelf.suits(of) and (place := self._shelf.empty_place()):
            return _IncomingInMemory(self, self._shelf, place)
        with self._translated():
            return _IncomingFile(self)

    def get(self, name: str) -> bytes:
        file, _ = self.open(name)
        with file, self._translated():
            return verified(file.read(), name, self)

    def open(self, name: str) -> tuple[Opened, int]:
        if held := self._shelf.open(name):
            return held, held.size
        with self._translated(name):
            file = FileIO(self._path(name))
            return file, os.fstat(file.fileno()).st_size

    def has(self, names: Iterable[str]) -> set[str]:
        return {name for name in names if self._path(name).is_file()}

    def delete(self, name: str) -> None:
        path = self._path(name)
        self._shelf.forget(name)
        with self._translated():
            if len(self._spares) >= self._most_spares:
                path.unlink(missing_ok=True)
            elif path.is_file():
                self._spares.append(path.replace(self._spare / secrets.token_hex(16)))

    def stored(self) -> Iterator[tuple[str, float]]:
        with self._translated():
            for folder in self.folder.glob("[0-9a-f][0-9a-f]/"):
                for entry, changed in _files(folder):
                    if NAME.fullmatch(folder.name + entry.name):
                        yield folder.name + entry.name, changed

    def get_url(self, name: str, seconds: int) -> str | None:
        return None

    def put_url(self, upload: str, name: str, seconds: int) -> str | None:
        return None

    def admit(self, upload: str, name: str, size: int) -> bool:
        return name in self.has([name])

    def clear_quarantine(self, upload: str) -> None:
        return None

    def clear_leftovers(self, before: float) -> None:
        with self._translated():
            for entry, changed in _files(self._partial):
                if changed < before:
                    entry.unlink(missing_ok=True)

    def _write(self, name: str, data: Buffer) -> None:
        scratch, file = self._begun()
        try:
            with file:
                _write_all(file, data)
                self._take(file, scratch, name, len(data))
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise

    def _write_place(self, name: str, place: CacheSlot) -> None:
        whole = -(-place.size // SECTOR_BYTES) * SECTOR_BYTES
        place.memory[place.size : whole] = bytes(whole - place.size)
        scratch = self._scratch()
        with self._translated():
            try:
                with _opened_past_cache(scratch) as file:
                    _write_all(file, place.memory[:whole])
                    self._take(file, scratch, name, place.size)
            finally:
                scratch.unlink(missing_ok=True)

    def _scratch(self) -> Path:
        return self._partial / secrets.token_hex(16)

    def _begun(self) -> tuple[Path, FileIO]:
        """A file to be written from its start; it may be longer than what it gets."""
        scratch = self._scratch()
        with suppress(IndexError, FileNotFoundError):
            self._spares.pop().replace(scratch)
            return scratch, FileIO(scratch, "r+")
        return scratch, FileIO(scratch, "x")

    def _take(self, file: FileIO, scratch: Path, name: str, size: int) -> None:
        """Give a file that was written whole its name."""
        path = self._path(name)
        with self._translated():
            file.truncate(size)  # it may have been longer, or written in whole sectors
            if self._sync:
                os.fsync(file.fileno())
            file.close()
            self._make_folder(path.parent)
            try:
                scratch.replace(path)
            except PermissionError:
                # Windows refuses to replace a chunk that somebody reads: then it is there.
                if not path.is_file():
                    raise
                scratch.unlink()
            if self._sync:
                _sync_folder(path.parent)

    def _make_folder(self, folder: Path) -> None:
        if not folder.is_dir():
            folder.mkdir(exist_ok=True)
            if self._sync:
                _sync_folder(self.folder)

    def _path(self, name: str) -> Path:
        return self.folder / place_of(name)

    @contextmanager
    def _translated(self, wanted: str | None = None) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if wanted and isinstance(error, FileNotFoundError):
                raise not_found(wanted, self) from None
            raise RunError(f"the chunk store {self}: {error.strerror}") from None


class _IncomingFile:
    """Hashed as it comes."""

    def __init__(self, store: LocalChunks) -> None:
        self.size = 0
        self._store = store
        self._hash = blake3()
        self._scratch, self._file = store._begun()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        self._scratch.unlink(missing_ok=True)

    def write(self, part: Buffer) -> None:
        self.size += len(part)
        self._hash.update(part)
        with self._store._translated():
            _write_all(self._file, part)

    def keep(self, name: str | None = None) -> str:
        found = checked_incoming(self._hash.hexdigest(), name)
        self._store._take(self._file, self._scratch, found, self.size)
        return found


class _IncomingInMemory:
    """Hashed and written when it is whole, in the thread that keeps it: where it is received one
    thread moves the bytes of all. From then on it is held by a shelf."""

    def __init__(self, store: LocalChunks, shelf: ChunkCache, place: CacheSlot) -> None:
        self.size = 0
        self._store, self._shelf = store, shelf
        self._place: CacheSlot | None = place

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._place:
            self._shelf.give_back(self._place)
            self._place = None

    def write(self, part: Buffer) -> None:
        assert self._place, "a chunk that was kept is not written to"
        end = self.size + len(part)
        if end > CHUNK_BYTES:
            raise ProtocolError(f"a chunk has at most {CHUNK_BYTES} bytes, not {end}")
        self._place.memory[self.size : end] = part
        self.size = self._place.size = end

    def keep(self, name: str | None = None) -> str:
        assert self._place, "a chunk is kept once"
        found = checked_incoming(name_of(self._place.memory[: self.size]), name)
        self._store._write_place(found, self._place)
        self._shelf.keep(found, self._place)
        self._place = None
        return found


def at_hand(file: Opened, length: int) -> memoryview | None:
    """The next bytes of an open chunk if that takes no waiting for a disk: what was written or read
    a moment ago. None where it would, or where nobody can tell."""
    if not isinstance(file, FileIO):
        return memoryview(file.read(length))
    buffer, place = bytearray(length), file.tell()
    try:
        count = os.preadv(file.fileno(), [buffer], place, os.RWF_NOWAIT)
    except (AttributeError, OSError):
        return None
    file.seek(place + count)
    return memoryview(buffer)[:count]


def checked_incoming(found: str, wanted: str | None) -> str:
    if wanted not in (None, found):
        raise ProtocolError("these bytes do not have the hash they are sent as")
    return found


def _opened_past_cache(path: Path) -> FileIO:
    """A new file whose writing leaves nothing in the system's cache, where it can do that."""
    try:
        return FileIO(path, "x", opener=lambda name, flags: os.open(name, flags | os.O_DIRECT))
    except (AttributeError, OSError):
        return FileIO(path, "w")


def _write_all(file: FileIO, part: Buffer) -> None:
    view = memoryview(part)
    while view:
        view = view[file.write(view) :]


def checked_name_of(data: Buffer, known: str | None) -> str:
    if len(data) > CHUNK_BYTES:
        raise ProtocolError(f"a chunk has at most {CHUNK_BYTES} bytes, not {len(data)}")
    return known or name_of(data)


def verified(data: bytes, name: str, store: object) -> bytes:
    if name_of(data) != name:
        raise altered(name, store)
    return data


def altered(name: str, store: object) -> CorruptFileError:
    return CorruptFileError(f"chunk {name} in {store} was altered: its hash is another")


def not_found(name: str, store: object) -> NotFoundError:
    return NotFoundError(f"chunk {name} is not in {store}")


def place_of(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ProtocolError(f"{name[:80]!r} is not the name of a chunk")
    return f"{name[:2]}/{name[2:]}"


def _refreshed(path: Path, data: Buffer) -> bool:
    """Whether the file holds these bytes already; then it counts as written now."""
    try:
        if path.stat().st_size != len(data):
            return False
        with path.open("rb") as file:
            for start in range(0, len(data), COMPARED_BYTES):
                if file.read(COMPARED_BYTES) != data[start : start + COMPARED_BYTES]:
                    return False
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def _files(folder: Path) -> Iterator[tuple[Path, float]]:
    """Files and when they were last changed, without those that vanish meanwhile."""
    for entry in folder.iterdir():
        try:
            yield entry, entry.stat().st_mtime
        except FileNotFoundError:
            continue


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # where a folder cannot be opened, and a rename is journalled
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _path_of_file_url(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.strip("/"):
        raise ConfigError(f"{url} names no folder of this machine; write file:///PATH")
    return Path(url2pathname(parts.path))
