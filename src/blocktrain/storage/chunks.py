"""The chunk store: bytes named by their BLAKE3 hash, on a disk or in S3-compatible storage.

    ab/cdef...                       a chunk, by the first two and the other 62 digits of its name
    partial/RANDOM                   a chunk that is being written (disk)
    quarantine/UPLOAD/NAME           uploaded by a presigned URL, not checked yet (S3)

A chunk gets its name once it is complete, so a store survives being killed at any instant. Every
read is checked against the name. All methods may be called from several threads at once. A store
does not know what its chunks mean or which are still needed: blobs and the ledger do.
"""

import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol, Self

from blake3 import blake3

from blocktrain.errors import CorruptFileError, NotFoundError, ProtocolError, RunError
from blocktrain.files import move, sync_folder
from blocktrain.protocol.messages import CHUNK_BYTES

Buffer = bytes | bytearray | memoryview

NAME = re.compile(r"[0-9a-f]{64}")


class ChunkStore(Protocol):
    has_presigned_urls: bool  # so that chunks need not pass through a coordinator

    def put(self, data: Buffer, name: str | None = None) -> str:
        """Store a chunk and return its name; pass `name` if the data is hashed already. A chunk
        that is there already counts as new."""
        ...

    def incoming(self) -> "IncomingChunk":
        """A chunk that arrives in parts."""
        ...

    def get(self, name: str) -> bytes:
        """A chunk, checked: NotFoundError, or CorruptFileError if it was altered."""
        ...

    def open(self, name: str) -> tuple[IO[bytes], int]:
        """A chunk as a file, and its size. Its memory does not grow with the chunk. The caller
        checks what it reads."""
        ...

    def has(self, names: Iterable[str]) -> set[str]:
        """Those of the names that are stored."""
        ...

    def delete(self, name: str) -> None:
        """Remove a chunk if it is there."""
        ...

    def stored(self) -> Iterator[tuple[str, float]]:
        """Every chunk's name and when it was last put, in seconds since 1970."""
        ...

    def get_url(self, name: str, seconds: int) -> str | None:
        """A URL from which anyone may GET the chunk for this long; None without presigned URLs."""
        ...

    def put_url(self, upload: str, name: str, seconds: int) -> str | None:
        """A URL to which anyone may PUT what `admit` will check; None without presigned URLs."""
        ...

    def admit(self, upload: str, name: str, size: int) -> bool:
        """Check what was put into quarantine, and make it a chunk if it has this name and size;
        whether the chunk is stored now."""
        ...

    def clear_quarantine(self, upload: str) -> None:
        """Remove what an upload left in quarantine."""
        ...

    def clear_leftovers(self, before: float) -> None:
        """Remove what was begun before this time (seconds since 1970) and never became a chunk."""
        ...


class IncomingChunk(Protocol):
    """Discarded when the `with` block ends, unless it was kept."""

    size: int

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...

    def write(self, part: Buffer) -> None: ...

    def keep(self, name: str | None = None) -> str:
        """Make it a chunk and return its name; a ProtocolError if that is not the given one."""
        ...


