"""Blobs to and from the run: chunks side by side, each checked, none moved twice.

What was downloaded lies in a chunk cache on disk (`storage.chunks`), and what is to be uploaded
is written there first, so that memory holds a few chunks however large a blob is. A transfer that
was cut goes on where it was: with the chunks that are missing, and inside a chunk with the bytes
that are missing. Knows nothing of what blobs mean, nor when they are needed.
"""

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Protocol, TypeVar

import httpx
import numpy as np

from blocktrain import faults
from blocktrain.errors import (
    CorruptFileError,
    ProtocolError,
    RefusedError,
    RunError,
    UnreachableError,
)
from blocktrain.protocol.messages import CHUNK_BYTES, Blob, Receipt, Recipe, UpdateOffer
from blocktrain.storage.blobs import Blobs
from blocktrain.storage.chunks import LocalChunks, name_of
from blocktrain.worker.bandwidth import PresignedUrls, Throttle, TrafficCounter, run_in_parallel
from blocktrain.worker.client import Client
from blocktrain.worker.http import PassingError, Patience, exchange, pieces

THREADS = 4
LINK_SECONDS = 15.0  # that a place other than the coordinator may fail to answer
AVOID_SECONDS = 600.0  # that such a place is left alone then
MOST_ROUNDS = 8  # of sending what is missing and asking again


Result = TypeVar("Result")


def open_cache(folder: Path) -> Blobs:
    """What a worker has of blobs: not worth waiting for a disk, and changed with every version."""
    return Blobs(LocalChunks(folder, sync=False))


class Sink(Protocol):
    """Where the chunks of one download go."""

    def missing(self, recipe: Recipe) -> list[int]:
        """Numbers of the chunks that are not there yet."""
        ...

    def room(self, index: int, size: int) -> memoryview:
        """Where a chunk may be received."""
        ...

    def put(self, index: int, name: str, data: memoryview) -> None:
        """Take a chunk that has arrived in its room."""
        ...


