"""Transfers blobs to and from the run in parallel chunks; each chunk is checked and moved once.

Downloads go through a cache on disk, and uploads are read from it. A damaged chunk in the cache
counts as missing. An interrupted transfer resumes with the missing chunks, and within a chunk with
the missing bytes. Knows neither what a blob means nor when it is needed.
"""

import math
import queue
import shutil
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, TypeVar

import numpy as np

from blocktrain import faults
from blocktrain.errors import (
    CorruptFileError,
    NotFoundError,
    ProtocolError,
    RefusedError,
    RunError,
    UnreachableError,
)
from blocktrain.protocol.messages import (
    CHUNK_BYTES,
    Blob,
    Receipt,
    Recipe,
    RevealOffer,
    UpdateOffer,
    UploadState,
    whole_update_head,
)
from blocktrain.storage.blobs import Blobs
from blocktrain.storage.chunks import LocalChunks, name_of
from blocktrain.worker.client import Client
from blocktrain.worker.http import HttpRequest, HttpResponse, TransientError
from blocktrain.worker.machine import Bandwidth, Clock, Deadline

THREADS = 4
URL_SECONDS = 15.0  # how long to try a presigned URL before the coordinator
AVOID_SECONDS = 600.0  # how long to avoid presigned URLs after one did not answer
RENEW_SECONDS = 60.0  # a URL younger than this has not expired
MOST_ROUNDS = 8  # of sending missing chunks and committing
POLL_SECONDS = 0.5  # a wait without a timeout is not interruptible on every system

RESERVED_BYTES, RESERVED_SHARE = 1 << 30, 0.05  # of a disk, that downloads leave to others

Result = TypeVar("Result")
Item = TypeVar("Item")
SendStage = Literal["offered", "committing"]
Urls = Mapping[str, str] | None


def reserved_bytes(folder: Path) -> int:
    """What a coordinator cannot fill of the disk of this folder, whatever it sends."""
    return min(RESERVED_BYTES, int(RESERVED_SHARE * shutil.disk_usage(folder).total))


class BlobCache(Blobs):
    """Blobs on this machine's disk, written without fsync because they can be downloaded again."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(LocalChunks(folder, sync=False, reserved=reserved_bytes(folder)))

    def has(self, blob: Blob) -> bool:
        """Whether all chunks of a blob are cached."""
        if not self.chunks.has([blob.name]):
            return False
        try:
            needed = self.chunks_of(blob.name)
        except (CorruptFileError, ProtocolError):
            self.chunks.delete(blob.name)
            return False
        return self.chunks.has(needed) == needed

    def keep_only(self, blobs: Iterable[Blob]) -> None:
        """Delete all blobs from the cache except these."""
        needed: set[str] = set()
        for blob in blobs:
            if self.has(blob):
                needed |= self.chunks_of(blob.name)
        for name in [name for name, _ in self.chunks.stored() if name not in needed]:
            self.chunks.delete(name)


class Destination(ABC):
    """Where the chunks of one download go."""

    @abstractmethod
    def missing(self, recipe: Recipe) -> list[int]:
        """Indices of the chunks that have to be downloaded."""

    def buffer(self, index: int, size: int) -> memoryview:
        """Memory to receive a chunk in."""
        return memoryview(bytearray(size))

    @abstractmethod
    def put(self, index: int, name: str, data: memoryview) -> None:
        """Store a chunk that was downloaded to its buffer and checked."""


class CacheDestination(Destination):
    def __init__(self, cache: BlobCache) -> None:
        self._chunks = cache.chunks

    def missing(self, recipe: Recipe) -> list[int]:
        indices = {name: index for index, name in enumerate(recipe.chunks)}  # may occur repeatedly
        cached = self._chunks.has(indices)
        return [index for name, index in indices.items() if name not in cached]

    def put(self, index: int, name: str, data: memoryview) -> None:
        self._chunks.put(data, name)


class MemoryDestination(CacheDestination):
    """A blob's place in memory, besides the cache. It is allocated once the blob's recipe has
    confirmed the announced size. A damaged cached chunk is downloaded again."""

    def __init__(self, cache: BlobCache, size: int) -> None:
        super().__init__(cache)
        self._cache, self._size = cache, size
        self.memory = memoryview(b"")
        self._places: dict[str, list[int]] = {}  # indices of each chunk, which may occur repeatedly

    def missing(self, recipe: Recipe) -> list[int]:
        if recipe.size != self._size:
            raise ProtocolError(
                f"a blob has {recipe.size} bytes by its recipe, but {self._size} were announced;"
                " tell the operator"
            )
        self.memory = np.empty(recipe.size, np.uint8).data
        self._reader = self._cache.reader(recipe)
        self._places = defaultdict(list)
        for index, name in enumerate(recipe.chunks):
            self._places[name].append(index)
        missing = super().missing(recipe)
        for name, indices in self._places.items():
            if indices[-1] in missing:
                continue
            try:
                self._copy(indices)
            except (CorruptFileError, NotFoundError):
                self._chunks.delete(name)
                missing.append(indices[-1])
        return missing

    def buffer(self, index: int, size: int) -> memoryview:
        start = index * CHUNK_BYTES
        return self.memory[start : start + size]

    def put(self, index: int, name: str, data: memoryview) -> None:
        super().put(index, name, data)
        self._copy([other for other in self._places[name] if other != index])

    def _copy(self, indices: Iterable[int]) -> None:
        """Copy chunks from the cache."""
        for index in indices:
            data = self._reader.chunk(index)
            self.buffer(index, len(data))[:] = data


class FileDestination(Destination):
    """A file that fills up in any order. It is its own record of what has arrived."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._lock = file, threading.Lock()

    def missing(self, recipe: Recipe) -> list[int]:
        self._file.truncate(recipe.size)
        self._file.seek(0)
        return [
            index
            for index, name in enumerate(recipe.chunks)
            if name_of(self._file.read(CHUNK_BYTES)) != name
        ]

    def put(self, index: int, name: str, data: memoryview) -> None:
        with self._lock:
            self._file.seek(index * CHUNK_BYTES)
            self._file.write(data)


