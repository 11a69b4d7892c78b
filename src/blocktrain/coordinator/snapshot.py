"""A coordinator's folder as one file, taken while it runs, and back again.

The ledger is copied as it stands at one instant, and the chunks after it: they never change, but
those that nobody needs any more go at any moment. A ledger in PostgreSQL and chunks in a bucket are
backed up with those systems' own tools.
"""

import shutil
import sqlite3
import tarfile
import tempfile
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import BinaryIO

from blocktrain.coordinator.collector import named_blobs
from blocktrain.coordinator.folder import INVITE_FILE, LEDGER_FILE
from blocktrain.coordinator.run import open_run
from blocktrain.errors import CorruptFileError, NotFoundError, RunError
from blocktrain.files import atomic_write
from blocktrain.ledger.ledger import Ledger
from blocktrain.storage.chunks import LocalChunks, place_of

CHUNKS = "chunks"
TRIES = 3  # a version that is replaced meanwhile stays longer than most backups take


def back_up(folder: Path, out: Path) -> int:
    """Write the folder into one tar file; its size in bytes."""
    if not (folder / LEDGER_FILE).exists():
        raise RunError(f"{folder} holds no run; give the run's folder with --data-dir")
    if out.exists():
        raise RunError(f"{out} is there already")
    if not out.parent.is_dir():
        raise RunError(f"{out.parent} is no folder to write a backup into")
    with atomic_write(out, mode=0o600) as file:  # the run's secrets are in it
        for _ in range(TRIES):
            missing = _write(folder, file)
            if not missing:
                break
        else:
            raise RunError(
                f"{len(missing)} chunks that the run needs are not in {folder / CHUNKS},"
                f" among them {min(missing)}; tried {TRIES} times"
            )
    return out.stat().st_size


def restore(archive_path: Path, folder: Path) -> int:
    """Unpack a backup into a new folder, every chunk checked; how many chunks."""
    if folder.exists() and any(folder.iterdir()):
        raise RunError(f"{folder} is not empty")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        return _unpack(archive_path, folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # half a run is none, and is in the way
        raise


def _write(folder: Path, out: BinaryIO) -> set[str]:
    """One try; the chunks that it lacks, because they went after the ledger was copied."""
    out.seek(0)
    out.truncate()
    held = folder / CHUNKS
    with (
        tempfile.TemporaryDirectory(dir=Path(out.name).parent) as scratch,
        tarfile.open(fileobj=out, mode="w") as archive,
    ):
        if held.is_dir():  # first: without it, and only then, there are none to check for
            archive.add(held, CHUNKS, recursive=False)
        snapshot = Path(scratch) / LEDGER_FILE
        _copy_ledger(folder / LEDGER_FILE, snapshot)
        archive.add(snapshot, LEDGER_FILE)
        if (folder / INVITE_FILE).exists():
            archive.add(folder / INVITE_FILE, INVITE_FILE)
        if not held.is_dir():
            return set()
        chunks = LocalChunks(held)
        needed = _needed(snapshot, chunks)
        return needed - {name for name, _ in chunks.stored() if _added(archive, held, name)}


def _unpack(archive_path: Path, folder: Path) -> int:
    try:
        with tarfile.open(archive_path) as archive:
            archive.extractall(folder, filter=_private)  # noqa: S202  the filter checks each member
    except (tarfile.TarError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise CorruptFileError(f"{archive_path} is not a whole backup: {reason}") from None
    if not (folder / LEDGER_FILE).exists():
        raise CorruptFileError(f"{archive_path} holds no ledger")
    if not (folder / CHUNKS).is_dir():
        return 0
    chunks = LocalChunks(folder / CHUNKS)
    there = {name for name, _ in chunks.stored()}
    for name in there:
        chunks.get(name)
    if missing := _needed(folder / LEDGER_FILE, chunks) - there:
        raise CorruptFileError(
            f"{archive_path} is not a whole backup: {len(missing)} chunks that the run needs are"
            f" not in it, among them {min(missing)}"
        )
    return len(there)


def _needed(ledger_file: Path, chunks: LocalChunks) -> set[str]:
    """All that the run cannot go on without; what is only being sent would be sent again."""
    with closing(Ledger(f"sqlite:///{ledger_file.resolve()}")) as ledger:
        run = open_run(ledger, chunks, time.time)
        with ledger.read() as tx:
            names = named_blobs(tx)
    names |= {blob.name for blob in run.description.corpus.values()}
    needed = set(names)
    for name in names:
        with suppress(NotFoundError):
            needed |= run.blobs.chunks_of(name)
    return needed


def _copy_ledger(source: Path, target: Path) -> None:
    with closing(sqlite3.connect(source)) as live, closing(sqlite3.connect(target)) as copy:
        live.backup(copy)


def _added(archive: tarfile.TarFile, folder: Path, chunk: str) -> bool:
    try:
        archive.add(folder / place_of(chunk), f"{CHUNKS}/{place_of(chunk)}")
    except FileNotFoundError:
        return False
    return True


def _private(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo:
    """Whatever permissions were written down: for the operator alone."""
    safe = tarfile.data_filter(member, folder)
    return safe.replace(mode=0o700 if safe.isdir() else 0o600)
