"""The run's text on this machine: its own copy if it has the same text, otherwise the run's.

A split from the run is a file named by its sha256, which was checked; every run and every worker on
the machine uses it, memory-mapped and read-only. A run's description comes from a stranger: the
source it names is only looked up among the named texts that are here already. Other files are read
only where the machine's owner says so.
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
from blocktrain.worker.timing import Deadline
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
        """`own`: this machine's source of the run's text; `on_other` is called if it is another
        text."""
        self._transfer, self._own, self._on_other = transfer, own, on_other
        self._folder = cache_dir() / FOLDER

    def open(self, description: RunDescription, settings: DataConfig, deadline: Deadline) -> Corpus:
        """The corpus that the run describes; what is not here is fetched."""
        parts = {split: _part(description, split) for split in SPLITS}
        digests = {split: digest for split, (_, digest) in parts.items()}
        if not all(self._path(digest).exists() for digest in digests.values()):
            copy = self._owners_copy(settings, digests) or _named_copy(settings.source, digests)
            if copy:
                return copy
        splits = {split: self._split(*part, deadline) for split, part in parts.items()}
        return Corpus(settings.source, splits, digests)

    def _owners_copy(self, settings: DataConfig, digests: dict[str, str]) -> Corpus | None:
        if not self._own:
            return None
        copy = load_corpus(replace(settings, source=self._own))
        differing = [split for split in SPLITS if copy.digests[split] != digests[split]]
        if not differing:
            return copy
        self._on_other(
            f"--data {self._own} is not the run's text ({', '.join(differing)} differ);"
            " downloading the run's"
        )
        return None

    def _split(self, blob: Blob, digest: str, deadline: Deadline) -> Bytes:
        path = self._path(digest)
        if not path.exists():
            self._fetch(blob, digest, deadline)
        if path.stat().st_size != blob.size:
            raise DataError(f"{path} is damaged; delete it, and it is downloaded again")
        return np.memmap(path, np.uint8, "r") if blob.size else np.zeros(0, np.uint8)

    def _fetch(self, blob: Blob, digest: str, deadline: Deadline) -> None:
        path = self._path(digest)
        unchecked = path.with_suffix(".unchecked")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(path.with_suffix(".lock")):
                if path.exists():  # another worker has fetched it meanwhile
                    return
                self._transfer.fetch_file(blob, unchecked, deadline)
                if file_sha256(unchecked) != digest:
                    unchecked.unlink()
                    raise ProtocolError(
                        "the run's text does not have the hash that its description names"
                    )
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
        copy = load_corpus(DataConfig(source))  # with this machine's own size limit
    except DataError:
        return None
    return copy if copy.digests == digests else None


def _is_here_by_name(source: str) -> bool:
    """Whether a source is a named text, not a file, that is here already."""
    if source == "stdlib":
        return True
    if source not in hub.WIKITEXT and not source.startswith("hf:"):
        return False
    folder = cache_dir() / hub.FOLDER / re.sub("[/:]", "--", source.removeprefix("hf:"))
    needed = SPLITS if source in hub.WIKITEXT else SPLITS[:1]
    return all((folder / f"{split}.txt").exists() for split in needed)