class PresignedUrls:
    """URLs at which the object store itself serves or accepts chunks; none if it does not."""

    def __init__(self, urls: Urls, renew: Callable[[], Urls], clock: Clock) -> None:
        self._urls, self._renew, self._clock = urls or {}, renew, clock
        self._issued_at = clock.monotonic()
        self._lock = threading.Lock()

    def current(self, name: str) -> str | None:
        """The chunk's URL; None if it has none."""
        return self._urls.get(name)

    def renewed(self, name: str, refused: str) -> str | None:
        """A new URL for a chunk whose URL was refused; None if there is none."""
        with self._lock:
            current = self._urls.get(name)
            if current == refused and self._clock.monotonic() - self._issued_at > RENEW_SECONDS:
                self._urls, self._issued_at = self._renew() or {}, self._clock.monotonic()
                current = self._urls.get(name)
            return None if current == refused else current


class Transfer:
    def __init__(
        self,
        client: Client,
        cache: BlobCache,
        bandwidth: Bandwidth | None = None,
        threads: int = THREADS,
    ) -> None:
        self.client, self.cache, self._threads = client, cache, threads
        self.bandwidth = bandwidth or Bandwidth(None, client.clock)
        self._avoid_urls_until = -math.inf
        self.most_bytes: float = math.inf  # of a blob that is cached or read

    def fetch(self, blob: Blob, deadline: Deadline) -> None:
        """Download a blob to the cache."""
        self._check_size(blob)
        if not self.cache.has(blob):
            self._download(blob, CacheDestination(self.cache), deadline)

    def read(self, blob: Blob, deadline: Deadline) -> memoryview:
        """A blob in memory, downloaded through the cache. Replaces damaged cached chunks."""
        self._check_size(blob)
        destination = MemoryDestination(self.cache, blob.size)
        if not self.cache.has(blob) or destination.missing(self.cache.recipe(blob.name)):
            self._download(blob, destination, deadline)
        return destination.memory

    def fetch_file(self, blob: Blob, path: Path, deadline: Deadline) -> None:
        """Download a blob to a file, which appears once it is complete."""
        partial = path.with_name(path.name + ".partial")
        try:
            has = partial.stat().st_blocks * 512 if partial.exists() else 0
            room = shutil.disk_usage(path.parent).free + has - reserved_bytes(path.parent)
            if blob.size > room:
                raise RunError(
                    f"{path.parent} has room for {max(0, room):,} bytes, but the run's text has"
                    f" {blob.size:,}; free space there, or choose another folder"
                )
            partial.touch()
            with partial.open("r+b") as file:
                self._download(blob, FileDestination(file), deadline)
            partial.replace(path)
        except OSError as error:
            raise RunError(
                f"cannot write {path}: {error.strerror}; free space there, or choose another folder"
            ) from None

    def send(
        self,
        offer: UpdateOffer,
        deadline: Deadline,
        on_stage: Callable[[SendStage], None] = lambda stage: None,
    ) -> Receipt:
        """Upload an update whose chunks are in the cache. `on_stage` gets "offered" once the
        coordinator knows of the update, and "committing" before any request that may make it
        count."""
        if self.client.takes_whole(offer):
            on_stage("committing")
            chunk = self.cache.chunks.get(offer.claim.recipe.chunks[0])
            head = whole_update_head(offer)
            upload = UploadRequest("POST", chunk, self.bandwidth, deadline, head)
            receipt = self.client.send_whole(upload, deadline)
            on_stage("offered")
            return receipt
        for _ in range(MOST_ROUNDS):
            state = self.client.offer(offer, deadline)
            on_stage("offered")
            missing = list(dict.fromkeys(state.missing))
            if not set(missing) <= set(offer.claim.recipe.chunks):
                raise ProtocolError(
                    "the coordinator requests chunks that the update does not have; tell the"
                    " operator"
                )
            urls = PresignedUrls(
                state.urls, lambda: self.client.offer(offer, deadline).urls, self.client.clock
            )
            self._upload(missing, offer.claim.lease, urls, deadline)
            on_stage("committing")
            try:
                return self.client.commit(offer.claim.lease, deadline)
            except RefusedError as refused:
                if refused.code != "conflict":  # otherwise chunks are missing again
                    raise
        raise ProtocolError(
            f"the coordinator still lacks chunks after {MOST_ROUNDS} uploads; tell the operator"
        )

    def reveal(self, lease: str, recipes: Sequence[Recipe], deadline: Deadline) -> None:
        """Upload files of a lease that the coordinator has asked for."""
        offer = RevealOffer(recipes=tuple(recipes))

        def ask() -> UploadState:
            return self.client.reveal(lease, offer, deadline)

        for _ in range(MOST_ROUNDS):
            state = ask()
            if not state.missing:
                return
            if not {*state.missing} <= {chunk for each in recipes for chunk in each.chunks}:
                raise ProtocolError(
                    "the coordinator requests chunks that the files do not have; tell the operator"
                )
            urls = PresignedUrls(state.urls, lambda: ask().urls, self.client.clock)
            self._upload(list(state.missing), lease, urls, deadline)
        raise ProtocolError(
            f"the coordinator still lacks chunks after {MOST_ROUNDS} uploads; tell the operator"
        )

    def _check_size(self, blob: Blob) -> None:
        if blob.size > self.most_bytes:
            raise ProtocolError(
                f"the coordinator names a blob of {blob.size:,} bytes, but no file of this run has"
                f" more than {self.most_bytes:,}; tell the operator"
            )

    def _download(self, blob: Blob, destination: Destination, deadline: Deadline) -> None:
        answer = self.client.blob(blob.name, deadline)
        recipe = answer.recipe
        if self.cache.add_recipe(recipe) != blob:
            raise ProtocolError(f"the coordinator sent a recipe that does not match {blob.name}")
        urls = PresignedUrls(
            answer.urls, lambda: self.client.blob(blob.name, deadline).urls, self.client.clock
        )

        def get(index: int, until: Deadline) -> None:
            name, left = recipe.chunks[index], recipe.size - index * CHUNK_BYTES
            buffer = destination.buffer(index, min(CHUNK_BYTES, left))
            download = ChunkDownload(name, buffer, self.bandwidth, until)
            self._send_chunk_request(download, name, f"/v1/chunks/{name}", urls, until)
            destination.put(index, name, buffer)

        run_in_parallel(get, destination.missing(recipe), deadline, self._threads)

    def _upload(
        self, names: list[str], lease: str, urls: PresignedUrls, deadline: Deadline
    ) -> None:
        def put(name: str, until: Deadline) -> None:
            upload = UploadRequest("PUT", self.cache.chunks.get(name), self.bandwidth, until)
            self._send_chunk_request(upload, name, f"/v1/chunks/{name}?lease={lease}", urls, until)

        run_in_parallel(put, names, deadline, self._threads)

    def _send_chunk_request(
        self,
        request: HttpRequest[Result],
        name: str,
        path: str,
        urls: PresignedUrls,
        deadline: Deadline,
    ) -> Result:
        """Use the chunk's presigned URL if one works, otherwise the coordinator."""
        clock, url = self.client.clock, urls.current(name)
        while url and clock.monotonic() >= self._avoid_urls_until:
            soon = min(deadline.at, clock.monotonic() + URL_SECONDS)
            try:
                return self.client.http.send_to_url(request, url, Deadline(soon, deadline.wanted))
            except UnreachableError:
                if not deadline.wanted():
                    raise
                self._avoid_urls_until = clock.monotonic() + AVOID_SECONDS
            except (RefusedError, ProtocolError):
                url = urls.renewed(name, url)
        return self.client.send(request, path, deadline)


