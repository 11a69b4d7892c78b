"""The run's text on this machine: its own copy where it has the same one, else the run's.

A split that came from the run is a file named by its sha256, which it gets once that was checked;
it is used by every run and every worker on the machine, memory-mapped and never written again.
A run's description comes from a stranger: a copy that it names is looked for only among texts that
have a name of their own and are here already. Files are read where the machine's owner names them.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import filelock
import numpy as np

from blocktrain.config import DataConfig
from blocktrain.data import hub
from blocktrain.data.corpus import Bytes, Corpus, cache_dir, load_corpus
from blocktrain.data.sources import SPLITS
from blocktrain.errors import DataError, ProtocolError
from blocktrain.files import file_sha256
from blocktrain.protocol.messages import Blob, RunDescription
from blocktrain.worker.http import Patience
from blocktrain.worker.transfer import Transfer

FOLDER = "splits"
DIGEST = re.compile(r"[0-9a-f]{64}")


class CorpusCache:
    def __init__(
        self,
        transfer: Transfer,
        own: str | None = None,
        on_other: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`own`: the source that the owner of this machine has the run's text from; `on_other` is
        told where it is another text."""
        self._transfer, self._own, self._on_other = transfer, own, on_other
        self._folder = cache_dir() / FOLDER

    def open(self, description: RunDescription, settings: DataConfig, patience: Patience) -> Corpus:
        """The corpus that the run describes, whatever this machine has to fetch for it."""
        parts = {split: _part(description, split) for split in SPLITS}
        digests = {split: digest for split, (_, digest) in parts.items()}
        if not all(self._path(digest).exists() for digest in digests.values()):
            copy = self._owners_copy(settings, digests) or _named_copy(settings.source, digests)
            if copy:
                return copy
        splits = {split: self._split(*part, patience) for split, part in parts.items()}
        return Corpus(settings.source, splits, digests)

    def _owners_copy(self, settings: DataConfig, digests: dict[str, str]) -> Corpus | None:
        if not self._own:
            return None
        copy = load_corpus(replace(settings, source=self._own))
        differing = [split for split in SPLITS if copy.digests[split] != digests[split]]
        if not differing:
            return copy
        self._on_other(
            f"--data {self._own} is not the run's text: {', '.join(differing)} differ;"
            " using the run's own"
        )
        return None

    def _split(self, blob: Blob, digest: str, patience: Patience) -> Bytes:
        path = self._path(digest)
        if not path.exists():
            self._fetch(blob, digest, patience)
        if path.stat().st_size != blob.size:
            raise DataError(f"{path} is damaged; delete it to have it fetched again")
        return np.memmap(path, np.uint8, "r") if blob.size else np.zeros(0, np.uint8)

    def _fetch(self, blob: Blob, digest: str, patience: Patience) -> None:
        path = self._path(digest)
        unchecked = path.with_suffix(".unchecked")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(path.with_suffix(".lock")):
                if path.exists():  # another worker was first
                    return
                self._transfer.fetch_file(blob, unchecked, patience)
                if file_sha256(unchecked) != digest:
                    unchecked.unlink()
                    raise ProtocolError("the run's text is not the one it describes")
                unchecked.replace(path)
        except OSError as error:
            raise DataError(f"cannot keep the run's text in {path}: {error.strerror}") from None

    def _path(self, digest: str) -> Path:
        return self._folder / f"{digest}.bin"


def _part(description: RunDescription, split: str) -> tuple[Blob, str]:
    blob = {**description.corpus}.get(split)  # type: ignore[call-overload]
    digest = {**description.corpus_digests}.get(split, "")  # type: ignore[call-overload]
    if blob is None or not DIGEST.fullmatch(digest):
        raise ProtocolError(f"the run does not describe its {split} split")
    return blob, digest


def _named_copy(source: str, digests: dict[str, str]) -> Corpus | None:
    if not _is_here_by_name(source):
        return None
    try:
        copy = load_corpus(DataConfig(source))  # the limit, too, is this machine's own
    except DataError:
        return None
    return copy if copy.digests == digests else None


def _is_here_by_name(source: str) -> bool:
    """Whether a source names no file, and needs no network."""
    if source == "stdlib":
        return True
    if source not in hub.WIKITEXT and not source.startswith("hf:"):
        return False
    folder = cache_dir() / hub.FOLDER / re.sub("[/:]", "--", source.removeprefix("hf:"))
    needed = SPLITS if source in hub.WIKITEXT else SPLITS[:1]
    return all((folder / f"{split}.txt").exists() for split in needed)
