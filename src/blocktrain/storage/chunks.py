"""The chunk store: bytes named by their BLAKE3 hash, on a disk or in S3-compatible storage.

    ab/cdef...                       a chunk, by the first two and the other 62 digits of its name
    partial/RANDOM                   a chunk that is being written (disk)
    quarantine/UPLOAD/NAME           uploaded by a presigned URL, not checked yet (S3)

A chunk gets its name once it is complete, so a store survives being killed at any instant. Every
read is checked against the name. All methods may be called from several threads at once. What
chunks mean, and which are still needed, is up to blobs and the ledger.
"""

import os
import re
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Self

from blake3 import blake3

from blocktrain.errors import CorruptFileError, MissingChunkError, ProtocolError, RunError
from blocktrain.files import move, sync_folder
from blocktrain.protocol.messages import CHUNK_BYTES

Buffer = bytes | bytearray | memoryview

NAME = re.compile(r"[0-9a-f]{64}")


class ChunkStore(ABC):
    has_presigned_urls = False  # if True, workers can move chunks without the coordinator

    @abstractmethod
    def put(self, data: Buffer, name: str | None = None) -> str:
        """Store a chunk and return its name; ProtocolError if that differs from `name`. A chunk
        that exists already gets a new time in `stored`."""

    @abstractmethod
    def incoming(self) -> "IncomingChunk":
        """Begin a chunk that arrives in parts."""

    @abstractmethod
    def get(self, name: str) -> bytes:
        """Read and verify a chunk; NotFoundError if it is missing, CorruptFileError if altered."""

    @abstractmethod
    def open(self, name: str) -> tuple[IO[bytes], int]:
        """A chunk as an open file, and its size. The file is not read into memory. The caller must
        verify what it reads."""

    @abstractmethod
    def has(self, names: Iterable[str]) -> set[str]:
        """The names whose chunks are stored."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove a chunk if it is there."""

    @abstractmethod
    def stored(self) -> Iterator[tuple[str, float]]:
        """Every chunk's name and when it was last put, in seconds since 1970."""

    @abstractmethod
    def clear_leftovers(self, before: float) -> None:
        """Remove incomplete chunks that were begun before this time (seconds since 1970)."""

    def free_bytes(self) -> int | None:
        """How much may still be stored; None if the store has no limit that it knows."""
        return None

    def get_url(self, name: str, seconds: int) -> str | None:
        """A URL from which anyone may GET the chunk for this long; None without presigned URLs."""
        return None

    def put_url(self, upload: str, name: str, seconds: int) -> str | None:
        """A URL to which anyone may PUT a chunk that `admit` checks later; None without presigned
        URLs."""
        return None

    def admit(self, upload: str, name: str, size: int) -> bool:
        """Check an upload in quarantine, and store it if it has this name and size. Returns whether
        the chunk is stored now."""
        return name in self.has([name])

    def clear_quarantine(self, upload: str) -> None:  # noqa: B027  without URLs there is none
        """Remove an upload's files from quarantine."""


class IncomingChunk(ABC):
    """A chunk that arrives in parts. The end of the `with` block discards it unless `keep` ran."""

    size = 0

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, *exception: object) -> None: ...

    def write(self, part: Buffer) -> None:
        check_size(self.size + len(part))
        self.size += len(part)
        self._append(part)

    @abstractmethod
    def _append(self, part: Buffer) -> None: ...

    @abstractmethod
    def keep(self, name: str | None = None) -> str:
        """Store the chunk and return its name; ProtocolError if that differs from `name`."""


class LocalChunks(ChunkStore):
    """Chunks as files. `sync`: a stored chunk survives a power failure. `reserved`: bytes of the
    disk that are left to others, such as the ledger."""

    def __init__(self, folder: Path, sync: bool = True, reserved: int = 0) -> None:
        self.folder, self._sync, self._reserved = folder, sync, reserved
        self._partial = folder / "partial"
        with self.os_errors():
            self._partial.mkdir(parents=True, exist_ok=True)

    def __str__(self) -> str:
        return str(self.folder)

    def put(self, data: Buffer, name: str | None = None) -> str:
        with self.incoming() as chunk:
            chunk.write(data)
            return chunk.keep(name)

    def incoming(self) -> "_IncomingFile":
        return _IncomingFile(self, self._partial / secrets.token_hex(16))

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

    def clear_leftovers(self, before: float) -> None:
        with self.os_errors():
            for entry, changed in _files(self._partial):
                if changed < before:
                    entry.unlink(missing_ok=True)

    def free_bytes(self) -> int:
        with self.os_errors():
            return max(0, shutil.disk_usage(self.folder).free - self._reserved)

    def check_room(self, size: int) -> None:
        """RunError if so many bytes more would not leave what is reserved."""
        if self._reserved and self.free_bytes() < size:
            raise RunError(
                f"the disk of the chunk store {self} is full, but for {self._reserved >> 20} MiB"
                " that are reserved for other files; free space there"
            )

    def keep_file(self, file: IO[bytes], scratch: Path, name: str) -> None:
        """Close a complete file and give it its name."""
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
            raise RunError(
                f"the chunk store {self} failed: {error.strerror}; check its disk and permissions"
            ) from None


class _IncomingFile(IncomingChunk):
    """A file that is hashed while it arrives."""

    def __init__(self, store: LocalChunks, scratch: Path) -> None:
        self._store, self._scratch, self._hash = store, scratch, blake3()
        with store.os_errors():
            self._file = self._scratch.open("xb", buffering=0)

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        self._scratch.unlink(missing_ok=True)

    def _append(self, part: Buffer) -> None:
        self._store.check_room(len(part))
        self._hash.update(part)
        view = memoryview(part)
        with self._store.os_errors():
            while view:
                view = view[self._file.write(view) :]

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
        raise ProtocolError(f"{name[:80]!r} is not the name of a chunk, which has 64 hex digits")
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
    return CorruptFileError(
        f"chunk {name} in {store} was altered: its hash differs from its name;"
        " restore it from a backup"
    )


def not_found(name: str, store: object) -> MissingChunkError:
    return MissingChunkError(
        name,
        f"chunk {name} is not in {store}; restore it from a backup, or use the run's own store",
    )


def _files(folder: Path) -> Iterator[tuple[Path, float]]:
    """Files and their times of last change. Skips files that are deleted meanwhile."""
    for entry in folder.iterdir():
        try:
            yield entry, entry.stat().st_mtime
        except FileNotFoundError:
            continue
