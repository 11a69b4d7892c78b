"""Files that are written completely or not at all, and files with a hash."""

import hashlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from blocktrain.errors import CorruptFileError, RunError

RESTORE = "restore it from a copy, or train again in another folder"
UNFINISHED = ".partial"  # suffix of files that are still being written


@contextmanager
def errors_naming(path: Path) -> Iterator[None]:
    """Add the path to errors that have none, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextmanager
def atomic_write(path: Path, *, sync: bool = True, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Write a new file that replaces `path` when the `with` block ends. An error leaves `path` as
    it was.

    `sync`: once the block has ended, the file survives a power failure. `mode`: its permissions
    before the umask, in force from the first byte on.
    """
    scratch = path.with_name(f"{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        with (
            errors_naming(path),
            open(scratch, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file,
        ):
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        move(scratch, path, sync=sync)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def write_bytes(path: Path, data: bytes, *, sync: bool = True, mode: int = 0o666) -> None:
    with atomic_write(path, sync=sync, mode=mode) as file:
        file.write(data)


def move(scratch: Path, path: Path, *, sync: bool) -> None:
    """Rename a file, replacing any file at `path`; with `sync`, this survives a power failure."""
    os.replace(scratch, path)
    if sync:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    if os.name == "nt":  # Windows cannot open a folder, and NTFS journals renames
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class StoredFile:
    name: str
    sha256: str
    size: int


def store(
    path: Path,
    pieces: Iterable[bytes | memoryview],
    on_written: Callable[[int], None] = lambda count: None,
) -> StoredFile:
    """Write a file, and compute its hash meanwhile. `on_written` gets the size of every piece."""
    digest, size = hashlib.sha256(), 0
    with atomic_write(path) as out:
        for piece in pieces:
            out.write(piece)
            digest.update(piece)
            size += len(piece)
            on_written(len(piece))
    return StoredFile(path.name, digest.hexdigest(), size)


def check_stored(path: Path, stored: StoredFile) -> None:
    """Raise RunError unless a file has the size and hash that a manifest says."""
    try:
        digest, size = file_sha256(path), path.stat().st_size
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}; {RESTORE}") from None
    if size != stored.size:
        raise CorruptFileError(
            f"{path} has {size} bytes, but its manifest says {stored.size}; {RESTORE}"
        )
    if digest != stored.sha256:
        raise CorruptFileError(f"{path} was altered: its hash is not the manifest's; {RESTORE}")
