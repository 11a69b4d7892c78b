"""Blobs: files of any size, stored as chunks. A recipe lists a blob's chunks; its hash is the
blob's name.

A recipe is a chunk too, of canonical JSON ({"size":N,"chunks":[...]}), so equal files have equal
names. Reading and writing hold a chunk or two in memory, never a whole blob. A recipe from another
machine may be wrong about its chunks; reading the blob then raises ProtocolError.
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Self
from urllib.parse import urlsplit
from urllib.request import url2pathname

from blake3 import blake3
from pydantic import ValidationError

from blocktrain.errors import ConfigError, ProtocolError, RunError
from blocktrain.protocol.messages import CHUNK_BYTES, MOST_CHUNKS, Blob, Recipe
from blocktrain.storage.chunks import (
    Buffer,
    ChunkStore,
    IncomingChunk,
    LocalChunks,
    altered,
    name_of,
)
from blocktrain.storage.s3_chunks import open_s3

SKIPPED_BYTES = 256 * 1024  # read at a time, of bytes that are only hashed
KEPT_AT_ONCE = 4  # chunks of one file that are being synced to the disk


def open_chunks(url: str, reserved: int = 0) -> ChunkStore:
    """The store at a path, a file:// URL, or s3://BUCKET/PREFIX?endpoint=URL&region=NAME.
    `reserved`: bytes of a disk that are left to others."""
    scheme, separator, _ = url.partition("://")
    if not url:
        raise ConfigError("the address of the chunk store is empty; use a path or s3://BUCKET/...")
    if not separator:
        return LocalChunks(Path(url).expanduser(), reserved=reserved)
    if scheme == "file":
        return LocalChunks(_path_of_file_url(url), reserved=reserved)
    if scheme == "s3":
        return open_s3(url)
    raise ConfigError(f"{scheme}:// is not a chunk store; use a path, file:// or s3://")


class Blobs:
    """The files of a chunk store."""

    def __init__(self, chunks: ChunkStore) -> None:
        self.chunks = chunks

    def write(self, parts: Iterable[Buffer]) -> Blob:
        with self.writer() as writer:
            for part in parts:
                writer.write(part)
            return writer.finish()

    def writer(self) -> "BlobWriter":
        return BlobWriter(self)

    def add_recipe(self, recipe: Recipe) -> Blob:
        """Store a recipe and return its blob. The chunks need not be stored yet."""
        _check_fit(recipe)
        return Blob(name=self.chunks.put(_canonical(recipe)), size=recipe.size)

    def recipe(self, name: str) -> Recipe:
        data = self.chunks.get(name)
        try:
            recipe = Recipe.model_validate_json(data)
        except ValidationError:
            raise ProtocolError(
                f"chunk {name} is not a recipe; check the name of the blob"
            ) from None
        if _canonical(recipe) != data:
            raise ProtocolError(f"recipe {name} is not in its canonical form")
        _check_fit(recipe)
        return recipe

    def reader(self, blob: Blob | Recipe) -> "BlobReader":
        """A reader of a file, by its name and expected size or by its recipe."""
        return BlobReader(self.chunks, self._recipe_of(blob))

    def forward_reader(self, blob: Blob | Recipe) -> "ForwardReader":
        return ForwardReader(self.chunks, self._recipe_of(blob))

    def chunks_of(self, name: str) -> set[str]:
        """The names of a file's chunks and of its recipe."""
        return {name, *self.recipe(name).chunks}

    def _recipe_of(self, blob: Blob | Recipe) -> Recipe:
        if isinstance(blob, Recipe):
            _check_fit(blob)
            return blob
        recipe = self.recipe(blob.name)
        if blob.size != recipe.size:
            raise ProtocolError(
                f"blob {blob.name} has {recipe.size} bytes by its recipe, but {blob.size} were"
                " announced"
            )
        return recipe


