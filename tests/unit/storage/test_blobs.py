import os
import tracemalloc
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import IO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.blobs import whole

from blocktrain.errors import CorruptFileError, NotFoundError, ProtocolError
from blocktrain.protocol.messages import CHUNK_BYTES, Blob, Recipe
from blocktrain.storage.blobs import BlobReader, Blobs, ForwardReader
from blocktrain.storage.chunks import LocalChunks, name_of, place_of

SIZE = 2 * CHUNK_BYTES + 12345
DATA = np.random.default_rng(0).bytes(SIZE)


@pytest.fixture(scope="module")
def blobs(tmp_path_factory: pytest.TempPathFactory) -> Blobs:
    return Blobs(LocalChunks(tmp_path_factory.mktemp("chunks"), sync=False))


@pytest.fixture(scope="module")
def blob(blobs: Blobs) -> Blob:
    return blobs.write([DATA])


def parts(data: bytes, length: int) -> Iterator[bytes]:
    for start in range(0, len(data), length):
        yield data[start : start + length]


@pytest.mark.parametrize("length", [100_003, 1 << 20, CHUNK_BYTES, CHUNK_BYTES + 1, SIZE])
def test_parts_of_any_length_make_the_same_blob(blobs: Blobs, blob: Blob, length: int):
    assert blobs.write(parts(DATA, length)) == blob
    recipe = blobs.recipe(blob.name)
    assert recipe.size == blob.size == SIZE
    assert recipe.chunks == tuple(name_of(part) for part in parts(DATA, CHUNK_BYTES))
    assert whole(blobs, blob) == DATA


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_sizes_at_the_borders(blobs: Blobs, size: int):
    blob = blobs.write([DATA[:size], b""])
    assert blob.size == size
    assert len(blobs.recipe(blob.name).chunks) == -(-size // CHUNK_BYTES)
    assert whole(blobs, blob) == DATA[:size]


def test_a_name_is_the_hash_of_the_canonical_recipe(blobs: Blobs):
    assert blobs.write([]).name == name_of(b'{"size":0,"chunks":[]}')
    one = blobs.write([b"x"])
    assert one.name == name_of(b'{"size":1,"chunks":["%s"]}' % name_of(b"x").encode())


@settings(max_examples=40, deadline=None)
@given(st.integers(0, SIZE), st.integers(0, SIZE))
def test_any_part_can_be_read(blobs: Blobs, blob: Blob, first: int, second: int):
    start, end = sorted((first, second))
    assert blobs.reader(blob).read(start, end - start) == DATA[start:end]
    with blobs.forward_reader(blob) as reader:
        assert reader.read(start, end - start) == DATA[start:end]


class Counting(LocalChunks):
    """Counts how often a chunk is read, which is a download in S3."""

    loads = 0

    def open(self, name: str) -> tuple[IO[bytes], int]:
        self.loads += 1
        return super().open(name)


def test_reading_on_loads_each_chunk_once(blobs: Blobs, blob: Blob):
    assert isinstance(blobs.chunks, LocalChunks)
    counting = Counting(blobs.chunks.folder)
    reader = BlobReader(counting, blobs.recipe(blob.name))
    found = b"".join(reader.read(at, min(999_983, SIZE - at)) for at in range(0, SIZE, 999_983))
    assert found == DATA
    assert counting.loads == 3
    reader.read(SIZE - 1, 1)
    assert counting.loads == 3


# Reading from start to end

PART = 131_072 + 7


def read_on(reader: BlobReader, start: int = 0) -> bytes:
    places = range(start, SIZE, PART)
    return b"".join(reader.read(place, min(PART, SIZE - place)) for place in places)


def test_reading_forward_takes_the_memory_of_a_part(blobs: Blobs, blob: Blob):
    tracemalloc.start()
    try:
        with blobs.forward_reader(blob) as reader:
            for place in range(12, SIZE - PART, PART):
                assert reader.read(place, PART) == DATA[place : place + PART]
            reader.finish()
        assert tracemalloc.get_traced_memory()[1] < 2e6
    finally:
        tracemalloc.stop()


def test_reading_forward_reads_every_byte_once(blobs: Blobs, blob: Blob):
    counted = []

    class Counted(FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            data = super().read(size)
            counted.append(len(data))
            return data

    class Files(LocalChunks):
        def open(self, name: str) -> tuple[IO[bytes], int]:
            path = self.folder / place_of(name)
            return Counted(path), path.stat().st_size

    assert isinstance(blobs.chunks, LocalChunks)
    with ForwardReader(Files(blobs.chunks.folder), blobs.recipe(blob.name)) as reader:
        assert read_on(reader) == DATA
        reader.finish()
    assert sum(counted) == SIZE


def test_reading_forward_opens_each_chunk_once(blobs: Blobs, blob: Blob):
    assert isinstance(blobs.chunks, LocalChunks)
    counting = Counting(blobs.chunks.folder)
    with ForwardReader(counting, blobs.recipe(blob.name)) as reader:
        assert read_on(reader) == DATA
        reader.read(SIZE - 10, 10)  # going back in a chunk does not open it again
        reader.finish()
    assert counting.loads == 3


def damaged(folder: Path, place: int, damage: str = "flipped") -> ForwardReader:
    """A file of which a byte was altered, or one of its chunks ends before that."""
    blobs = Blobs(LocalChunks(folder, sync=False))
    blob = blobs.write([DATA])
    index, inside = divmod(place, CHUNK_BYTES)
    path = folder / place_of(blobs.recipe(blob.name).chunks[index])
    data = bytearray(path.read_bytes())
    data[inside] ^= 1
    path.write_bytes(data[:inside] if damage == "cut" else data)
    return blobs.forward_reader(blob)


@pytest.mark.parametrize("place", [0, CHUNK_BYTES - 1, CHUNK_BYTES, SIZE - 1])
@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_reading_forward_notices_altered_bytes_before_the_end(
    tmp_path: Path, place: int, damage: str
):
    with damaged(tmp_path, place, damage) as reader, pytest.raises(CorruptFileError):
        read_on(reader)


@pytest.mark.parametrize("place", [0, CHUNK_BYTES - 1, CHUNK_BYTES, SIZE - 1])
def test_finishing_early_notices_altered_bytes_behind(tmp_path: Path, place: int):
    with damaged(tmp_path, place) as reader:
        reader.read(place // CHUNK_BYTES * CHUNK_BYTES, 12)
        with pytest.raises(CorruptFileError):
            reader.finish()


def test_going_back_or_elsewhere_notices_altered_bytes(tmp_path: Path):
    blobs = Blobs(LocalChunks(tmp_path, sync=False))
    blob = blobs.write([DATA])
    path = tmp_path / place_of(blobs.recipe(blob.name).chunks[0])
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    for elsewhere in (0, CHUNK_BYTES):
        with blobs.forward_reader(blob) as reader:
            reader.read(0, 12)
            with pytest.raises(CorruptFileError):
                reader.read(elsewhere, 12)


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, -1), (0, SIZE + 1), (SIZE, 1)])
def test_reading_past_the_file_is_refused(blobs: Blobs, blob: Blob, offset: int, length: int):
    with pytest.raises(ValueError, match=str(SIZE)):
        blobs.reader(blob).read(offset, length)


