"""Blobs to and from the run, in parallel chunks: each is checked, and none is moved twice.

Downloads go through a cache on disk, and uploads are read from it. A transfer that was cut
continues with the missing chunks, and inside a chunk with the missing bytes. Knows neither what a
blob means nor when it is needed.
"""

import math
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np

from blocktrain import faults
from blocktrain.errors import ProtocolError, RefusedError, RunError, UnreachableError
from blocktrain.protocol.messages import (
    CHUNK_BYTES,
    Blob,
    Receipt,
    UpdateOffer,
    whole_update_head,
)
from blocktrain.storage.chunks import name_of
from blocktrain.worker.blob_cache import (
    BlobCache,
    CacheDestination,
    Destination,
    FileDestination,
    MemoryDestination,
)
from blocktrain.worker.client import Client
from blocktrain.worker.http import HttpRequest, HttpResponse, TransientError
from blocktrain.worker.timing import Clock, Deadline

THREADS = 4
URL_SECONDS = 15.0  # for how long a presigned URL is tried before the coordinator is
AVOID_SECONDS = 600.0  # for how long presigned URLs are not tried after one did not answer
RENEW_SECONDS = 60.0  # a URL younger than this was not refused because of its age
MOST_ROUNDS = 8  # of sending the missing chunks and committing
LARGEST_PIECE = 128 * 1024
SMALLEST_PIECE = 1024
POLL_SECONDS = 0.5  # a wait without a timeout cannot be interrupted on every system

Result = TypeVar("Result")
Item = TypeVar("Item")
Urls = Mapping[str, str] | None


class Bandwidth:
    """Counts the bytes of all threads in both directions, and limits them together.

    A token bucket: up to `burst` seconds' worth of bytes may pass at once, then they pass at the
    rate. Waiting happens outside the lock, so that threads wait in parallel.
    """

    def __init__(self, limit: float | None, clock: Clock, burst: float = 0.25) -> None:
        """`limit`: bytes per second."""
        self._limit, self._clock, self._burst = limit, clock, burst
        self._lock = threading.Lock()
        self._paid_until = clock.monotonic() - burst
        self.bytes_down = self.bytes_up = 0

    @property
    def piece(self) -> int:
        """How many bytes to send at a time for an even flow."""
        if self._limit is None:
            return LARGEST_PIECE
        return int(min(LARGEST_PIECE, max(SMALLEST_PIECE, self._limit * self._burst)))

    def use(self, *, down: int = 0, up: int = 0) -> None:
        """Returns once these bytes may pass."""
        wait = 0.0
        with self._lock:
            self.bytes_down += down
            self.bytes_up += up
            if self._limit is not None:
                now = self._clock.monotonic()
                earliest = max(self._paid_until, now - self._burst)
                self._paid_until = earliest + (down + up) / self._limit
                wait = self._paid_until - now
        if wait > 0:
            self._clock.sleep(wait)


