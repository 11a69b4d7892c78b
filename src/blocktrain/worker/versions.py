"""Versions of blocks on this machine's disk, and the cheapest way to newer ones.

If the run publishes deltas between versions, a cached version and the deltas after it give a newer
one in few bytes; the result counts only if it has the newer version's hash. Otherwise, and if the
deltas are not smaller, the newer version is downloaded whole. Counts what was downloaded until it
is reported. Does not know what a version is used for.
"""

import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from blocktrain.config import from_toml
from blocktrain.errors import CorruptFileError, DivergedError, ProtocolError, RefusedError
from blocktrain.files import write_bytes
from blocktrain.protocol.messages import MOST_DOWNLOADS, Blob, Downloaded
from blocktrain.storage import tensor_file
from blocktrain.storage.deltas import follow_blobs
from blocktrain.storage.run_dir import RunDir
from blocktrain.storage.tensor_file import Tensors
from blocktrain.worker.blob_cache import BlobCache
from blocktrain.worker.client import Client
from blocktrain.worker.timing import Deadline
from blocktrain.worker.transfer import Transfer

MODEL_SECONDS = 3600.0  # for how long the download of a block is retried


@dataclass(frozen=True)
class CachedVersion:
    version: int
    weights: Blob


_FILE = TypeAdapter(dict[int, CachedVersion])


class Versions:
    def __init__(
        self, transfer: Transfer, folder: Path, codec: str, on_astray: Callable[[str], None]
    ) -> None:
        """`folder`: for a list of the cached versions. `codec`: the run's. `on_astray`: called when
        deltas did not lead to their version, as on a machine whose additions round differently."""
        self._transfer, self._path = transfer, folder / "versions.json"
        self._on_astray = on_astray
        self._has_deltas = codec != "none"
        self._cached = self._load() if self._has_deltas else {}
        self._downloaded: dict[int, Counter[str]] = defaultdict(Counter)
        self._lock = threading.Lock()  # of the counters: other threads put back into them

    def fetch(self, block: int, version: int, weights: Blob, deadline: Deadline) -> None:
        """Have a version in the cache."""
        with self._recorded(block, version, weights):
            self._follow_deltas(block, version, weights, deadline)
            with self._counted(block, "whole"):
                self._transfer.fetch(weights, deadline)

    def read(self, block: int, version: int, weights: Blob, deadline: Deadline) -> memoryview:
        """A version in memory, and in the cache."""
        with self._recorded(block, version, weights):
            self._follow_deltas(block, version, weights, deadline)
            with self._counted(block, "whole"):
                return self._transfer.read(weights, deadline)

    def cached(self, blocks: set[int]) -> list[Blob]:
        """The versions of these blocks from which deltas may lead to newer ones."""
        return [cached.weights for block, cached in self._cached.items() if block in blocks]

    def take_downloads(self) -> tuple[Downloaded, ...]:
        """What was downloaded since the last call. What exceeds one message stays for the next."""
        with self._lock:
            downloaded, self._downloaded = self._downloaded, defaultdict(Counter)
            for block in sorted(downloaded)[MOST_DOWNLOADS:]:
                self._downloaded[block] = downloaded.pop(block)
        return tuple(
            Downloaded(
                block=block,
                whole=counts["whole"],
                differences=counts["differences"],
                raw=counts["raw"],
            )
            for block, counts in sorted(downloaded.items())
        )

    def put_back(self, downloads: Iterable[Downloaded]) -> None:
        """Downloads that were taken and could not be reported."""
        for entry in downloads:
            self._count(
                entry.block, whole=entry.whole, differences=entry.differences, raw=entry.raw
            )

    def _count(self, block: int, **counts: int) -> None:
        with self._lock:
            self._downloaded[block].update(counts)

    def _follow_deltas(self, block: int, version: int, weights: Blob, deadline: Deadline) -> None:
        """Have a version in the cache by way of deltas, if there is one and it is shorter."""
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
            arrived = follow_blobs(cache, cached.weights, deltas)
        except (CorruptFileError, DivergedError, ProtocolError, RefusedError):
            return  # the whole version is downloaded instead
        if arrived != weights:
            self._on_astray(
                f"block {block}: the deltas from version {cached.version} to {version} gave other"
                " weights; the version is downloaded whole"
            )

    @contextmanager
    def _recorded(self, block: int, version: int, weights: Blob) -> Iterator[None]:
        """Note a version that is cached afterwards. Its full size counts only then: a download that
        fails is started again."""
        was_cached = self._transfer.cache.has(weights)
        yield
        if not was_cached:
            self._count(block, raw=weights.size)
        entry = CachedVersion(version, weights)
        if self._has_deltas and self._cached.get(block) != entry:
            self._cached[block] = entry
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(self._path, _FILE.dump_json(self._cached))

    @contextmanager
    def _counted(self, block: int, kind: str) -> Iterator[None]:
        """Count the bytes that are downloaded inside the block."""
        before = self._transfer.bandwidth.bytes_down
        try:
            yield
        finally:
            if count := self._transfer.bandwidth.bytes_down - before:
                self._count(block, **{kind: count})

    def _load(self) -> dict[int, CachedVersion]:
        """An unreadable list counts as an empty one."""
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
    """The run's current model as a run directory, each block at its newest version. On disk there
    is one block beside the model, in memory the model once."""
    config = from_toml(client.run().config)
    run = RunDir.create_exported(out, config)
    with tempfile.TemporaryDirectory(dir=out, prefix=".", suffix=".partial") as scratch:
        transfer = Transfer(client, BlobCache(Path(scratch)))
        blocks = [_fetch_newest(client, transfer, index) for index in range(config.block_count)]
    run.write_exported([weights for _, weights in blocks], fetched=True)
    return FetchedModel(run, [version for version, _ in blocks], transfer.bandwidth.bytes_down)


def _fetch_newest(client: Client, transfer: Transfer, index: int) -> tuple[int, Tensors]:
    """A version that is replaced during its download may be deleted: then a newer one."""
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
            return block.version, weights
