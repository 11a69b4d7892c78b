"""The versions of blocks that this machine has on disk, and the cheapest way to newer ones.

Where versions of the run follow each other by differences, a version that is here leads to a newer
one in few bytes; what comes of it is taken only under the newer one's own name. Else, and where
that is no smaller, the newer one is fetched whole. Counts the bytes until somebody reports them.
Knows nothing of what a version is for.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from blocktrain.errors import CorruptFileError, DivergedError, ProtocolError, RefusedError
from blocktrain.files import write_bytes
from blocktrain.protocol.messages import MOST_DOWNLOADS, Blob, Downloaded
from blocktrain.storage.deltas import follow_blobs
from blocktrain.worker.http import Patience
from blocktrain.worker.transfer import Transfer


@dataclass(frozen=True)
class CachedVersion:
    version: int
    weights: Blob


_FILE = TypeAdapter(dict[int, CachedVersion])


class Versions:
    def __init__(
        self, transfer: Transfer, folder: Path, codec: str, on_astray: Callable[[str], None]
    ) -> None:
        """`folder`: where to note what is held. `codec`: the run's. `on_astray`: told where
        differences led elsewhere than to their version, as on a machine that adds otherwise."""
        self._transfer, self._path = transfer, folder / "versions.json"
        self._on_astray = on_astray
        self._differ = codec != "none"
        self._held = self._noted() if self._differ else {}
        self._moved: dict[int, Counter[str]] = defaultdict(Counter)
        self._moved_lock = threading.Lock()  # what was not reported comes back from other threads

    def fetch(self, block: int, version: int, weights: Blob, patience: Patience) -> None:
        """Have a version in the chunk cache."""
        with self._had(block, version, weights):
            if not self._followed(block, version, weights, patience, None):
                with self._counted(block, "whole"):
                    self._transfer.fetch(weights, patience)

    def read(
        self, block: int, version: int, weights: Blob, patience: Patience, into: memoryview
    ) -> None:
        """A version in memory, of which there must be as much as it has bytes, and in the chunk
        cache."""
        with self._had(block, version, weights):
            if not self._followed(block, version, weights, patience, into):
                with self._counted(block, "whole"):
                    self._transfer.read_into(into, weights, patience)

    def held(self, blocks: set[int]) -> list[Blob]:
        """What newer versions of these blocks may be reached from."""
        return [held.weights for block, held in self._held.items() if block in blocks]

    def take_downloads(self) -> tuple[Downloaded, ...]:
        """What was downloaded since this was last asked; what is too much for one message is left
        for the next."""
        with self._moved_lock:
            moved, self._moved = self._moved, defaultdict(Counter)
            for block in sorted(moved)[MOST_DOWNLOADS:]:
                self._moved[block] = moved.pop(block)
        return tuple(
            Downloaded(
                block=block,
                whole=counts["whole"],
                differences=counts["differences"],
                raw=counts["raw"],
            )
            for block, counts in sorted(moved.items())
        )

    def put_back(self, downloads: Iterable[Downloaded]) -> None:
        """What was taken to be reported, and was not."""
        for told in downloads:
            self._count(told.block, whole=told.whole, differences=told.differences, raw=told.raw)

    def _count(self, block: int, **moved: int) -> None:
        with self._moved_lock:
            self._moved[block].update(moved)

    def _followed(
        self,
        block: int,
        version: int,
        weights: Blob,
        patience: Patience,
        into: memoryview | None,
    ) -> bool:
        """Go from the version that is here to one that is not; False: there is no need, no way, or
        a longer one."""
        if self._transfer.has(weights):
            return False
        held = self._held.get(block)
        if held is None or held.version >= version or not self._transfer.has(held.weights):
            return False
        client, cache = self._transfer.client, self._transfer.cache
        try:
            steps = client.differences(block, held.version, version, patience).differences
            if not steps or sum(step.size for step in steps) >= weights.size:
                return False
            with self._counted(block, "differences"):
                for step in steps:
                    self._transfer.fetch(step, patience)
            arrived = follow_blobs(cache, held.weights, steps, into) == weights
        except (CorruptFileError, DivergedError, ProtocolError, RefusedError):
            return False  # the whole version helps against all of these
        if not arrived:
            self._on_astray(
                f"block {block}: the differences from version {held.version} to {version} led"
                " elsewhere; it is fetched whole"
            )
        return arrived

    @contextmanager
    def _had(self, block: int, version: int, weights: Blob) -> Iterator[None]:
        """A version is here afterwards. What it would have been whole counts only then: one that is
        cut short is begun again."""
        was_here = self._transfer.has(weights)
        yield
        if not was_here:
            self._count(block, raw=weights.size)
        self._note(block, CachedVersion(version, weights))

    @contextmanager
    def _counted(self, block: int, kind: str) -> Iterator[None]:
        """The bytes that come down meanwhile."""
        before = self._transfer.traffic.down
        try:
            yield
        finally:
            if moved := self._transfer.traffic.down - before:
                self._count(block, **{kind: moved})

    def _note(self, block: int, held: CachedVersion) -> None:
        if self._differ and self._held.get(block) != held:
            self._held[block] = held
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(self._path, _FILE.dump_json(self._held))

    def _noted(self) -> dict[int, CachedVersion]:
        """A cache: what cannot be read is as good as nothing held."""
        try:
            return _FILE.validate_json(self._path.read_bytes())
        except (OSError, ValidationError):
            return {}
