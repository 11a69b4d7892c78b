"""What a worker downloads: the run's tokenizer and text, and versions of blocks.

The text is a local copy if it is identical. A downloaded split is a file named by its sha256, which
was checked; all workers and runs on the machine share it, memory-mapped and read-only. A run's
description is untrusted: the source it names is only looked up among named datasets that are
already here. Other files are read only if the machine's owner names them.

A newer version of a block is computed from a cached one and the deltas between them, if the run
publishes deltas and they are smaller than the whole version. If a delta is missing, or the result
has the wrong hash, the version is downloaded whole. Downloaded bytes are counted until the worker
reports them. `fetch_model` downloads all blocks as a run directory, with the
text to score them on.
"""

import re
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import filelock
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from blocktrain.config import Config, DataConfig, from_toml
from blocktrain.config.sizes import block_sizes
from blocktrain.data import hub
from blocktrain.data.corpus import Corpus, cache_dir, load_corpus, open_split
from blocktrain.data.corpus_builder import split_dtype
from blocktrain.data.sources import SPLITS
from blocktrain.data.tokenizer import (
    SIDE_FILES,
    TOKENIZER_FILE,
    Tokenizer,
    Tokens,
    stored_tokenizer,
)
from blocktrain.environment import CACHE
from blocktrain.errors import (
    CorruptFileError,
    DataError,
    DivergedError,
    ProtocolError,
    RefusedError,
)
from blocktrain.files import UNFINISHED, file_sha256, write_bytes
from blocktrain.protocol.messages import (
    MOST_DOWNLOADS,
    MOST_TOKENIZER_BYTES,
    Blob,
    Downloaded,
    RunDescription,
)
from blocktrain.protocol.status_messages import BlockStatus
from blocktrain.storage import tensor_file
from blocktrain.storage.run_dir import RunDir, TrainingRecord
from blocktrain.storage.tensor_file import Tensors
from blocktrain.storage.weights_file import follow_blobs
from blocktrain.worker.client import Client
from blocktrain.worker.machine import Deadline
from blocktrain.worker.transfer import BlobCache, Transfer

SPLITS_FOLDER = "splits"
SCORED_SPLITS = ("valid", "test")
MOST_SCORED_BYTES = 256 * 1024 * 1024  # of a split that a fetched run brings along
DIGEST = re.compile(r"[0-9a-f]{64}")
MODEL_SECONDS = 3600.0  # how long the download of a block is retried
COUNTED = ("whole", "differences", "raw")  # bytes, as in messages.Downloaded
Result = TypeVar("Result")


def most_bytes(config: Config) -> int:
    """The most that a file of a run can have, except its text: the weights of the largest block
    with their header, or a file of the tokenizer."""
    largest = max(size.parameters for size in block_sizes(config))
    return max(MOST_TOKENIZER_BYTES, int(1.01 * 4 * largest) + (1 << 20))


def open_tokenizer(
    description: RunDescription, config: Config, transfer: Transfer, deadline: Deadline
) -> Tokenizer:
    """The run's tokenizer, downloaded and compared with the hash in the settings."""
    blobs = description.tokenizer
    names = {TOKENIZER_FILE, *SIDE_FILES}
    size = sum(blob.size for blob in blobs.values())
    if config.vocab.sha256 and (TOKENIZER_FILE not in blobs or not blobs.keys() <= names):
        raise ProtocolError(
            f"the run's tokenizer has the files {', '.join(sorted(blobs)) or 'none'}, but"
            f" {TOKENIZER_FILE} and no others than {', '.join(SIDE_FILES)} are accepted; tell the"
            " operator"
        )
    if size > MOST_TOKENIZER_BYTES:
        raise ProtocolError(
            f"the run's tokenizer has {size} bytes; the limit is {MOST_TOKENIZER_BYTES}; tell the"
            " operator"
        )
    files = {name: bytes(transfer.read(blob, deadline)) for name, blob in blobs.items()}
    try:
        return stored_tokenizer(files, config.vocab)
    except DataError as error:
        raise ProtocolError(f"cannot use the run's tokenizer: {error}; tell the operator") from None


def open_corpus(
    description: RunDescription,
    settings: DataConfig,
    tokenizer: Tokenizer,
    transfer: Transfer,
    deadline: Deadline,
    own: str | None = None,
    on_other: Callable[[str], None] = lambda text: None,
) -> Corpus:
    """The corpus that the run describes; missing splits are downloaded. `own`: the owner's copy of
    the text; `on_other` is called if it differs from the run's."""
    parts = {split: _part(description, split) for split in SPLITS}
    digests = {split: digest for split, (_, digest) in parts.items()}
    if not all(_path(digest).exists() for digest in digests.values()):
        owners_copy = _owners_copy(own, settings, tokenizer, digests, on_other) if own else None
        if copy := owners_copy or _named_copy(settings.source, tokenizer, digests):
            return copy
    dtype = split_dtype(settings.source, tokenizer)
    splits = {split: _split(*part, dtype, transfer, deadline) for split, part in parts.items()}
    lengths = tokenizer.token_lengths() if tokenizer.vocabulary.sha256 else None
    return Corpus(settings.source, splits, digests, lengths)


