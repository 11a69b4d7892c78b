"""Files that appear complete or not at all, and the hash of a file."""

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

UNFINISHED = ".partial"  # how the names of files end that are still being written


@contextmanager
def atomic_write(path: Path, *, sync: bool = True, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A new file that replaces `path` when the block ends; after an error `path` is as it was.

    `sync`: it survives a power cut as soon as the block has ended. `mode`: its permissions, before
    the umask; they hold from the first byte on.
    """
    scratch = path.with_name(f"{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        with open(scratch, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
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
    """Rename a file, replacing what has the name; with `sync` the name survives a power cut."""
    os.replace(scratch, path)
    if sync:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    if os.name == "nt":  # a folder cannot be opened there, and the file system logs renames
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