class Transfer:
    def __init__(
        self,
        client: Client,
        cache: BlobCache,
        bandwidth: Bandwidth | None = None,
        threads: int = THREADS,
        url_seconds: float = URL_SECONDS,
    ) -> None:
        self.client, self.cache = client, cache
        self.bandwidth = bandwidth or Bandwidth(None, client.clock)
        self._threads, self._url_seconds = threads, url_seconds
        self._avoid_urls_until = -math.inf

    def fetch(self, blob: Blob, deadline: Deadline) -> None:
        """Have a blob in the cache."""
        if not self.cache.has(blob):
            self._download(blob, CacheDestination(self.cache), deadline)

    def read(self, blob: Blob, deadline: Deadline) -> memoryview:
        """A blob in memory, and in the cache. A damaged chunk of the cache is fetched again."""
        memory = np.empty(blob.size, np.uint8).data
        destination = MemoryDestination(self.cache, memory)
        recipe = self.cache.recipe(blob.name) if self.cache.has(blob) else None
        if recipe is None or destination.missing(recipe):
            self._download(blob, destination, deadline)
        return memory

    def fetch_file(self, blob: Blob, path: Path, deadline: Deadline) -> None:
        """Have a blob as a file of its own, which appears when it is complete."""
        partial = path.with_name(path.name + ".partial")
        try:
            with FileDestination(partial) as destination:
                self._download(blob, destination, deadline)
            partial.replace(path)
        except OSError as error:
            raise RunError(f"cannot write {path}: {error.strerror}") from None

    def send(
        self,
        offer: UpdateOffer,
        deadline: Deadline,
        on_offered: Callable[[], None] = lambda: None,
        on_commit: Callable[[], None] = lambda: None,
    ) -> Receipt:
        """Upload an update whose chunks are in the cache. `on_offered`: called once the coordinator
        knows of it. `on_commit`: called before anything that may make it count."""
        if self.client.takes_whole(offer):
            on_commit()
            receipt = self._send_whole(offer, deadline)
            on_offered()
            return receipt
        for _ in range(MOST_ROUNDS):
            state = self.client.offer(offer, deadline)
            on_offered()
            missing = list(dict.fromkeys(state.missing))
            if not set(missing) <= set(offer.claim.recipe.chunks):
                raise ProtocolError("the coordinator asks for chunks that the update does not have")
            urls = PresignedUrls(
                state.urls, lambda: self.client.offer(offer, deadline).urls, self.client.clock
            )
            self._upload(missing, offer.claim.lease, urls, deadline)
            on_commit()
            try:
                return self.client.commit(offer.claim.lease, deadline)
            except RefusedError as refused:
                if refused.code != "conflict":  # else chunks went missing after all
                    raise
        raise ProtocolError(f"the coordinator still misses chunks after {MOST_ROUNDS} uploads")

    def _download(self, blob: Blob, destination: Destination, deadline: Deadline) -> None:
        answer = self.client.blob(blob.name, deadline)
        recipe = answer.recipe
        if self.cache.add_recipe(recipe) != blob:
            raise ProtocolError(f"the coordinator sent another blob than {blob.name}")
        urls = PresignedUrls(
            answer.urls, lambda: self.client.blob(blob.name, deadline).urls, self.client.clock
        )

        def get(index: int, still_wanted: Callable[[], bool]) -> None:
            name, left = recipe.chunks[index], recipe.size - index * CHUNK_BYTES
            buffer = destination.buffer(index, min(CHUNK_BYTES, left))
            until = deadline.only_while(still_wanted)
            download = ChunkDownload(name, buffer, self.bandwidth, until)
            self._send_chunk_request(download, name, f"/v1/chunks/{name}", urls, until)
            destination.put(index, name, buffer)

        run_in_parallel(get, destination.missing(recipe), self._threads)

    def _upload(
        self, names: list[str], lease: str, urls: "PresignedUrls", deadline: Deadline
    ) -> None:
        def put(name: str, still_wanted: Callable[[], bool]) -> None:
            until = deadline.only_while(still_wanted)
            upload = Upload("PUT", self.cache.chunks.get(name), self.bandwidth, until)
            self._send_chunk_request(upload, name, f"/v1/chunks/{name}?lease={lease}", urls, until)

        run_in_parallel(put, names, self._threads)

    def _send_whole(self, offer: UpdateOffer, deadline: Deadline) -> Receipt:
        chunk = self.cache.chunks.get(offer.claim.recipe.chunks[0])
        upload = Upload("POST", chunk, self.bandwidth, deadline, whole_update_head(offer))
        return self.client.send_whole(upload, deadline)

    def _send_chunk_request(
        self,
        request: HttpRequest[Result],
        name: str,
        path: str,
        urls: "PresignedUrls",
        deadline: Deadline,
    ) -> Result:
        """To the chunk's presigned URL if it has one that works, else to the coordinator."""
        clock, url = self.client.clock, urls[name]
        while url and clock.monotonic() >= self._avoid_urls_until:
            soon = min(deadline.at, clock.monotonic() + self._url_seconds)
            try:
                return self.client.http.send_to_url(request, url, Deadline(soon, deadline.wanted))
            except UnreachableError:
                if not deadline.wanted():
                    raise
                self._avoid_urls_until = clock.monotonic() + AVOID_SECONDS
            except (RefusedError, ProtocolError):
                url = urls.renewed(name, url)
        return self.client.send(request, path, deadline)


