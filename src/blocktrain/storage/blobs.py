"""Blobs: files of any size as recipes of chunks; the recipe is a chunk too, and names the blob.

A recipe is canonical JSON ({"size":N,"chunks":[...]}), so equal files have equal names. Nothing
is ever assembled: writing and reading hold a chunk or two in memory. A recipe that comes from
elsewhere may lie about its chunks; whoever reads through it gets a `ProtocolError` then. Knows
nothing of what is in a file.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from typing import Self

from blake3 import blake3
from pydantic import ValidationError

from blocktrain.errors import ProtocolError, RunError
from blocktrain.protocol.messages import CHUNK_BYTES, MOST_CHUNKS, Blob, Recipe
from blocktrain.storage.chunks import Buffer, ChunkStore, Incoming, Opened, altered, verified
from blocktrain.storage.shelf import CachedChunkFile

SKIPPED_BYTES = 256 * 1024  # at a time, of what is only hashed
KEPT_AT_ONCE = 4  # chunks of one file that are on their way to the disk


class Blobs:
    """The files of a chunk store."""

    def __init__(self, chunks: ChunkStore) -> None:
        self.chunks = chunks

    def write(self, parts: Iterable[Buffer]) -> Blob:
        with self.writer() as writer:
            for part in parts:
                writer.write(part)
            return writer.finish()

    def writer(self, size: int | None = None) -> "BlobWriter":
        """`size`: what the file will have, where that is known."""
        return BlobWriter(self, size)

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

    def reader(self, blob: Blob | Recipe | str, *, checked: bool = True) -> "BlobReader":
        """A file by its name, by name and the size it must have, or by what it is made of. Not
        `checked`: its pieces were hashed a moment ago, and will be again before they matter."""
        return BlobReader(self.chunks, self._recipe_of(blob), checked)

    def forward_reader(self, blob: Blob | Recipe | str) -> "ForwardReader":
        """The same for who reads a file from its start to its end."""
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
    """A file that is written in parts of any length; it is one once `finish` has named it. Parts
    go on to the store as they come, and while the next ones come the store makes its disk hold
    what it has. Nothing is left of a chunk that does not come to its end."""

    def __init__(self, blobs: Blobs, expected: int | None = None) -> None:
        self._blobs, self._expected = blobs, expected
        self._names: list[Future[str]] = []
        self._keeping = ThreadPoolExecutor(KEPT_AT_ONCE)
        self._chunk: Incoming | None = None
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
            self._chunk = self._chunk or self._begun()
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

    def _begun(self) -> Incoming:
        if len(self._names) == MOST_CHUNKS:
            raise ProtocolError(f"a blob has at most {MOST_CHUNKS} chunks")
        if len(self._names) > KEPT_AT_ONCE:  # a store that is slower than we are sets the pace
            self._names[-1 - KEPT_AT_ONCE].result()
        return self._blobs.chunks.incoming(self._expected)

    def _store(self, chunk: Incoming) -> None:
        self._names.append(self._keeping.submit(_kept, chunk))
        self._chunk = None


def _kept(chunk: Incoming) -> str:
    with chunk:
        return chunk.keep()


class BlobReader:
    """A file that is read in parts; remembers the last chunk. For one thread at a time."""

    def __init__(self, chunks: ChunkStore, recipe: Recipe, checked: bool = True) -> None:
        self._checked = checked
        self.size = recipe.size
        self.chunk_count = len(recipe.chunks)
        self._chunks = chunks
        self._recipe = recipe
        self._held: tuple[int, bytes] | None = None

    def read(self, offset: int, length: int) -> bytes:
        """Exactly these bytes, which must lie inside the file."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise ValueError(f"bytes {offset} to {offset + length} of a file of {self.size}")
        parts = []
        while length:
            index, skipped = divmod(offset, CHUNK_BYTES)
            parts.append(self._part(index, skipped, length))
            offset += len(parts[-1])
            length -= len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def stream(self, start: int = 0) -> Iterator[bytes]:
        """The file from byte `start` on."""
        while start < self.size:
            index, skipped = divmod(start, CHUNK_BYTES)
            part = self.chunk(index)[skipped:]
            yield part
            start += len(part)

    def parts(self, index: int, lengths: Sequence[int]) -> Iterator[memoryview]:
        """One chunk, cut into parts of these lengths; a part lasts until the next one is asked for.
        That the chunk was altered is noticed before its last part is given: what was made of those
        before may not count until then."""
        name = self._recipe.chunks[index]
        file, size = self._chunks.open(name)
        with file:
            self._check_size(index, size)
            if isinstance(file, CachedChunkFile):  # hashed when it came, and in memory ever since
                yield from map(file.view, lengths)
            else:
                yield from self._read_parts(file, name, lengths)

    def _read_parts(self, file: Opened, name: str, lengths: Sequence[int]) -> Iterator[memoryview]:
        buffer, hashed, left = memoryview(bytearray(max(lengths))), blake3(), sum(lengths)
        for length in lengths:
            part = buffer[:length]
            _read_into(file, part)
            left -= length
            if self._checked:
                hashed.update(part)
                if not left and hashed.hexdigest() != name:
                    raise altered(name, self._chunks)
            yield part

    def chunk(self, index: int) -> bytes:
        """One chunk, which is not remembered."""
        data = self._chunks.get(self._recipe.chunks[index])
        self._check_size(index, len(data))
        return data

    def forget(self) -> None:
        """Let go of the remembered chunk."""
        self._held = None

    def _part(self, index: int, start: int, length: int) -> bytes:
        """So much of a chunk as is there; of one in memory, no more than that is copied."""
        if self._held and self._held[0] == index:
            return self._held[1][start : start + length]
        self._held = None  # two chunks at a time are one too many
        file, size = self._chunks.open(self._recipe.chunks[index])
        with file:
            if isinstance(file, CachedChunkFile):
                self._check_size(index, size)
                file.seek(start)
                return file.read(length)
            return self._part_of_file(file, index, start, length)

    def _part_of_file(self, file: Opened, index: int, start: int, length: int) -> bytes:
        data = verified(_read(file), self._recipe.chunks[index], self._chunks)
        self._check_size(index, len(data))
        self._held = (index, data)
        return data[start : start + length]

    def _check_size(self, index: int, found: int) -> None:
        if found != self._length(index):
            raise ProtocolError(f"chunk {index} of a blob has {found} bytes, not its recipe's")

    def _length(self, index: int) -> int:
        return min(CHUNK_BYTES, self.size - index * CHUNK_BYTES)