class BlobWriter:
    """Writes a file in parts of any length; `finish` names it. Earlier chunks are synced to the
    disk while later parts arrive. An unfinished chunk is discarded."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._names: list[Future[str]] = []
        self._keeping = ThreadPoolExecutor(KEPT_AT_ONCE)
        self._chunk: IncomingChunk | None = None
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._keeping.shutdown()
        if self._chunk:
            self._chunk.__exit__(*exception)

    def write(self, part: Buffer) -> None:
        view = memoryview(part).cast("B")
        self._size += len(view)
        while view:
            self._chunk = self._chunk or self._new_chunk()
            piece = view[: CHUNK_BYTES - self._chunk.size]
            self._chunk.write(piece)
            view = view[len(piece) :]
            if self._chunk.size == CHUNK_BYTES:
                self._store(self._chunk)

    def finish(self) -> Blob:
        if self._chunk:
            self._store(self._chunk)
        names = tuple(name.result() for name in self._names)
        return self._blobs.add_recipe(Recipe(size=self._size, chunks=names))

    def _new_chunk(self) -> IncomingChunk:
        if len(self._names) == MOST_CHUNKS:
            raise ProtocolError(f"a blob has at most {MOST_CHUNKS} chunks; use smaller blocks")
        if len(self._names) > KEPT_AT_ONCE:  # wait for a store that is slower than the writer
            self._names[-1 - KEPT_AT_ONCE].result()
        return self._blobs.chunks.incoming()

    def _store(self, chunk: IncomingChunk) -> None:
        self._names.append(self._keeping.submit(_keep, chunk))
        self._chunk = None


def _keep(chunk: IncomingChunk) -> str:
    with chunk:
        return chunk.keep()


class BlobReader:
    """Reads a file in any order. Each chunk is verified before any of its bytes is returned, and
    the last chunk is cached. For one thread at a time."""

    def __init__(self, chunks: ChunkStore, recipe: Recipe) -> None:
        self.size = recipe.size
        self.chunk_count = len(recipe.chunks)
        self._chunks, self._recipe = chunks, recipe
        self._last: tuple[int, bytes] | None = None

    def read(self, offset: int, length: int) -> bytes:
        """Read exactly `length` bytes, which must be inside the file."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise ValueError(f"bytes {offset} to {offset + length} exceed a file of {self.size}")
        parts = []
        while length:
            index, start = divmod(offset, CHUNK_BYTES)
            part = self._part(index, start, min(length, self._length(index) - start))
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def chunk(self, index: int) -> bytes:
        """Read one chunk without caching it."""
        data = self._chunks.get(self._recipe.chunks[index])
        if len(data) != self._length(index):
            raise ProtocolError(
                f"chunk {index} of a blob has {len(data)} bytes, but its recipe says"
                f" {self._length(index)}; send the blob again"
            )
        return data

    def _part(self, index: int, start: int, length: int) -> bytes:
        """Read bytes of one chunk."""
        if not self._last or self._last[0] != index:
            self._last = None  # first, so that only one chunk is in memory
            self._last = (index, self.chunk(index))
        return self._last[1][start : start + length]

    def _length(self, index: int) -> int:
        return min(CHUNK_BYTES, self.size - index * CHUNK_BYTES)


class ForwardReader(BlobReader):
    """Reads a file from start to end, with only the requested bytes in memory. A chunk is verified
    when its last byte is read, and the last chunk by `finish`; results made from the bytes must not
    be used before. Going back reads the chunk again from its start. Keeps a file open until
    `close`."""

    def __init__(self, chunks: ChunkStore, recipe: Recipe) -> None:
        super().__init__(chunks, recipe)
        self._file: IO[bytes] | None = None
        self._index, self._place, self._hash = -1, 0, blake3()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def finish(self) -> None:
        """Verify the chunk that was read last."""
        if self._file:
            self._skip_to(self._length(self._index))

    def close(self) -> None:
        if self._file:
            self._file.close()
            self._file = None

    def _part(self, index: int, start: int, length: int) -> bytes:
        if not self._file or index != self._index:
            self.finish()
            self.close()
            self._file, size = self._chunks.open(self._recipe.chunks[index])
            self._index, self._place, self._hash = index, 0, blake3()
            if size != self._length(index):
                self.chunk(index)  # raises: the chunk was altered, or the recipe is wrong
        elif start < self._place:
            self.finish()
            self._file.seek(0)
            self._place, self._hash = 0, blake3()
        self._skip_to(start)
        return self._next(length)

    def _skip_to(self, place: int) -> None:
        while self._place < place:
            self._next(min(SKIPPED_BYTES, place - self._place))

    def _next(self, length: int) -> bytes:
        assert self._file, "the chunk is open"
        data = _read(self._file, length)
        self._hash.update(data)
        self._place += len(data)
        name, is_read = self._recipe.chunks[self._index], self._place == self._length(self._index)
        if len(data) != length or (is_read and self._hash.hexdigest() != name):
            raise altered(name, self._chunks)
        return data


def _read(file: IO[bytes], length: int) -> bytes:
    try:
        return file.read(length)
    except OSError as error:
        raise RunError(f"cannot read a chunk: {error.strerror}; check the store's disk") from None


def blob_of(recipe: Recipe) -> Blob:
    """The blob that a recipe names, whether or not it is stored."""
    return Blob(name=name_of(_canonical(recipe)), size=recipe.size)


def _canonical(recipe: Recipe) -> bytes:
    return recipe.model_dump_json().encode()


def _check_fit(recipe: Recipe) -> None:
    needed = -(-recipe.size // CHUNK_BYTES)
    if len(recipe.chunks) != needed:
        raise ProtocolError(
            f"a recipe for {recipe.size} bytes has {len(recipe.chunks)} chunks instead of {needed}"
        )


def _path_of_file_url(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.strip("/"):
        raise ConfigError(f"{url} is not a folder of this machine; write file:///PATH")
    return Path(url2pathname(parts.path))