def _owners_copy(
    source: str,
    settings: DataConfig,
    tokenizer: Tokenizer,
    digests: dict[str, str],
    on_other: Callable[[str], None],
) -> Corpus | None:
    """The owner's copy of the text; None if it differs from the run's."""
    copy = load_corpus(replace(settings, source=source), tokenizer)
    differing = [split for split in SPLITS if copy.digests[split] != digests[split]]
    if not differing:
        return copy
    on_other(
        f"--data {source} is not the run's text ({', '.join(differing)} differ);"
        " downloading the run's text instead"
    )
    return None


def _split(
    blob: Blob, digest: str, dtype: npt.DTypeLike, transfer: Transfer, deadline: Deadline
) -> Tokens:
    path = _path(digest)
    if not path.exists():
        _fetch(blob, digest, transfer, deadline)
    try:
        return open_split(path, blob.size, dtype)
    except ValueError:
        raise DataError(f"{path} is damaged; delete it to download it again") from None


def _fetch(blob: Blob, digest: str, transfer: Transfer, deadline: Deadline) -> None:
    path = _path(digest)
    unchecked = path.with_suffix(".unchecked")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(path.with_suffix(".lock")):
            if path.exists():  # another worker has fetched it
                return
            transfer.fetch_file(blob, unchecked, deadline)
            if file_sha256(unchecked) != digest:
                unchecked.unlink()
                raise ProtocolError(
                    "the downloaded text does not match its hash; tell the operator"
                )
            unchecked.replace(path)
    except OSError as error:
        raise DataError(
            f"cannot write the run's text to {path}: {error.strerror}; free space there, or set"
            f" {CACHE.name} to another folder"
        ) from None


def _path(digest: str) -> Path:
    return cache_dir() / SPLITS_FOLDER / f"{digest}.bin"


def _part(description: RunDescription, split: str) -> tuple[Blob, str]:
    blob = {**description.corpus}.get(split)  # type: ignore[call-overload]
    digest = {**description.corpus_digests}.get(split, "")  # type: ignore[call-overload]
    if blob is None or not DIGEST.fullmatch(digest):
        raise ProtocolError(f"the run's description lacks the {split} split; tell the operator")
    return blob, digest


def _named_copy(source: str, tokenizer: Tokenizer, digests: dict[str, str]) -> Corpus | None:
    """The run's text from a named dataset that is already on this machine, if both are equal. Never
    from a file that the run names. Not with a tokenizer, because that of an untrusted run might
    take forever."""
    is_here = source == "stdlib" or hub.is_cached(source, cache_dir())
    if tokenizer.vocabulary.sha256 or not is_here:
        return None
    try:
        copy = load_corpus(DataConfig(source))  # with this machine's own size limit
    except DataError:
        return None
    return copy if copy.digests == digests else None


@dataclass(frozen=True)
class CachedVersion:
    version: int
    weights: Blob


_FILE = TypeAdapter(dict[int, CachedVersion])