class Transfer:
    def __init__(
        self,
        client: Client,
        cache: Blobs,
        throttle: Throttle,
        traffic: TrafficCounter,
        threads: int = THREADS,
        link_seconds: float = LINK_SECONDS,
    ) -> None:
        self.client, self.cache = client, cache
        self.throttle, self.traffic = throttle, traffic
        self._threads, self._link_seconds = threads, link_seconds
        self._no_links_before = -math.inf

    def fetch(self, blob: Blob, patience: Patience) -> None:
        """Have a blob in the chunk cache."""
        if not self.has(blob):
            self._download(blob, _IntoCache(self.cache), patience)

    def has(self, blob: Blob) -> bool:
        """Whether all of a blob is in the chunk cache."""
        chunks = self.cache.chunks
        if not chunks.has([blob.name]):
            return False
        try:
            needed = self.cache.chunks_of(blob.name)
        except (CorruptFileError, ProtocolError):
            chunks.delete(blob.name)
            return False
        return chunks.has(needed) == needed

    def read(self, blob: Blob, patience: Patience) -> memoryview:
        """All of a blob, in memory of its own."""
        data = np.empty(blob.size, np.uint8).data
        self.read_into(data, blob, patience)
        return data

    def read_into(self, data: memoryview, blob: Blob, patience: Patience) -> None:
        """All of a blob, in memory of its size. What is downloaded for it is in the chunk cache as
        well; a chunk that went bad there is fetched again."""
        sink = _IntoMemory(self.cache, data)
        recipe = self.cache.recipe(blob.name) if self.has(blob) else None
        if recipe is None or sink.missing(recipe):
            self._download(blob, sink, patience)

    def fetch_file(self, blob: Blob, path: Path, patience: Patience) -> None:
        """Have a blob as a file of its own, which appears when it is complete."""
        partial = path.with_name(path.name + ".partial")
        try:
            with _IntoFile(partial) as sink:
                self._download(blob, sink, patience)
            partial.replace(path)
        except OSError as error:
            raise RunError(f"cannot write {path}: {error.strerror}") from None

    def send(
        self,
        offer: UpdateOffer,
        patience: Patience,
        on_offered: Callable[[], None] = lambda: None,
        on_commit: Callable[[], None] = lambda: None,
    ) -> Receipt:
        """Upload an update whose chunks are in the cache; what the coordinator says to it.
        `on_offered`: called once the coordinator knows of it. `on_commit`: called before anything
        that may make it count."""
        recipe = offer.claim.recipe
        if self.client.takes_whole(offer):
            on_commit()
            receipt = self._send_whole(offer, patience)
            on_offered()
            return receipt
        for _ in range(MOST_ROUNDS):
            state = self.client.offer(offer, patience)
            on_offered()
            missing = list(dict.fromkeys(state.missing))
            if not set(missing) <= set(recipe.chunks):
                raise ProtocolError("the coordinator asks for chunks that the update does not have")
            links = PresignedUrls(
                state.urls, lambda: self.client.offer(offer, patience).urls, self.client.clock
            )
            self._put_chunks(missing, offer.claim.lease, links, patience)
            on_commit()
            try:
                return self.client.commit(offer.claim.lease, patience)
            except RefusedError as refused:
                if refused.code != "conflict":
                    raise
                # Chunks went missing after all.
        raise ProtocolError(f"the coordinator still misses chunks after {MOST_ROUNDS} uploads")

    def keep_only(self, blobs: Iterable[Blob]) -> None:
        """Drop every other blob from the chunk cache."""
        chunks = self.cache.chunks
        needed: set[str] = set()
        for blob in blobs:
            if self.has(blob):
                needed |= self.cache.chunks_of(blob.name)
        for name in [name for name, _ in chunks.stored() if name not in needed]:
            chunks.delete(name)

    def _download(self, blob: Blob, sink: Sink, patience: Patience) -> None:
        answer = self.client.blob(blob.name, patience)
        recipe = answer.recipe
        if self.cache.add_recipe(recipe) != blob:
            raise ProtocolError(f"the coordinator sent another blob than {blob.name}")
        links = PresignedUrls(
            answer.urls, lambda: self.client.blob(blob.name, patience).urls, self.client.clock
        )

        def get(index: int, still_wanted: Callable[[], bool]) -> None:
            name, size = recipe.chunks[index], recipe.size - index * CHUNK_BYTES
            room = sink.room(index, min(CHUNK_BYTES, size))
            self._get_chunk(name, room, links, patience.also(still_wanted))
            sink.put(index, name, room)

        run_in_parallel(get, sink.missing(recipe), self._threads)

    def _get_chunk(
        self, name: str, room: memoryview, links: PresignedUrls, patience: Patience
    ) -> None:
        """Fill the room with a chunk that has the hash it is named by."""
        arriving = _Arriving(room)

        def attempt(http: httpx.Client, url: str, headers: dict[str, str]) -> None:
            self._receive(http, url, headers, arriving, patience)
            if name_of(room) != name:
                arriving.count = 0
                raise PassingError(f"chunk {name} arrived damaged")

        self._by_link_or_coordinator(name, "", links, patience, attempt)

    def _put_chunks(
        self, names: list[str], lease: str, links: PresignedUrls, patience: Patience
    ) -> None:
        def put(name: str, still_wanted: Callable[[], bool]) -> None:
            both = patience.also(still_wanted)

            def attempt(http: httpx.Client, url: str, headers: dict[str, str]) -> None:
                self._transmit(http, url, headers, name, both)

            self._by_link_or_coordinator(name, f"?lease={lease}", links, both, attempt)
            faults.reached("chunk-sent")

        run_in_parallel(put, names, self._threads)

    def _by_link_or_coordinator(
        self,
        name: str,
        query: str,
        links: PresignedUrls,
        patience: Patience,
        attempt: Callable[[httpx.Client, str, dict[str, str]], Result],
    ) -> Result:
        link = links[name]
        while link and self.client.clock.monotonic() >= self._no_links_before:
            try:
                return self._by_link(link, patience, attempt)
            except UnreachableError:
                if not patience.wanted():
                    raise
                self._no_links_before = self.client.clock.monotonic() + AVOID_SECONDS
            except (RefusedError, ProtocolError):
                link = links.renewed(name, link)
        path = f"/v1/chunks/{name}{query}"
        return self.client.authorized(
            lambda http, address, headers: attempt(http, address + path, headers), patience
        )

    def _by_link(
        self,
        link: str,
        patience: Patience,
        attempt: Callable[[httpx.Client, str, dict[str, str]], Result],
    ) -> Result:
        soon = min(patience.until, self.client.clock.monotonic() + self._link_seconds)
        connection = self.client.connection
        return connection.retry(
            lambda: attempt(connection.public_http(), link, {}), Patience(soon, patience.wanted)
        )

    def _receive(
        self,
        http: httpx.Client,
        url: str,
        headers: dict[str, str],
        arriving: "_Arriving",
        patience: Patience,
    ) -> None:
        """Go on with a chunk of which some may be there already."""
        if arriving.count:
            headers = {**headers, "Range": f"bytes={arriving.count}-"}
        clock = self.client.clock
        room = arriving.room[arriving.count :]
        with exchange(http, clock, "GET", url, headers=headers, room=room) as response:
            place = response.headers.get("Content-Range", "")
            resumed = place.startswith(f"bytes {arriving.count}-")
            if response.status_code != httpx.codes.PARTIAL_CONTENT or not resumed:
                arriving.count = 0
            for piece in pieces(response, arriving.missing, clock):
                arriving.add(piece)
                self.traffic.count(down=len(piece))
                self.throttle.take(len(piece))
                _refuse_unwanted(patience)
        if arriving.missing:
            raise PassingError(f"chunk ended after {arriving.count} of {len(arriving.room)} bytes")

    def _transmit(
        self,
        http: httpx.Client,
        url: str,
        headers: dict[str, str],
        name: str,
        patience: Patience,
    ) -> None:
        """A chunk from the cache; whoever receives it checks it."""
        file, size = self.cache.chunks.open(name)
        content = self._flow(file, patience)
        headers = {**headers, "Content-Length": str(size)}
        with file, exchange(http, self.client.clock, "PUT", url, headers=headers, content=content):
            return

    def _send_whole(self, offer: UpdateOffer, patience: Patience) -> Receipt:
        chunk = self.cache.chunks.get(offer.claim.recipe.chunks[0])

        def data() -> Iterator[bytes]:
            yield from self._flow(BytesIO(chunk), patience)
            faults.reached("chunk-sent")

        return self.client.send_whole(offer, len(chunk), data, patience)

    def _flow(self, file: IO[bytes], patience: Patience) -> Iterator[bytes]:
        while piece := file.read(self.throttle.piece):
            _refuse_unwanted(patience)
            self.throttle.take(len(piece))
            self.traffic.count(up=len(piece))
            yield piece