class ForwardReader(BlobReader):
    """A file that is read from its start to its end: of a chunk on a disk only the part that is
    asked for is in memory, and hashed as it is read. Who goes back reads its chunk again from the
    start. That a chunk was altered is
    noticed when all of it was read, and of the last one by `finish`: what was made of it may not
    count until then. A chunk that came over a network stays in memory until it is forgotten."""

    def __init__(self, chunks: ChunkStore, recipe: Recipe) -> None:
        super().__init__(chunks, recipe)
        self._index, self._hashed, self._hash = 0, 0, blake3()

    def finish(self) -> None:
        """Notice whether the chunk that was read last was altered."""
        if 0 < self._hashed < self._length(self._index):
            file, _ = self._chunks.open(self._recipe.chunks[self._index])
            with file:
                self._read_up_to(self._length(self._index), file)

    def _part_of_file(self, file: Opened, index: int, start: int, length: int) -> bytes:
        if not isinstance(file, FileIO):
            return super()._part_of_file(file, index, start, length)
        if index != self._index or start < self._hashed:
            self.finish()
            self._index, self._hashed, self._hash = index, 0, blake3()
        self._read_up_to(start, file)
        return self._read_on(min(length, self._length(index) - start), file)

    def _read_up_to(self, end: int, file: Opened) -> None:
        while self._hashed < end:
            self._read_on(min(SKIPPED_BYTES, end - self._hashed), file)

    def _read_on(self, length: int, file: Opened) -> bytes:
        """The next bytes, from where those end that were hashed."""
        file.seek(self._hashed)
        data = _read(file, length)
        self._hash.update(data)
        self._hashed += length
        name, is_whole = self._recipe.chunks[self._index], self._hashed == self._length(self._index)
        if len(data) != length or (is_whole and self._hash.hexdigest() != name):
            raise altered(name, self._chunks)
        return data


def _read_into(file: Opened, part: memoryview) -> None:
    while part and (count := file.readinto(part)):
        part = part[count:]


def _read(file: Opened, length: int = -1) -> bytes:
    try:
        return file.read(length)
    except OSError as error:
        raise RunError(f"a chunk cannot be read: {error.strerror}") from None


def _canonical(recipe: Recipe) -> bytes:
    return recipe.model_dump_json().encode()


def _check_fit(recipe: Recipe) -> None:
    needed = -(-recipe.size // CHUNK_BYTES)
    if len(recipe.chunks) != needed:
        raise ProtocolError(
            f"a recipe for {recipe.size} bytes has {needed} chunks, not {len(recipe.chunks)}"
        )
