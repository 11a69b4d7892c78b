"""A coordinator's folder with its ledger, chunks, first invite and addresses; and its backups.

The ledger may be in PostgreSQL and the chunks in a bucket instead; back those up with the tools of
those systems. A backup of a folder is one tar file and can be made while the coordinator runs: a
snapshot of the ledger first, then the chunks. Chunks never change, but a chunk that is no longer
needed may be deleted meanwhile.
"""

import json
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from blocktrain.config import Config, from_toml
from blocktrain.coordinator.members import Operator
from blocktrain.coordinator.run import Run, create_run, open_run, run_row
from blocktrain.data.corpus_builder import OnProgress
from blocktrain.data.run_text import new_text
from blocktrain.errors import (
    BlocktrainError,
    ConfigError,
    CorruptFileError,
    NotFoundError,
    RunError,
)
from blocktrain.files import atomic_write, write_bytes
from blocktrain.ledger.ledger import Ledger
from blocktrain.protocol import identity
from blocktrain.storage.blobs import open_chunks
from blocktrain.storage.chunks import ChunkStore, LocalChunks, place_of

INVITE_FILE, VALIDATORS_FILE = "invite-secret", "invite-secret-of-validators"
OPERATOR_FILE, PAGE_FILE = "operator-token", "page.json"
ADVERTISED_FILE = "advertised.json"
LEDGER_FILE = "ledger.db"
CHUNK_FOLDER = "chunks"
RESERVED_BYTES = 64 << 20  # of a disk with chunks, for a ledger on the same disk
BACKUP_TRIES = 3  # chunks of replaced versions outlive most backups


class Advertised(NamedTuple):
    """The addresses of a coordinator, and the fingerprint of its certificate authority."""

    addresses: tuple[str, ...]
    fingerprint: str | None  # None: plain HTTP, or a publicly trusted certificate