class ChunkDownload(HttpRequest[None]):
    """Fills a buffer with the chunk of a name. Another attempt continues where the last was cut."""

    method = "GET"

    def __init__(
        self, name: str, buffer: memoryview, bandwidth: Bandwidth, deadline: Deadline
    ) -> None:
        self._name, self._buffer, self._received = name, buffer, 0
        self._bandwidth, self._deadline = bandwidth, deadline

    def headers(self) -> dict[str, str]:
        return {"Range": f"bytes={self._received}-"} if self._received else {}

    def body(self) -> None:
        return None

    def read(self, response: HttpResponse) -> None:
        content_range = response.headers.get("Content-Range", "")
        if response.status != 206 or not content_range.startswith(f"bytes {self._received}-"):
            self._received = 0
        for part in response.parts(len(self._buffer) - self._received):
            self._buffer[self._received : self._received + len(part)] = part
            self._received += len(part)
            self._bandwidth.use(down=len(part))
            _check_wanted(self._deadline)
        if self._received < len(self._buffer):
            raise TransientError(
                f"chunk {self._name} ended after {self._received} of {len(self._buffer)} bytes"
            )
        if name_of(self._buffer) != self._name:
            self._received = 0
            raise TransientError(f"chunk {self._name} arrived damaged")


class Upload(HttpRequest[bytes]):
    """Sends data, after a `head` if there is one."""

    def __init__(
        self, method: str, data: bytes, bandwidth: Bandwidth, deadline: Deadline, head: bytes = b""
    ) -> None:
        self.method = method
        self._data, self._head = memoryview(data), head
        self._bandwidth, self._deadline = bandwidth, deadline

    def headers(self) -> dict[str, str]:
        return {"Content-Length": str(len(self._head) + len(self._data))}

    def body(self) -> Iterator[bytes]:
        yield self._head
        piece = self._bandwidth.piece
        for start in range(0, len(self._data), piece):
            _check_wanted(self._deadline)
            part = self._data[start : start + piece]
            self._bandwidth.use(up=len(part))
            yield part  # type: ignore[misc]  # what takes bytes takes a view of them too
        faults.reached("chunk-sent")

    def read(self, response: HttpResponse) -> bytes:
        return response.whole()


def _check_wanted(deadline: Deadline) -> None:
    """In the middle of a chunk, which may take long."""
    if not deadline.wanted():
        raise TransientError("the transfer is no longer wanted")


class PresignedUrls:
    """Where the object store gives or takes chunks itself, if it does."""

    def __init__(self, urls: Urls, renew: Callable[[], Urls], clock: Clock) -> None:
        self._urls, self._renew, self._clock = urls or {}, renew, clock
        self._issued_at = clock.monotonic()
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> str | None:
        return self._urls.get(name)

    def renewed(self, name: str, refused: str) -> str | None:
        """Another URL for a chunk, in place of one that was refused."""
        with self._lock:
            current = self._urls.get(name)
            if current == refused and self._clock.monotonic() - self._issued_at > RENEW_SECONDS:
                self._urls, self._issued_at = self._renew() or {}, self._clock.monotonic()
                current = self._urls.get(name)
            return None if current == refused else current


def run_in_parallel(
    work: Callable[[Item, Callable[[], bool]], None], items: Iterable[Item], threads: int
) -> None:
    """Call `work(item, still_wanted)` for every item; raise what the first failure raised. Unlike
    an executor's, the threads are daemons: a worker that is interrupted does not wait for them."""
    todo = list(reversed(list(items)))
    count = min(threads, len(todo))
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    stopped = threading.Event()

    def run() -> None:
        try:
            while not stopped.is_set():
                try:
                    item = todo.pop()
                except IndexError:
                    break
                work(item, lambda: not stopped.is_set())
        except BaseException as error:  # whatever it is, the waiting thread raises it
            ended.put(error)
        else:
            ended.put(None)

    try:
        for _ in range(count):
            threading.Thread(target=run, daemon=True).start()
        for _ in range(count):
            if failure := _next(ended):
                raise failure
    finally:
        stopped.set()


def _next(ended: "queue.SimpleQueue[BaseException | None]") -> BaseException | None:
    while True:
        try:
            return ended.get(timeout=POLL_SECONDS)
        except queue.Empty:
            continue
