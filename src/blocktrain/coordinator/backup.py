"""A coordinator's folder as one file, taken while it runs, and back again.

The ledger is copied as it stands at one instant; chunks never change, so they can be copied after
it. A ledger in PostgreSQL and chunks in a bucket are backed up with those systems' own tools.
"""

import sqlite3
import tarfile
import tempfile
from contextlib import closing
from pathlib import Path

from blocktrain.coordinator.home import INVITE_FILE, LEDGER_FILE
from blocktrain.errors import CorruptFileError, RunError
from blocktrain.storage.chunks import LocalChunks

CHUNKS = "chunks"


def back_up(folder: Path, out: Path) -> int:
    """Write the folder into one tar file; its size in bytes."""
    if not (folder / LEDGER_FILE).exists():
        raise RunError(f"{folder} holds no run; give the run's folder with --data-dir")
    if out.exists():
        raise RunError(f"{out} is there already")
    if not out.parent.is_dir():
        raise RunError(f"{out.parent} is no folder to write a backup into")
    partial = out.with_name(out.name + ".partial")
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        snapshot = Path(scratch) / LEDGER_FILE
        _copy_ledger(folder / LEDGER_FILE, snapshot)
        partial.touch(mode=0o600)  # the run's secrets are in it
        with tarfile.open(partial, "w") as archive:
            archive.add(snapshot, LEDGER_FILE)
            for name in (INVITE_FILE, CHUNKS):
                if (folder / name).exists():
                    archive.add(folder / name, name, filter=_finished)
    partial.replace(out)
    return out.stat().st_size


def restore(archive_path: Path, folder: Path) -> int:
    """Unpack a backup into a new folder, every chunk checked; how many chunks."""
    if folder.exists() and any(folder.iterdir()):
        raise RunError(f"{folder} is not empty")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with tarfile.open(archive_path) as archive:
            archive.extractall(folder, filter=_private)
    except (tarfile.TarError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise CorruptFileError(f"{archive_path} is not a whole backup: {reason}") from None
    if not (folder / LEDGER_FILE).exists():
        raise CorruptFileError(f"{archive_path} holds no ledger")
    chunks = LocalChunks(folder / CHUNKS)
    count = 0
    for name, _ in chunks.stored():
        chunks.get(name)
        count += 1
    return count


def _copy_ledger(source: Path, target: Path) -> None:
    with closing(sqlite3.connect(source)) as live, closing(sqlite3.connect(target)) as copy:
        live.backup(copy)


def _private(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo:
    """Whatever permissions were written down: for the operator alone."""
    safe = tarfile.data_filter(member, folder)
    return safe.replace(mode=0o700 if safe.isdir() else 0o600)


def _finished(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Chunks half written are nobody's yet."""
    half_written = member.name.startswith(f"{CHUNKS}/partial/")
    return None if half_written else member