@dataclass
class ChunkDownload(HttpRequest[None]):
    """Downloads a chunk into a buffer. A retry resumes where the last attempt was cut."""

    name: str
    buffer: memoryview
    bandwidth: Bandwidth
    deadline: Deadline
    received: int = 0
    method: str = "GET"

    def headers(self) -> dict[str, str]:
        return {"Range": f"bytes={self.received}-"} if self.received else {}

    def read(self, response: HttpResponse) -> None:
        content_range = response.headers.get("Content-Range", "")
        if response.status != 206 or not content_range.startswith(f"bytes {self.received}-"):
            self.received = 0
        for part in response.parts(len(self.buffer) - self.received):
            self.buffer[self.received : self.received + len(part)] = part
            self.received += len(part)
            self.bandwidth.use(down=len(part))
            _check_wanted(self.deadline)
        if self.received < len(self.buffer):
            raise TransientError(
                f"chunk {self.name} ended after {self.received} of {len(self.buffer)} bytes"
            )
        if name_of(self.buffer) != self.name:
            self.received = 0
            raise TransientError(f"chunk {self.name} arrived damaged")


@dataclass
class UploadRequest(HttpRequest[bytes]):
    """Sends data, preceded by `head`."""

    method: str
    data: bytes
    bandwidth: Bandwidth
    deadline: Deadline
    head: bytes = b""

    def headers(self) -> dict[str, str]:
        return {"Content-Length": str(len(self.head) + len(self.data))}

    def body(self) -> Iterator[bytes]:
        yield self.head
        data, piece = memoryview(self.data), self.bandwidth.piece
        for start in range(0, len(data), piece):
            _check_wanted(self.deadline)
            part = data[start : start + piece]
            self.bandwidth.use(up=len(part))
            yield part  # type: ignore[misc]  # httpx accepts a memoryview
        faults.reached("chunk-sent")

    def read(self, response: HttpResponse) -> bytes:
        return response.whole()


def _check_wanted(deadline: Deadline) -> None:
    """Raise TransientError if the transfer is no longer wanted. For use between the parts of a
    chunk, which may take long as a whole."""
    if not deadline.wanted():
        raise TransientError("the transfer is no longer wanted")


def run_in_parallel(
    work: Callable[[Item, Deadline], None], items: Iterable[Item], deadline: Deadline, threads: int
) -> None:
    """Call `work(item, deadline)` for every item. The first failure is raised and cancels the rest.
    The threads are daemons, unlike an executor's, so an interrupted worker does not wait for
    them."""
    pending = list(items)
    todo: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
    for item in (*pending, *[None] * threads):
        todo.put(item)
    failures: list[BaseException] = []
    stopped = threading.Event()
    until = deadline.only_while(lambda: not stopped.is_set())

    def run() -> None:
        try:
            for item in iter(todo.get, None):
                if stopped.is_set():
                    return
                work(item, until)
        except BaseException as error:  # raised by the waiting thread
            failures.append(error)
            stopped.set()

    workers = [threading.Thread(target=run, daemon=True) for _ in pending[:threads]]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            while worker.is_alive() and not failures:
                worker.join(POLL_SECONDS)
    finally:
        stopped.set()
    if failures:
        raise failures[0]