class CoordinatorFolder:
    def __init__(self, folder: Path, db: str | None = None, blobs: str | None = None) -> None:
        self.folder = folder
        self._has_ledger = db is None
        self.db = db or f"sqlite:///{(folder / LEDGER_FILE).resolve()}"
        self.blobs = blobs or str((folder / CHUNK_FOLDER).resolve())

    def open(self) -> Run:
        with _closed_on_error(self._ledger()) as ledger:
            return open_run(ledger, open_chunks(self.blobs, RESERVED_BYTES), time.time)

    def operator(self) -> Operator:
        """Open the ledger only, since a command of the operator possibly lacks the chunk store's
        address."""
        with _closed_on_error(self._ledger()) as ledger:
            run_row(ledger)  # raises if there is no run
            return Operator(ledger, time.time)

    def open_or_create(
        self,
        config: Config,
        on_text: OnProgress = lambda done, total: None,
        *,
        force: bool = False,
    ) -> Run:
        """Open the run in this folder, or create one with these settings. `on_text`: progress of
        tokenising. `force`: even if a block does not fit into free memory."""
        self._make_folder()
        with _closed_on_error(Ledger(self.db)) as ledger:
            chunks = open_chunks(self.blobs, RESERVED_BYTES)
            with ledger.read() as tx:
                row = tx.run()
            if row is None:
                _create(config, ledger, chunks, on_text, force=force)
            elif not _continues(config, from_toml(row.config)):
                raise ConfigError(
                    f"{self.folder} holds a run with other settings; leave --config out to continue"
                    " that run, or use another --data-dir"
                )
            return open_run(ledger, chunks, time.time)

    def invite_secret(
        self,
        make: Callable[[], str],
        is_usable: Callable[[str], bool] = lambda secret: True,
        file: str = INVITE_FILE,
    ) -> str:
        """The secret of the invite that is printed at every start, or that of another file: the
        stored one while it is usable, else a new one."""
        secret = self._read(file).strip()
        if not secret or not is_usable(secret):
            self._write(file, make())
        return self._read(file).strip()

    def page_choices(self, **changes: Any) -> dict[str, Any]:
        """What the operator has chosen for the run page, now or at an earlier start. Choices that
        are None keep the earlier value."""
        stored: dict[str, Any] = json.loads(self._read(PAGE_FILE) or "{}")
        choices = stored | {name: value for name, value in changes.items() if value is not None}
        if choices != stored:
            self._write(PAGE_FILE, json.dumps(choices))
        return choices

    def operator_token(self) -> str:
        """The secret with which the run page operates the run; "" before the first start."""
        return self._read(OPERATOR_FILE).strip()

    def renew_operator_token(self) -> str:
        """Replace the operator's token. A running coordinator follows at once."""
        self._write(OPERATOR_FILE, identity.new_secret())
        return self.operator_token()

    def advertise(self, advertised: Advertised) -> None:
        """Store the addresses that later invites will contain."""
        self._write(ADVERTISED_FILE, json.dumps(advertised._asdict()))

    def advertised(self) -> Advertised | None:
        """The addresses stored at the coordinator's last start; None if there are none."""
        stored = json.loads(self._read(ADVERTISED_FILE) or "null")
        return Advertised(tuple(stored["addresses"]), stored["fingerprint"]) if stored else None

    def _ledger(self) -> Ledger:
        if self._has_ledger and not (self.folder / LEDGER_FILE).exists():
            raise ConfigError(
                f"{self.folder} holds no run; give the run's folder with --data-dir,"
                " or start a run with: blocktrain coordinator --config NAME"
            )
        return Ledger(self.db)

    def _read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    def _write(self, name: str, text: str) -> None:
        self._make_folder()
        write_bytes(self.folder / name, text.encode(), mode=0o600)

    def _make_folder(self) -> None:
        """Make the folder, readable by the operator only, because it holds the run's secrets."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextmanager
def _closed_on_error(ledger: Ledger) -> Iterator[Ledger]:
    try:
        yield ledger
    except BaseException:
        ledger.close()
        raise


def _continues(requested: Config, stored: Config) -> bool:
    """Whether these are the settings of a stored run, now or before it was extended. The run has
    resolved the vocabulary."""
    vocabulary = requested.vocab if requested.vocab.sha256 else stored.vocab
    same = requested, replace(requested, vocab=vocabulary)
    return stored.planned_for(requested.train.steps) in same


def _create(
    config: Config, ledger: Ledger, chunks: ChunkStore, on_text: OnProgress, *, force: bool
) -> None:
    text = new_text(config, on_text)
    config, files = text.config, text.tokenizer.files
    with tempfile.TemporaryDirectory(prefix="blocktrain-") as scratch:
        settings, weights = Path(scratch) / "config.toml", Path(scratch) / "weights"
        settings.write_text(config.to_toml())
        _make_initial_weights(settings, weights, force=force)
        first = [weights / f"block-{block}.safetensors" for block in range(config.block_count)]
        create_run(config, text.corpus, first, ledger, chunks, time.time(), files)


def _make_initial_weights(settings: Path, folder: Path, *, force: bool) -> None:
    """Write the initial weights of all blocks, in a child process, because a coordinator never
    loads torch."""
    command = [
        sys.executable,
        "-m",
        "blocktrain.training.stored_models",
        str(settings),
        str(folder),
        *(["--force"] if force else []),
    ]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode:
        lines = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
        kind = BlocktrainError.of_exit_code(child.returncode)
        raise kind(f"cannot make the initial weights: {lines[-1].removeprefix('error: ')}")


# Backups


def back_up(folder: Path, out: Path) -> int:
    """Write the folder into one tar file. Returns its size in bytes."""
    if not (folder / LEDGER_FILE).exists():
        raise RunError(f"{folder} holds no run; give the run's folder with --data-dir")
    if out.exists():
        raise RunError(f"{out} exists already; name another file")
    if not out.parent.is_dir():
        raise RunError(f"{out.parent} is not a folder; create it, or name another file")
    with atomic_write(out, mode=0o600) as file:  # it contains secrets
        for _ in range(BACKUP_TRIES):
            if not (missing := _write(folder, file)):
                break
        else:
            raise RunError(
                f"{folder / CHUNK_FOLDER} is damaged: after {BACKUP_TRIES} tries, {len(missing)}"
                f" chunks that the run needs are missing, such as {min(missing)}; restore an"
                " earlier backup into a new folder"
            )
    return out.stat().st_size


def restore(archive_path: Path, folder: Path) -> int:
    """Unpack a backup into a new folder and check every chunk. Returns the number of chunks."""
    if folder.exists() and any(folder.iterdir()):
        raise RunError(f"{folder} is not empty; restore into a new folder")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        return _unpack(archive_path, folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # leave no partial run
        raise


def _write(folder: Path, out: BinaryIO) -> set[str]:
    """Write the archive once. Returns the needed chunks that it lacks: they were deleted meanwhile,
    or the folder is damaged."""
    out.seek(0)
    out.truncate()
    chunk_folder = folder / CHUNK_FOLDER
    with (
        tempfile.TemporaryDirectory(dir=Path(out.name).parent) as scratch,
        tarfile.open(fileobj=out, mode="w") as archive,
    ):
        if chunk_folder.is_dir():  # tells `restore` that there are chunks to check
            archive.add(chunk_folder, CHUNK_FOLDER, recursive=False)
        source, snapshot = folder / LEDGER_FILE, Path(scratch) / LEDGER_FILE
        with closing(sqlite3.connect(source)) as live, closing(sqlite3.connect(snapshot)) as copy:
            live.backup(copy)
        archive.add(snapshot, LEDGER_FILE)
        if (folder / INVITE_FILE).exists():
            archive.add(folder / INVITE_FILE, INVITE_FILE)
        if not chunk_folder.is_dir():
            return set()
        chunks = LocalChunks(chunk_folder)
        missing = _needed(snapshot, chunks)
        for name, _ in chunks.stored():
            with suppress(FileNotFoundError):  # deleted meanwhile
                archive.add(chunk_folder / place_of(name), f"{CHUNK_FOLDER}/{place_of(name)}")
                missing.discard(name)
        return missing


def _unpack(archive_path: Path, folder: Path) -> int:
    if not tarfile.is_tarfile(archive_path):
        raise CorruptFileError(
            f"{archive_path} is not a backup; give a file made by `blocktrain backup`"
        )
    try:
        with tarfile.open(archive_path) as archive:
            archive.extractall(folder, filter=_private)  # noqa: S202  the filter checks each member
    except (tarfile.TarError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise CorruptFileError(
            f"{archive_path} is an incomplete backup: {reason}; use another backup"
        ) from None
    if not (folder / LEDGER_FILE).exists():
        raise CorruptFileError(
            f"{archive_path} contains no ledger; give a file made by `blocktrain backup`"
        )
    if not (folder / CHUNK_FOLDER).is_dir():
        return 0
    chunks = LocalChunks(folder / CHUNK_FOLDER)
    stored = {name for name, _ in chunks.stored()}
    for name in stored:
        chunks.get(name)
    if missing := _needed(folder / LEDGER_FILE, chunks) - stored:
        raise CorruptFileError(
            f"{archive_path} is an incomplete backup: it lacks {len(missing)} chunks that the run"
            f" needs, such as {min(missing)}; use another backup"
        )
    return len(stored)


def _needed(ledger_file: Path, chunks: LocalChunks) -> set[str]:
    """The chunks that a backup must contain: those of the text and of all stored versions. Updates
    are not needed: a worker sends or trains a lost update again."""
    with closing(Ledger(f"sqlite:///{ledger_file.resolve()}")) as ledger:
        run = open_run(ledger, chunks, time.time)
        with ledger.read() as tx:
            names = run.needed_blobs(tx)
    needed = set(names)
    for name in names:
        with suppress(NotFoundError):
            needed |= run.blobs.chunks_of(name)
    return needed


def _private(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo:
    """Make a member readable by the operator only, whatever the archive says."""
    safe = tarfile.data_filter(member, folder)
    return safe.replace(mode=0o700 if safe.isdir() else 0o600)