def test_writing_and_reading_take_two_chunks_of_memory(tmp_path: Path):
    blobs = Blobs(LocalChunks(tmp_path, sync=False))
    part = bytes(1 << 20)
    tracemalloc.start()
    try:
        blob = blobs.write(part for _ in range(40))
        reader = blobs.reader(blob)
        for offset in range(0, blob.size, 1 << 20):
            reader.read(offset, 1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 2.5 * CHUNK_BYTES
    finally:
        tracemalloc.stop()


def test_a_recipe_can_be_added_before_its_chunks(blobs: Blobs):
    data = os.urandom(10)
    blob = blobs.add_recipe(Recipe(size=10, chunks=(name_of(data),)))
    with pytest.raises(NotFoundError):
        blobs.reader(blob).read(0, 1)
    blobs.chunks.put(data)
    assert blobs.reader(blob).read(0, 10) == data
    assert blobs.write([data]) == blob


def test_what_a_blob_needs_is_known(blobs: Blobs, blob: Blob):
    assert blobs.chunks_of(blob.name) == {
        blob.name, *(name_of(part) for part in parts(DATA, CHUNK_BYTES))
    }  # fmt: skip


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(size=0, chunks=("0" * 64,)),
        Recipe(size=1, chunks=()),
        Recipe(size=CHUNK_BYTES + 1, chunks=("0" * 64,)),
        Recipe(size=CHUNK_BYTES, chunks=("0" * 64,) * 2),
        Recipe(size=2**53, chunks=("0" * 64,)),
    ],
)
def test_a_recipe_that_does_not_fit_its_size_is_refused(blobs: Blobs, recipe: Recipe):
    with pytest.raises(ProtocolError, match="chunks instead of"):
        blobs.add_recipe(recipe)
    name = blobs.chunks.put(recipe.model_dump_json().encode())
    with pytest.raises(ProtocolError, match="chunks instead of"):
        blobs.recipe(name)


