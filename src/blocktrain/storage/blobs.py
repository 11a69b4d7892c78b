"""Blobs: files of any size as recipes of chunks; the recipe is a chunk too, and names the blob.

A recipe is canonical JSON ({"size":N,"chunks":[...]}), so equal files have equal names. Nothing
is ever assembled: writing and reading hold a chunk or two in memory. A recipe that comes from
elsewhere may lie about its chunks; whoever reads through it gets a `ProtocolError` then. Knows
nothing of what is in a file.
"""

from collections.abc import Iterable, Iterator

from pydantic import ValidationError

from blocktrain.errors import ProtocolError
from blocktrain.protocol.messages import CHUNK_BYTES, MOST_CHUNKS, Blob, Recipe
from blocktrain.storage.chunks import Buffer, ChunkStore


class Blobs:
    """The files of a chunk store."""

    def __init__(self, chunks: ChunkStore) -> None:
        self.chunks = chunks

    def write(self, parts: Iterable[Buffer]) -> Blob:
        writer = self.writer()
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

    def reader(self, blob: Blob | Recipe | str, *, checked: bool = True) -> "BlobReader":
        """A file by its name, by name and the size it must have, or by what it is made of. Not
        `checked`: its chunks were hashed a moment ago, and will be again before they matter."""
        if isinstance(blob, Recipe):
            _check_fit(blob)
            return BlobReader(self.chunks, blob, checked)
        name = blob if isinstance(blob, str) else blob.name
        recipe = self.recipe(name)
        if isinstance(blob, Blob) and blob.size != recipe.size:
            raise ProtocolError(f"blob {name} has {recipe.size} bytes, not {blob.size}")
        return BlobReader(self.chunks, recipe, checked)

    def chunks_of(self, name: str) -> set[str]:
        """Every chunk the file needs, with its recipe."""
        return {name, *self.recipe(name).chunks}


class BlobWriter:
    """A file that is written in parts of any length; it is one once `finish` has named it."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._names: list[str] = []
        self._held = bytearray()
        self._size = 0

    def write(self, part: Buffer) -> None:
        view = memoryview(part).cast("B")
        self._size += len(view)
        while view:
            taken = view[: CHUNK_BYTES - len(self._held)]
            self._held += taken
            view = view[len(taken) :]
            if len(self._held) == CHUNK_BYTES:
                self._store()

    def finish(self) -> Blob:
        if self._held:
            self._store()
        return self._blobs.add_recipe(Recipe(size=self._size, chunks=tuple(self._names)))

    def _store(self) -> None:
        if len(self._names) == MOST_CHUNKS:
            raise ProtocolError(f"a blob has at most {MOST_CHUNKS} chunks")
        self._names.append(self._blobs.chunks.put(self._held))
        self._held = bytearray()


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
            parts.append(self._remembered(index)[skipped : skipped + length])
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

    def chunk(self, index: int) -> bytes:
        """One chunk, which is not remembered."""
        name = self._recipe.chunks[index]
        data = self._chunks.get(name) if self._checked else self._unchecked(name)
        if len(data) != min(CHUNK_BYTES, self.size - index * CHUNK_BYTES):
            raise ProtocolError(f"chunk {index} of a blob has {len(data)} bytes, not its recipe's")
        return data

    def _unchecked(self, name: str) -> bytes:
        file, size = self._chunks.open(name)
        with file:
            return file.read(size)

    def forget(self) -> None:
        """Let go of the remembered chunk."""
        self._held = None

    def _remembered(self, index: int) -> bytes:
        if self._held is None or self._held[0] != index:
            self._held = None  # two chunks at a time are one too many
            self._held = (index, self.chunk(index))
        return self._held[1]


def _canonical(recipe: Recipe) -> bytes:
    return recipe.model_dump_json().encode()


def _check_fit(recipe: Recipe) -> None:
    needed = -(-recipe.size // CHUNK_BYTES)
    if len(recipe.chunks) != needed:
        raise ProtocolError(
            f"a recipe for {recipe.size} bytes has {needed} chunks, not {len(recipe.chunks)}"
        )