class LocalVersions:
    def __init__(
        self, transfer: Transfer, folder: Path, codec: str, on_astray: Callable[[str], None]
    ) -> None:
        """`folder`: for the list of cached versions. `codec`: the run's. `on_astray` is called if
        deltas give wrong weights, as on a machine whose additions round differently."""
        self._transfer, self._path = transfer, folder / "versions.json"
        self._on_astray = on_astray
        self._has_deltas = codec != "none"
        self._cached = self._load() if self._has_deltas else {}
        self._downloaded: dict[int, Counter[str]] = defaultdict(Counter)
        self._lock = threading.Lock()  # of the counters: other threads call put_back

    def fetch(self, block: int, version: int, weights: Blob, deadline: Deadline) -> None:
        """Download a version to the cache."""
        self._obtain(block, version, weights, deadline, self._transfer.fetch)

    def read(self, block: int, version: int, weights: Blob, deadline: Deadline) -> memoryview:
        """A version in memory, downloaded through the cache."""
        return self._obtain(block, version, weights, deadline, self._transfer.read)

    def cached(self, blocks: set[int]) -> list[Blob]:
        """Cached versions of these blocks, from which deltas may lead to newer ones."""
        return [cached.weights for block, cached in self._cached.items() if block in blocks]

    def take_downloads(self) -> tuple[Downloaded, ...]:
        """Downloads since the last call. What exceeds one message stays for the next."""
        with self._lock:
            downloaded, self._downloaded = self._downloaded, defaultdict(Counter)
            for block in sorted(downloaded)[MOST_DOWNLOADS:]:
                self._downloaded[block] = downloaded.pop(block)
        return tuple(
            Downloaded(block=block, **{kind: counts[kind] for kind in COUNTED})
            for block, counts in sorted(downloaded.items())
        )

    def put_back(self, downloads: Iterable[Downloaded]) -> None:
        """Count downloads again that could not be reported."""
        for entry in downloads:
            self._count(entry.block, **entry.model_dump(include=set(COUNTED)))

    def _count(self, block: int, **counts: int) -> None:
        with self._lock:
            self._downloaded[block].update(counts)

    def _obtain(
        self,
        block: int,
        version: int,
        weights: Blob,
        deadline: Deadline,
        download: Callable[[Blob, Deadline], Result],
    ) -> Result:
        """Get a version by deltas or by download, and record that it is cached."""
        was_cached = self._transfer.cache.has(weights)
        self._follow_deltas(block, version, weights, deadline)
        with self._counted(block, "whole"):
            result = download(weights, deadline)
        if not was_cached:  # counted only after success, because a failed download is repeated
            self._count(block, raw=weights.size)
        entry = CachedVersion(version, weights)
        if self._has_deltas and self._cached.get(block) != entry:
            self._cached[block] = entry
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(self._path, _FILE.dump_json(self._cached))
        return result

    def _follow_deltas(self, block: int, version: int, weights: Blob, deadline: Deadline) -> None:
        """Compute a version from a cached one, if deltas lead to it and are smaller."""
        cache, cached = self._transfer.cache, self._cached.get(block)
        if cached is None or cached.version >= version:
            return
        if cache.has(weights) or not cache.has(cached.weights):
            return
        try:
            answer = self._transfer.client.deltas(block, cached.version, version, deadline)
            deltas = answer.differences
            if not deltas or sum(delta.size for delta in deltas) >= weights.size:
                return
            with self._counted(block, "differences"):
                for delta in deltas:
                    self._transfer.fetch(delta, deadline)
            result = follow_blobs(cache, cached.weights, deltas)
        except (CorruptFileError, DivergedError, ProtocolError, RefusedError):
            return  # the whole version is downloaded instead
        if result != weights:
            self._on_astray(
                f"block {block}: the deltas from version {cached.version} to {version} gave wrong"
                " weights; downloading the whole version"
            )

    @contextmanager
    def _counted(self, block: int, kind: str) -> Iterator[None]:
        """Count the bytes downloaded within the context."""
        before = self._transfer.bandwidth.bytes_down
        try:
            yield
        finally:
            if count := self._transfer.bandwidth.bytes_down - before:
                self._count(block, **{kind: count})

    def _load(self) -> dict[int, CachedVersion]:
        """The list of cached versions; empty if it is unreadable."""
        try:
            return _FILE.validate_json(self._path.read_bytes())
        except (OSError, ValidationError):
            return {}


@dataclass(frozen=True)
class FetchedModel:
    run: RunDir
    versions: list[int]
    bytes_moved: int


def fetch_model(client: Client, out: Path) -> FetchedModel:
    """Download the newest version of every block as a run directory. Uses memory for one model, and
    disk for the model and one block."""
    description = client.run()
    config = from_toml(description.config)
    run = RunDir.create_fetched(out, config, description.run)
    with tempfile.TemporaryDirectory(dir=out, prefix=".", suffix=".partial") as scratch:
        transfer = Transfer(client, BlobCache(Path(scratch)))
        transfer.most_bytes = most_bytes(config)
        deadline = client.deadline(MODEL_SECONDS)
        run.store_tokenizer(open_tokenizer(description, config, transfer, deadline).files)
        _fetch_text(description, run.text_folder, transfer, deadline)
        blocks = [_fetch_newest(client, transfer, index) for index in range(config.block_count)]
    states = [state for state, _ in blocks]
    trained = TrainingRecord(
        steps=[round(state.progress * config.train.steps) for state in states],
        bytes_seen=[state.bytes_trained for state in states],
        ces=[state.ce for state in states],
        ce=client.status(deadline).ce,
        versions=[state.version for state in states],
    )
    weights = [each for _, each in blocks]
    run.write_exported(weights, fetched=True, trained=trained, run=description.run)
    return FetchedModel(run, list(trained.versions or ()), transfer.bandwidth.bytes_down)


def _fetch_text(
    description: RunDescription, folder: Path, transfer: Transfer, deadline: Deadline
) -> None:
    """Download the text to score the model on, unless it is there or large."""
    for split in filter(description.corpus.__contains__, SCORED_SPLITS):
        blob, digest = _part(description, split)
        path = folder / f"{split}.bin"
        if blob.size > MOST_SCORED_BYTES or (path.exists() and file_sha256(path) == digest):
            continue
        folder.mkdir(exist_ok=True)
        unchecked = path.with_suffix(UNFINISHED)
        transfer.fetch_file(blob, unchecked, deadline)
        if file_sha256(unchecked) != digest:
            unchecked.unlink()
            raise ProtocolError("the downloaded text does not match its hash; tell the operator")
        unchecked.replace(path)


def _fetch_newest(client: Client, transfer: Transfer, index: int) -> tuple[BlockStatus, Tensors]:
    """Download the newest version of a block. If it is replaced and deleted during the download,
    retry with the newer one."""
    deadline, last_tried = client.deadline(MODEL_SECONDS), -1
    while True:
        block = client.status(deadline).blocks[index]
        try:
            weights = tensor_file.decode(transfer.read(block.weights, deadline))
        except RefusedError as refused:
            if refused.code != "not_found" or block.version == last_tried:
                raise
            last_tried = block.version
        else:
            transfer.cache.keep_only([])
            return block, weights