HASH = b'"' + b"0" * 64 + b'"'


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a recipe"),
        (b"\xff\x00", "not a recipe"),
        (b"[]", "not a recipe"),
        (b'{"size":1}', "not a recipe"),
        (b'{"size":1,"chunks":["../../etc"]}', "not a recipe"),
        (b'{"size":-1,"chunks":[]}', "not a recipe"),
        (b'{"size":1.0,"chunks":[%s]}' % HASH, "not a recipe"),
        (b'{"size":1,"chunks":[%s],"x":1}' % HASH, "not a recipe"),
        (b'{"size":1,"chunks":%s}' % (b"[" * 10_000), "not a recipe"),
        (b'{"size": 1, "chunks": [%s]}' % HASH, "canonical"),
        (b'{"chunks":[%s],"size":1}' % HASH, "canonical"),
        (b'{"size":2,"size":1,"chunks":[%s]}' % HASH, "canonical|not a recipe"),
    ],
)
def test_what_is_no_recipe_is_refused(blobs: Blobs, data: bytes, message: str):
    name = blobs.chunks.put(data)
    with pytest.raises(ProtocolError, match=message):
        blobs.recipe(name)


def test_a_size_that_is_not_the_recipes_is_refused(blobs: Blobs, blob: Blob):
    with pytest.raises(ProtocolError, match="but 16789560 were announced"):
        blobs.reader(Blob(name=blob.name, size=blob.size - 1))


@pytest.mark.parametrize("chunk", [b"", b"123", b"12345", DATA[:CHUNK_BYTES]])
def test_a_chunk_that_is_not_as_long_as_its_recipe_says_is_refused(blobs: Blobs, chunk: bytes):
    blob = blobs.add_recipe(Recipe(size=4, chunks=(blobs.chunks.put(chunk),)))
    with pytest.raises(ProtocolError, match="its recipe says"):
        blobs.reader(blob).read(0, 4)
    with blobs.forward_reader(blob) as reader, pytest.raises(ProtocolError, match="recipe says"):
        reader.read(0, 4)


def test_an_altered_chunk_is_named(tmp_path: Path):
    chunks = LocalChunks(tmp_path, sync=False)
    blob = Blobs(chunks).write([b"some bytes"])
    name = name_of(b"some bytes")
    (tmp_path / name[:2] / name[2:]).write_bytes(b"some bites")
    with pytest.raises(CorruptFileError, match=name):
        Blobs(chunks).reader(blob).read(0, 10)
