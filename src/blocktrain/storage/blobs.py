"""Blobs: files of any size as recipes of chunks; the recipe is a chunk too, and names the blob.

A recipe is canonical JSON ({"size":N,"chunks":[...]}), so equal files have equal names. No blob is
ever assembled: writing and reading hold a chunk or two in memory. A recipe from elsewhere may lie
about its chunks; reading through it raises a ProtocolError then.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Self
from urllib.parse import urlsplit
from urllib.request import url2pathname

from blake3 import blake3
from pydantic import ValidationError

from blocktrain.errors import ConfigError, ProtocolError, RunError
from blocktrain.protocol.messages import CHUNK_BYTES, MOST_CHUNKS, Blob, Recipe
from blocktrain.storage.chunks import Buffer, ChunkStore, IncomingChunk, LocalChunks, altered
from blocktrain.storage.s3_chunks import open_s3

SKIPPED_BYTES = 256 * 1024  # at a time, of what is only hashed
KEPT_AT_ONCE = 4  # chunks of one file that are on their way to the disk


def open_chunks(url: str) -> ChunkStore:
    """The store at a path, a file:// URL, or s3://BUCKET/PREFIX?endpoint=URL&region=NAME."""
    scheme, separator, _ = url.partition("://")
    if not url:
        raise ConfigError("the chunk store needs a path or an s3:// address")
    if not separator:
        return LocalChunks(Path(url).expanduser())
    if scheme == "file":
        return LocalChunks(_path_of_file_url(url))
    if scheme == "s3":
        return open_s3(url)
    raise ConfigError(f"a chunk store is a path, file:// or s3://, not {scheme}://")


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
        """Name the file that these chunks make, whether or not they are stored yet."""
        _check_fit(recipe)
        return Blob(name=self.chunks.put(_canonical(recipe)), size=recipe.size)

    def recipe(self, name: str) -> Recipe:
        data = self.chunks.get(name)
        try:
            recipe = Recipe.model_validate_json(data)
        except ValidationError:
            raise ProtocolError(f"chunk {name} is not a recipe") from None
        if _canonical(recipe) != data:
            raise ProtocolError(f"recipe {name} is not in its canonical form")
        _check_fit(recipe)
        return recipe

    def reader(self, blob: Blob | Recipe | str) -> "BlobReader":
        """A file by its name, by its name and the size it must have, or by its recipe."""
        return BlobReader(self.chunks, self._recipe_of(blob))

    def forward_reader(self, blob: Blob | Recipe | str) -> "ForwardReader":
        return ForwardReader(self.chunks, self._recipe_of(blob))

    def chunks_of(self, name: str) -> set[str]:
        """Every chunk the file needs, with its recipe."""
        return {name, *self.recipe(name).chunks}

    def _recipe_of(self, blob: Blob | Recipe | str) -> Recipe:
        if isinstance(blob, Recipe):
            _check_fit(blob)
            return blob
        name = blob if isinstance(blob, str) else blob.name
        recipe = self.recipe(name)
        if isinstance(blob, Blob) and blob.size != recipe.size:
            raise ProtocolError(f"blob {name} has {recipe.size} bytes, not {blob.size}")
        return recipe


class BlobWriter:
    """Writes a file in parts of any length; `finish` names it. While parts arrive, earlier chunks
    are synced to the disk. Nothing is left of a chunk that was not finished."""

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
            taken = view[: CHUNK_BYTES - self._chunk.size]
            self._chunk.write(taken)
            view = view[len(taken) :]
            if self._chunk.size == CHUNK_BYTES:
                self._store(self._chunk)

    def finish(self) -> Blob:
        if self._chunk:
            self._store(self._chunk)
        names = tuple(name.result() for name in self._names)
        return self._blobs.add_recipe(Recipe(size=self._size, chunks=names))

    def _new_chunk(self) -> IncomingChunk:
        if len(self._names) == MOST_CHUNKS:
            raise ProtocolError(f"a blob has at most {MOST_CHUNKS} chunks")
        if len(self._names) > KEPT_AT_ONCE:  # wait for a store that is slower than the writer
            self._names[-1 - KEPT_AT_ONCE].result()
        return self._blobs.chunks.incoming()

    def _store(self, chunk: IncomingChunk) -> None:
        self._names.append(self._keeping.submit(_kept, chunk))
        self._chunk = None


def _kept(chunk: IncomingChunk) -> str:
    with chunk:
        return chunk.keep()


class BlobReader:
    """Reads a file in any order, each chunk checked before a byte of it is returned. Remembers the
    last chunk. For one thread at a time."""

    def __init__(self, chunks: ChunkStore, recipe: Recipe) -> None:
        self.size = recipe.size
        self.chunk_count = len(recipe.chunks)
        self._chunks, self._recipe = chunks, recipe
        self._last: tuple[int, bytes] | None = None

    def read(self, offset: int, length: int) -> bytes:
        """Exactly these bytes, which must be inside the file."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise ValueError(f"bytes {offset} to {offset + length} of a file of {self.size}")
        parts = []
        while length:
            index, start = divmod(offset, CHUNK_BYTES)
            part = self._part(index, start, min(length, self._length(index) - start))
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def stream(self, start: int = 0) -> Iterator[bytes]:
        """The file from byte `start` on."""
        while start < self.size:
            index, skipped = divmod(start, CHUNK_BYTES)
            part = self.chunk(index)[skipped:]
            yield part
            start += len(part)

    def chunk(self, index: int) -> bytes:
        """One chunk, which is not remembered."""
        data = self._chunks.get(self._recipe.chunks[index])
        self._check_size(index, len(data))
        return data

    def _part(self, index: int, start: int, length: int) -> bytes:
        """Bytes of one chunk."""
        if not self._last or self._last[0] != index:
            self._last = None  # so that there is only one chunk in memory
            self._last = (index, self.chunk(index))
        return self._last[1][start : start + length]

    def _check_size(self, index: int, size: int) -> None:
        if size != self._length(index):
            raise ProtocolError(
                f"chunk {index} of a blob has {size} bytes, its recipe says {self._length(index)}"
            )

    def _length(self, index: int) -> int:
        return min(CHUNK_BYTES, self.size - index * CHUNK_BYTES)


class ForwardReader(BlobReader):
    """Reads a file from its start to its end. Only what is asked for is in memory, so a chunk is
    checked when its last byte is read, and the last chunk by `finish`: what was made of the bytes
    may not count until then. Going back reads the chunk again from its start. Holds a file open
    until it is closed."""

    def __init__(self, chunks: ChunkStore, recipe: Recipe) -> None:
        super().__init__(chunks, recipe)
        self._file: IO[bytes] | None = None
        self._index, self._place, self._hash = -1, 0, blake3()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def finish(self) -> None:
        """Check the chunk that was read last."""
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
                self.chunk(index)  # raises: it was altered, or the recipe lies about it
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
        raise RunError(f"cannot read a chunk: {error.strerror}") from None


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
        raise ConfigError(f"{url} names no folder of this machine; write file:///PATH")
    return Path(url2pathname(parts.path))
