import os
import tracemalloc
from collections.abc import Iterator
from io import BytesIO, FileIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktrain.errors import CorruptFileError, NotFoundError, ProtocolError
from blocktrain.protocol.messages import CHUNK_BYTES, Blob, Recipe
from blocktrain.storage.blobs import BlobReader, Blobs, ForwardReader
from blocktrain.storage.chunks import LocalChunks, Opened, name_of, place_of
from blocktrain.storage.shelf import ChunkCache

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
    assert b"".join(blobs.reader(blob).stream()) == DATA


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_sizes_at_the_borders(blobs: Blobs, size: int):
    blob = blobs.write([DATA[:size], b""])
    assert blob.size == size
    assert len(blobs.recipe(blob.name).chunks) == -(-size // CHUNK_BYTES)
    assert b"".join(blobs.reader(blob.name).stream()) == DATA[:size]


def test_a_name_is_the_hash_of_the_canonical_recipe(blobs: Blobs):
    assert blobs.write([]).name == name_of(b'{"size":0,"chunks":[]}')
    one = blobs.write([b"x"])
    assert one.name == name_of(b'{"size":1,"chunks":["%s"]}' % name_of(b"x").encode())


@settings(max_examples=40)
@given(st.integers(0, SIZE), st.integers(0, SIZE))
def test_any_part_can_be_read(blobs: Blobs, blob: Blob, first: int, second: int):
    start, end = sorted((first, second))
    for reader in (blobs.reader(blob), blobs.forward_reader(blob)):
        assert reader.read(start, end - start) == DATA[start:end]


class Counting(LocalChunks):
    """A store that is asked over a network: what it opens has come as a whole."""

    loads = 0

    def open(self, name: str) -> tuple[Opened, int]:
        self.loads += 1
        file, size = super().open(name)
        with file:
            return BytesIO(file.read()), size


def test_reading_on_loads_each_chunk_once(blobs: Blobs, blob: Blob):
    assert isinstance(blobs.chunks, LocalChunks)
    counting = Counting(blobs.chunks.folder)
    reader = BlobReader(counting, blobs.recipe(blob.name))
    found = b"".join(reader.read(at, min(999_983, SIZE - at)) for at in range(0, SIZE, 999_983))
    assert found == DATA
    assert counting.loads == 3
    reader.read(SIZE - 1, 1)
    assert counting.loads == 3
    reader.forget()
    reader.read(SIZE - 1, 1)
    assert counting.loads == 4


# Reading from start to end

PART = 131_072 + 7


def read_on(reader: BlobReader, start: int = 0) -> bytes:
    places = range(start, SIZE, PART)
    return b"".join(reader.read(place, min(PART, SIZE - place)) for place in places)


def test_reading_forward_takes_the_memory_of_a_part(blobs: Blobs, blob: Blob):
    reader = blobs.forward_reader(blob)
    tracemalloc.start()
    try:
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
        def open(self, name: str) -> tuple[Opened, int]:
            return Counted(self.folder / place_of(name)), 0

    assert isinstance(blobs.chunks, LocalChunks)
    reader = ForwardReader(Files(blobs.chunks.folder), blobs.recipe(blob.name))
    assert read_on(reader) == DATA
    reader.finish()
    assert sum(counted) == SIZE


def test_reading_forward_loads_what_comes_whole_once(blobs: Blobs, blob: Blob):
    assert isinstance(blobs.chunks, LocalChunks)
    counting = Counting(blobs.chunks.folder)
    reader = ForwardReader(counting, blobs.recipe(blob.name))
    assert read_on(reader) == DATA
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
def test_who_reads_forward_notices_what_was_altered_before_the_end(
    tmp_path: Path, place: int, damage: str
):
    with pytest.raises(CorruptFileError):
        read_on(damaged(tmp_path, place, damage))


@pytest.mark.parametrize("place", [0, CHUNK_BYTES - 1, CHUNK_BYTES, SIZE - 1])
def test_who_finishes_early_notices_what_was_altered_behind(tmp_path: Path, place: int):
    reader = damaged(tmp_path, place)
    reader.read(place // CHUNK_BYTES * CHUNK_BYTES, 12)
    with pytest.raises(CorruptFileError):
        reader.finish()


def test_who_goes_back_or_elsewhere_notices_what_was_altered(tmp_path: Path):
    blobs = Blobs(LocalChunks(tmp_path, sync=False))
    blob = blobs.write([DATA])
    path = tmp_path / place_of(blobs.recipe(blob.name).chunks[0])
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    for elsewhere in (0, CHUNK_BYTES):
        reader = blobs.forward_reader(blob)
        reader.read(0, 12)
        with pytest.raises(CorruptFileError):
            reader.read(elsewhere, 12)


def test_a_chunk_that_leaves_memory_while_it_is_read_is_read_on_from_the_disk(tmp_path: Path):
    shelf = ChunkCache(8)
    blobs = Blobs(LocalChunks(tmp_path, sync=False, shelf=shelf))
    with blobs.writer(SIZE) as writer:
        writer.write(DATA)
        blob = writer.finish()
    reader = blobs.forward_reader(blob)
    assert reader.read(0, PART) == DATA[:PART]
    for name in blobs.recipe(blob.name).chunks:
        shelf.forget(name)
    assert read_on(reader, PART) == DATA[PART:]


@pytest.mark.parametrize("start", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, SIZE - 1, SIZE])
def test_a_stream_can_start_anywhere(blobs: Blobs, blob: Blob, start: int):
    assert b"".join(blobs.reader(blob).stream(start)) == DATA[start:]


def test_a_chunk_can_be_read_in_parts(blobs: Blobs, blob: Blob):
    reader = blobs.reader(blob)
    lengths = [0, 10, 1_000_000, CHUNK_BYTES - 1_000_010]
    assert (
        b"".join(bytes(part) for part in reader.parts(1, lengths))
        == DATA[CHUNK_BYTES : 2 * CHUNK_BYTES]
    )


def test_an_altered_chunk_gives_no_last_part(tmp_path: Path):
    blobs = Blobs(LocalChunks(tmp_path, sync=False))
    blob = blobs.write([DATA])
    name = blobs.recipe(blob.name).chunks[0]
    path = tmp_path / name[:2] / name[2:]
    path.write_bytes(bytes([DATA[0] ^ 1]) + path.read_bytes()[1:])
    halves = [CHUNK_BYTES // 2] * 2
    parts = blobs.reader(blob).parts(0, halves)
    next(parts)
    with pytest.raises(CorruptFileError):
        next(parts)
    unchecked = blobs.reader(blobs.recipe(blob.name), checked=False).parts(0, halves)
    assert [len(part) for part in unchecked] == halves
    path.write_bytes(path.read_bytes()[1:])
    with pytest.raises(ProtocolError, match="not its recipe's"):
        next(blobs.reader(blob).parts(0, halves))


def test_of_a_chunk_in_memory_only_what_is_asked_for_is_copied(tmp_path: Path):
    blobs = Blobs(LocalChunks(tmp_path, sync=False, shelf=ChunkCache(4)))
    data = np.random.default_rng(0).bytes(CHUNK_BYTES + 100)
    with blobs.writer(len(data)) as writer:
        writer.write(data)
        blob = writer.finish()
    reader = blobs.reader(blob)
    tracemalloc.start()
    try:
        border = reader.read(CHUNK_BYTES - 8, 16)
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()
    assert border == data[CHUNK_BYTES - 8 : CHUNK_BYTES + 8]


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
        for _ in blobs.reader(blob).stream():
            pass
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
    with pytest.raises(ProtocolError, match="chunks, not"):
        blobs.add_recipe(recipe)
    name = blobs.chunks.put(recipe.model_dump_json().encode())
    with pytest.raises(ProtocolError, match="chunks, not"):
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
        blobs.reader(name)


def test_a_size_that_is_not_the_recipes_is_refused(blobs: Blobs, blob: Blob):
    with pytest.raises(ProtocolError, match="bytes, not"):
        blobs.reader(Blob(name=blob.name, size=blob.size - 1))


@pytest.mark.parametrize("chunk", [b"", b"123", b"12345", DATA[:CHUNK_BYTES]])
def test_a_chunk_that_is_not_as_long_as_its_recipe_says_is_refused(blobs: Blobs, chunk: bytes):
    blob = blobs.add_recipe(Recipe(size=4, chunks=(blobs.chunks.put(chunk),)))
    with pytest.raises(ProtocolError, match="not its recipe's"):
        blobs.reader(blob).read(0, 4)
    with pytest.raises(ProtocolError, match="not its recipe's"):
        list(blobs.reader(blob).stream())


def test_an_altered_chunk_is_named(tmp_path: Path):
    chunks = LocalChunks(tmp_path, sync=False)
    blob = Blobs(chunks).write([b"some bytes"])
    name = name_of(b"some bytes")
    (tmp_path / name[:2] / name[2:]).write_bytes(b"some bites")
    with pytest.raises(CorruptFileError, match=name):
        Blobs(chunks).reader(blob).read(0, 10)
