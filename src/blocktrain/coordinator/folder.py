"""A coordinator's folder: its ledger, chunks, first invite and addresses.

The ledger and the chunks may be elsewhere, in PostgreSQL and in a bucket.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from blocktrain.config import Config, from_toml
from blocktrain.coordinator.members import Operator
from blocktrain.coordinator.run import Run, create_run, open_run, run_row
from blocktrain.data.corpus import load_corpus
from blocktrain.errors import BlocktrainError, ConfigError
from blocktrain.files import write_bytes
from blocktrain.ledger.ledger import Ledger
from blocktrain.storage.blobs import open_chunks
from blocktrain.storage.chunks import ChunkStore

INVITE_FILE = "invite-secret"
ADVERTISED_FILE = "advertised.json"
LEDGER_FILE = "ledger.db"


class Advertised(NamedTuple):
    """Where a coordinator is reached, and by which authority it is known there."""

    addresses: tuple[str, ...]
    fingerprint: str | None  # None: plain HTTP, or a certificate that every machine trusts


class CoordinatorFolder:
    def __init__(self, folder: Path, db: str | None = None, blobs: str | None = None) -> None:
        self.folder = folder
        self._has_ledger = db is None
        self.db = db or f"sqlite:///{(folder / LEDGER_FILE).resolve()}"
        self.blobs = blobs or str((folder / "chunks").resolve())

    def open(self, clock: Callable[[], float] = time.time) -> Run:
        with _closed_on_error(self._ledger()) as ledger:
            return open_run(ledger, open_chunks(self.blobs), clock)

    def operator(self, clock: Callable[[], float] = time.time) -> Operator:
        """Does not open the chunk store, whose address an operator's command may not know."""
        with _closed_on_error(self._ledger()) as ledger:
            run_row(ledger)  # an error if there is none
            return Operator(ledger, clock)

    def open_or_create(self, config: Config, clock: Callable[[], float] = time.time) -> Run:
        """The run in this folder, or a new one with these settings."""
        self._make_folder()
        with _closed_on_error(Ledger(self.db)) as ledger:
            chunks = open_chunks(self.blobs)
            with ledger.read() as tx:
                row = tx.run()
            if row is None:
                _create(config, ledger, chunks, clock())
            elif from_toml(row.config) != config:
                raise ConfigError(
                    f"{self.folder} holds a run with other settings; leave --config out to continue"
                    " that run, or use another --data-dir"
                )
            return open_run(ledger, chunks, clock)

    def invite_secret(
        self, make: Callable[[], str], is_usable: Callable[[str], bool] = lambda secret: True
    ) -> str:
        """The invite that is printed at every start: the stored one as long as it is usable."""
        secret = self._read(INVITE_FILE).strip()
        if not secret or not is_usable(secret):
            self._write(INVITE_FILE, make())
        return self._read(INVITE_FILE).strip()

    def advertise(self, advertised: Advertised) -> None:
        """Store the addresses for invites that are made later."""
        self._write(ADVERTISED_FILE, json.dumps(advertised._asdict()))

    def advertised(self) -> Advertised | None:
        """What the last start of the coordinator stored."""
        stored = json.loads(self._read(ADVERTISED_FILE) or "null")
        return Advertised(tuple(stored["addresses"]), stored["fingerprint"]) if stored else None

    def _ledger(self) -> Ledger:
        if self._has_ledger and not (self.folder / LEDGER_FILE).exists():
            raise ConfigError(
                f"{self.folder} holds no run; give the run's folder with --data-dir,"
                " or start one with: blocktrain coordinator --config"
            )
        return Ledger(self.db)

    def _read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    def _write(self, name: str, text: str) -> None:
        self._make_folder()
        write_bytes(self.folder / name, text.encode(), mode=0o600)

    def _make_folder(self) -> None:
        """Readable by the operator only, because it holds the run's secrets."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextmanager
def _closed_on_error(ledger: Ledger) -> Iterator[Ledger]:
    try:
        yield ledger
    except BaseException:
        ledger.close()
        raise


def _create(config: Config, ledger: Ledger, chunks: ChunkStore, now: float) -> None:
    corpus = load_corpus(config.data)
    with tempfile.TemporaryDirectory(prefix="blocktrain-") as scratch:
        settings, weights = Path(scratch) / "config.toml", Path(scratch) / "weights"
        settings.write_text(config.to_toml())
        _make_initial_weights(settings, weights)
        files = [weights / f"block-{block}.safetensors" for block in range(config.block_count)]
        create_run(config, corpus, files, ledger, chunks, now)


def _make_initial_weights(settings: Path, folder: Path) -> None:
    """In a child process, because a coordinator never loads torch."""
    command = [sys.executable, "-m", "blocktrain.train.initial_weights", str(settings), str(folder)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode:
        lines = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
        kind = BlocktrainError.of_exit_code(child.returncode)
        raise kind(f"cannot make the initial weights: {lines[-1].removeprefix('error: ')}")
