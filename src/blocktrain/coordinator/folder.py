"""A coordinator's folder: its ledger, chunks, certificate and first invite, where not elsewhere."""

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
from blocktrain.coordinator.operator import Operator
from blocktrain.coordinator.run import Run, found_run, open_run, run_in
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
    fingerprint: str | None  # None: plain HTTP, or a certificate that every machine believes


class CoordinatorFolder:
    def __init__(self, folder: Path, db: str | None = None, blobs: str | None = None) -> None:
        self.folder = folder
        self._elsewhere = db is not None
        self.db = db or f"sqlite:///{(folder / LEDGER_FILE).resolve()}"
        self.blobs = blobs or str((folder / "chunks").resolve())

    def open(self, clock: Callable[[], float] = time.time) -> Run:
        """The run this folder holds."""
        with _closed_on_error(self._ledger()) as ledger:
            return open_run(ledger, open_chunks(self.blobs), clock)

    def operator(self, clock: Callable[[], float] = time.time) -> Operator:
        """For who has nothing to do with the run's chunks, and may not know where they are."""
        with _closed_on_error(self._ledger()) as ledger:
            run_in(ledger)  # or it is told that there is none
            return Operator(ledger, clock)

    def open_or_found(self, config: Config, clock: Callable[[], float] = time.time) -> Run:
        """The run this folder holds, or a new one with these settings."""
        self._make_folder()
        with _closed_on_error(Ledger(self.db)) as ledger:
            chunks = open_chunks(self.blobs)
            with ledger.read() as tx:
                held = tx.run()
            if held is None:
                _found(config, ledger, chunks, clock())
            elif from_toml(held.config) != config:
                raise ConfigError(
                    f"{self.folder} holds a run with other settings; leave --config out to go on"
                    " with it, or use another --data-dir"
                )
            return open_run(ledger, chunks, clock)

    def invite_secret(
        self, make: Callable[[], str], is_good: Callable[[str], bool] = lambda secret: True
    ) -> str:
        """The invite printed at every start: kept for the operator alone, and made anew only where
        nobody could join with it any more."""
        kept = self._kept(INVITE_FILE).strip()  # nothing: killed before it was filled
        if not kept or not is_good(kept):
            self._keep(INVITE_FILE, make())
        return self._kept(INVITE_FILE).strip()

    def advertise(self, advertised: Advertised) -> None:
        """Remember it for invites that are made later."""
        self._keep(ADVERTISED_FILE, json.dumps(advertised._asdict()))

    def advertised(self) -> Advertised | None:
        """What the coordinator that was started last said."""
        kept = json.loads(self._kept(ADVERTISED_FILE) or "null")
        return Advertised(tuple(kept["addresses"]), kept["fingerprint"]) if kept else None

    def _ledger(self) -> Ledger:
        if not self._elsewhere and not (self.folder / LEDGER_FILE).exists():
            raise ConfigError(
                f"{self.folder} holds no run; give the run's folder with --data-dir,"
                " or start one with: blocktrain coordinator --config"
            )
        return Ledger(self.db)

    def _kept(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    def _keep(self, name: str, text: str) -> None:
        self._make_folder()
        write_bytes(self.folder / name, text.encode(), mode=0o600)

    def _make_folder(self) -> None:
        """For the operator alone: what is in it opens the run to whoever reads it."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextmanager
def _closed_on_error(ledger: Ledger) -> Iterator[Ledger]:
    try:
        yield ledger
    except BaseException:
        ledger.close()
        raise


def _found(config: Config, ledger: Ledger, chunks: ChunkStore, now: float) -> None:
    corpus = load_corpus(config.data)
    with tempfile.TemporaryDirectory(prefix="blocktrain-") as scratch:
        settings, weights = Path(scratch) / "config.toml", Path(scratch) / "weights"
        settings.write_text(config.to_toml())
        _make_first_weights(settings, weights)
        files = [weights / f"block-{block}.safetensors" for block in range(config.block_count)]
        found_run(config, corpus, files, ledger, chunks, now)


def _make_first_weights(settings: Path, folder: Path) -> None:
    """In a process of its own: this one never loads torch."""
    command = [sys.executable, "-m", "blocktrain.train.initial_weights", str(settings), str(folder)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        lines = made.stderr.strip().splitlines() or [f"exit code {made.returncode}"]
        kind = BlocktrainError.of_exit_code(made.returncode)
        raise kind(f"cannot make the first weights: {lines[-1].removeprefix('error: ')}")