def _refuse_unwanted(patience: Patience) -> None:
    """In the middle of a chunk, which may take long."""
    if not patience.wanted():
        raise PassingError("the transfer is no longer wanted")


@dataclass
class _Arriving:
    """A chunk as far as it has come."""

    room: memoryview
    count: int = 0

    @property
    def missing(self) -> int:
        return len(self.room) - self.count

    def add(self, piece: bytes) -> None:
        """Nothing is copied where it was received in its place."""
        self.room[self.count : self.count + len(piece)] = piece
        self.count += len(piece)


class _IntoCache:
    def __init__(self, cache: Blobs) -> None:
        self._chunks = cache.chunks

    def missing(self, recipe: Recipe) -> list[int]:
        there = self._chunks.has(recipe.chunks)
        first = {name: index for index, name in reversed(list(enumerate(recipe.chunks)))}
        return sorted(index for name, index in first.items() if name not in there)

    def room(self, index: int, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def put(self, index: int, name: str, data: memoryview) -> None:
        self._chunks.put(data, name)


class _IntoMemory:
    """All of a blob in one piece, and what was not in the cache there too."""

    def __init__(self, cache: Blobs, data: memoryview) -> None:
        self._data = data
        self._chunks = cache.chunks
        self._places: dict[str, list[int]] = {}

    def missing(self, recipe: Recipe) -> list[int]:
        self._places = defaultdict(list)
        for index, name in enumerate(recipe.chunks):
            self._places[name].append(index)
        there = self._chunks.has(self._places)
        return sorted(
            places[0]
            for name, places in self._places.items()
            if name not in there or not self._loaded(name)
        )

    def room(self, index: int, size: int) -> memoryview:
        start = index * CHUNK_BYTES
        return self._data[start : start + size]

    def put(self, index: int, name: str, data: memoryview) -> None:
        self._chunks.put(data, name)
        self._copy(name)

    def _loaded(self, name: str) -> bool:
        """Whether a chunk of the cache is good; then it is in its places."""
        room = self.room(self._places[name][0], CHUNK_BYTES)
        file, size = self._chunks.open(name)
        with file:
            good = size == len(room)
            if good:
                room[:] = file.read()
                good = name_of(room) == name
        if good:
            self._copy(name)
        else:
            self._chunks.delete(name)
        return good

    def _copy(self, name: str) -> None:
        """Into all places of a chunk that is in the first of them."""
        first, *others = self._places[name]
        for place in others:
            self.room(place, CHUNK_BYTES)[:] = self.room(first, CHUNK_BYTES)


class _IntoFile:
    """A file that fills up in any order; what it holds is known by looking at it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self._file = path.open("r+b")
        self._lock = threading.Lock()

    def __enter__(self) -> "_IntoFile":
        return self

    def __exit__(self, *failure: object) -> None:
        self._file.close()

    def missing(self, recipe: Recipe) -> list[int]:
        self._file.truncate(recipe.size)
        self._file.seek(0)
        return [
            index
            for index, name in enumerate(recipe.chunks)
            if name_of(self._file.read(CHUNK_BYTES)) != name
        ]

    def room(self, index: int, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def put(self, index: int, name: str, data: memoryview) -> None:
        with self._lock:
            self._file.seek(index * CHUNK_BYTES)
            self._file.write(data)