class LocalChunks:
    """Chunks as files. `sync`: a chunk that was put survives a power cut."""

    has_presigned_urls = False

    def __init__(self, folder: Path, sync: bool = True) -> None:
        self.folder, self._sync = folder, sync
        self._partial = folder / "partial"
        with self.os_errors():
            self._partial.mkdir(parents=True, exist_ok=True)

    def __str__(self) -> str:
        return str(self.folder)

    def put(self, data: Buffer, name: str | None = None) -> str:
        check_size(len(data))
        name = name or name_of(data)
        with self.os_errors():
            scratch = self.new_scratch()
            try:
                with scratch.open("xb", buffering=0) as file:
                    _write_all(file, data)
                    self.keep_file(file, scratch, name)
            finally:
                scratch.unlink(missing_ok=True)
        return name

    def incoming(self) -> "_IncomingFile":
        return _IncomingFile(self)

    def get(self, name: str) -> bytes:
        file, _ = self.open(name)
        with file, self.os_errors():
            return verified(file.read(), name, self)

    def open(self, name: str) -> tuple[IO[bytes], int]:
        with self.os_errors(name):
            file = self._path(name).open("rb", buffering=0)
            return file, os.fstat(file.fileno()).st_size

    def has(self, names: Iterable[str]) -> set[str]:
        return {name for name in names if self._path(name).is_file()}

    def delete(self, name: str) -> None:
        with self.os_errors():
            self._path(name).unlink(missing_ok=True)

    def stored(self) -> Iterator[tuple[str, float]]:
        with self.os_errors():
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
        with self.os_errors():
            for entry, changed in _files(self._partial):
                if changed < before:
                    entry.unlink(missing_ok=True)

    def new_scratch(self) -> Path:
        return self._partial / secrets.token_hex(16)

    def keep_file(self, file: IO[bytes], scratch: Path, name: str) -> None:
        """Give a complete file its name, and close it."""
        path = self._path(name)
        if self._sync:
            os.fsync(file.fileno())
        file.close()
        if not path.parent.is_dir():
            path.parent.mkdir(exist_ok=True)
            if self._sync:
                sync_folder(self.folder)
        try:
            move(scratch, path, sync=self._sync)
        except PermissionError:
            if not path.is_file():  # Windows cannot replace a chunk that is being read
                raise

    def _path(self, name: str) -> Path:
        return self.folder / place_of(name)

    @contextmanager
    def os_errors(self, name: str | None = None) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if name and isinstance(error, FileNotFoundError):
                raise not_found(name, self) from None
            raise RunError(f"the chunk store {self}: {error.strerror}") from None


class _IncomingFile:
    """Hashed while it arrives."""

    def __init__(self, store: LocalChunks) -> None:
        self.size = 0
        self._store, self._hash = store, blake3()
        self._scratch = store.new_scratch()
        with store.os_errors():
            self._file = self._scratch.open("xb", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        self._scratch.unlink(missing_ok=True)

    def write(self, part: Buffer) -> None:
        check_size(self.size + len(part))
        self.size += len(part)
        self._hash.update(part)
        with self._store.os_errors():
            _write_all(self._file, part)

    def keep(self, name: str | None = None) -> str:
        name = checked_name(self._hash.hexdigest(), name)
        with self._store.os_errors():
            self._store.keep_file(self._file, self._scratch, name)
        return name


def name_of(data: Buffer) -> str:
    return blake3(data).hexdigest()


def place_of(name: str) -> str:
    """A chunk's path in its store."""
    if not NAME.fullmatch(name):
        raise ProtocolError(f"{name[:80]!r} is not the name of a chunk")
    return f"{name[:2]}/{name[2:]}"


def check_size(size: int) -> None:
    if size > CHUNK_BYTES:
        raise ProtocolError(f"a chunk has at most {CHUNK_BYTES} bytes, not {size}")


def checked_name(name: str, expected: str | None) -> str:
    if expected not in (None, name):
        raise ProtocolError(f"these bytes have the hash {name}, not {expected}; send them again")
    return name


def verified(data: bytes, name: str, store: object) -> bytes:
    if name_of(data) != name:
        raise altered(name, store)
    return data


def altered(name: str, store: object) -> CorruptFileError:
    return CorruptFileError(f"chunk {name} in {store} was altered: its bytes have another hash")


def not_found(name: str, store: object) -> NotFoundError:
    return NotFoundError(f"chunk {name} is not in {store}")


def _write_all(file: IO[bytes], part: Buffer) -> None:
    view = memoryview(part)
    while view:
        view = view[file.write(view) :]


def _files(folder: Path) -> Iterator[tuple[Path, float]]:
    """Files and when they were last changed, without those that are deleted meanwhile."""
    for entry in folder.iterdir():
        try:
            yield entry, entry.stat().st_mtime
        except FileNotFoundError:
            continue
