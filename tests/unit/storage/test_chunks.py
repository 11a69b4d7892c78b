"""One contract for both stores; then what only a disk or only S3 can get wrong."""

import os
import random
import secrets
import signal
import subprocess
import sys
import textwrap
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.support.s3_server import S3Server, s3_server

from blocktrain.errors import (
    ConfigError,
    CorruptFileError,
    NotFoundError,
    ProtocolError,
    RunError,
    UnreachableError,
)
from blocktrain.protocol.messages import CHUNK_BYTES
from blocktrain.storage.blobs import open_chunks
from blocktrain.storage.chunks import ChunkStore, LocalChunks, name_of
from blocktrain.storage.s3_chunks import SPOOL_BYTES, S3Chunks

ABSENT = "0" * 64
UPLOAD = "upload01"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def s3(
    server: S3Server, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> S3Chunks:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    store = open_chunks(server.url(f"runs/{quote(request.node.name, safe='')}"))
    assert isinstance(store, S3Chunks)
    return store


@pytest.fixture
def local(tmp_path: Path) -> LocalChunks:
    return LocalChunks(tmp_path / "chunks", sync=False)


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest) -> ChunkStore:
    chosen: ChunkStore = request.getfixturevalue(request.param)
    return chosen


@pytest.mark.parametrize("data", [b"", b"x", b"hello" * 1000], ids=["empty", "one", "more"])
def test_a_chunk_comes_back_by_its_hash(store: ChunkStore, data: bytes):
    name = store.put(data)
    assert name == name_of(data)
    assert store.get(name) == data
    assert store.put(bytearray(data)) == store.put(memoryview(data)) == name
    assert [stored for stored, _ in store.stored()] == [name]


def test_the_largest_chunk_fits_and_no_larger_one(store: ChunkStore):
    data = os.urandom(CHUNK_BYTES)
    assert store.get(store.put(data)) == data
    with pytest.raises(ProtocolError, match="at most"):
        store.put(bytes(CHUNK_BYTES + 1))


def test_known_hash():
    """Of the BLAKE3 test vectors: the name must be the same on every machine."""
    assert name_of(b"").startswith("af1349b9f5f9a1a6a0404dea36dcc949")


def test_what_is_not_there_is_not_found(store: ChunkStore):
    with pytest.raises(NotFoundError, match=ABSENT):
        store.get(ABSENT)
    store.delete(ABSENT)
    assert list(store.stored()) == []


def test_which_are_there(store: ChunkStore):
    names = [store.put(bytes([i])) for i in range(20)]
    assert store.has([*names, ABSENT, names[0]]) == set(names)
    assert store.has([]) == set()
    store.delete(names[3])
    assert store.has(names) == set(names) - {names[3]}
    with pytest.raises(NotFoundError):
        store.get(names[3])


def test_stored_tells_ages(store: ChunkStore):
    names = {store.put(bytes([i])) for i in range(5)}
    stamps = dict(store.stored())
    assert stamps.keys() == names
    assert all(abs(time.time() - stamp) < 60 for stamp in stamps.values())


@pytest.mark.parametrize(
    "name", ["", "..", "../" * 20 + "etc", "A" * 64, "0" * 63, "0" * 65, "0" * 64 + "\n", "/" * 64]
)
def test_only_names_of_chunks_are_names(store: ChunkStore, name: str):
    for call in (store.get, store.delete, lambda name: store.has([name])):
        with pytest.raises(ProtocolError, match="not the name of a chunk"):
            call(name)


def test_many_threads_at_once(store: ChunkStore):
    chunks = [bytes([i % 5]) * 100_000 for i in range(40)]
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(store.put, chunks))
        assert list(pool.map(store.get, names)) == chunks
        assert list(pool.map(lambda name: store.has([name]), names)) == [{n} for n in names]
    assert len(list(store.stored())) == 5


# In parts


def test_what_comes_in_parts_is_kept_under_its_name(store: ChunkStore):
    name = name_of(b"hello world")
    with store.incoming() as arriving:
        for part in (b"hello", bytearray(b" wor"), memoryview(b"ld")):
            arriving.write(part)
        assert arriving.size == 11
        assert left(store) - partial(store) == set()
        arriving.keep(name)
        assert store.get(name) == b"hello world"
    assert left(store) == {f"{name[:2]}/{name[2:]}"}
    assert store.get(name) == b"hello world"


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(sizes=st.lists(st.integers(0, 50_000), max_size=8), seed=st.integers(0, 2**32))
@example(sizes=[SPOOL_BYTES], seed=0)
@example(sizes=[SPOOL_BYTES, 1], seed=0)
@example(sizes=[CHUNK_BYTES - 1, 1], seed=0)
@example(sizes=[], seed=0)
def test_parts_of_any_sizes_are_one_chunk(store: ChunkStore, sizes: list[int], seed: int):
    parts = [random.Random(seed + index).randbytes(size) for index, size in enumerate(sizes)]
    whole = b"".join(parts)
    with store.incoming() as arriving:
        for part in parts:
            arriving.write(part)
        arriving.keep(name_of(whole))
    assert store.get(name_of(whole)) == whole
    assert arriving.size == len(whole)
    assert store.put(whole) == name_of(whole)
    assert left(store) == {f"{name_of(whole)[:2]}/{name_of(whole)[2:]}"}
    store.delete(name_of(whole))


@pytest.mark.parametrize("sent", [b"wrong!", b"right", b"right. ", b""])
def test_parts_that_do_not_have_their_name_leave_nothing(store: ChunkStore, sent: bytes):
    def send() -> None:
        with store.incoming() as arriving:
            arriving.write(sent)
            arriving.keep(name_of(b"right."))

    with pytest.raises(ProtocolError, match="have the hash"):
        send()
    assert left(store) == set()


def test_a_wrong_name_does_not_touch_the_chunk_that_has_it(store: ChunkStore):
    name = store.put(b"right.")
    with store.incoming() as arriving:
        arriving.write(b"wrong!")
        with pytest.raises(ProtocolError):
            arriving.keep(name)
    assert store.get(name) == b"right."
    assert [stored for stored, _ in store.stored()] == [name]


@pytest.mark.parametrize("size", [0, 10, SPOOL_BYTES + 1])
def test_parts_that_nobody_keeps_leave_nothing(store: ChunkStore, size: int):
    with store.incoming() as arriving:
        arriving.write(bytes(size))
    assert left(store) == set()


def test_parts_that_are_longer_than_a_chunk_are_refused(store: ChunkStore):
    with store.incoming() as arriving:
        arriving.write(bytes(CHUNK_BYTES))
        with pytest.raises(ProtocolError, match="at most"):
            arriving.write(b"x")
    assert left(store) == set()


def test_a_line_that_breaks_leaves_nothing(store: ChunkStore):
    def break_off() -> None:
        with store.incoming() as arriving:
            arriving.write(b"half of")
            raise ConnectionError

    with pytest.raises(ConnectionError):
        break_off()
    assert left(store) == set()


def test_a_chunk_that_is_there_already_may_come_again(store: ChunkStore):
    name = store.put(b"twice")
    with store.incoming() as arriving:
        arriving.write(b"twice")
        arriving.keep(name)
    assert store.get(name) == b"twice"
    assert left(store) == {f"{name[:2]}/{name[2:]}"}


def test_many_come_in_parts_at_once(store: ChunkStore):
    chunks = [bytes([i % 5]) * 100_000 for i in range(20)]

    def send(data: bytes) -> str:
        with store.incoming() as arriving:
            for start in range(0, len(data), 30_000):
                arriving.write(data[start : start + 30_000])
            arriving.keep(name_of(data))
        return name_of(data)

    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(send, chunks))
    assert [store.get(name) for name in names] == chunks
    assert len(left(store)) == 5


@pytest.mark.parametrize("data", [b"", b"x", b"hello" * 1000], ids=["empty", "one", "more"])
def test_a_chunk_may_be_read_in_parts(store: ChunkStore, data: bytes):
    file, size = store.open(store.put(data))
    with file:
        assert size == len(data)
        file.seek(size // 2)
        assert file.read(10) == data[size // 2 :][:10]
        file.seek(0)
        assert b"".join(iter(lambda: file.read(999), b"")) == data


def test_what_is_not_there_cannot_be_opened(store: ChunkStore):
    with pytest.raises(NotFoundError, match=ABSENT):
        store.open(ABSENT)
    with pytest.raises(ProtocolError, match="not the name of a chunk"):
        store.open("../" * 20 + "etc")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows deletes no file that is open")
def test_a_chunk_that_is_deleted_while_it_is_read_is_read_to_its_end(store: ChunkStore):
    name = store.put(b"hello" * 1000)
    file, _ = store.open(name)
    with file:
        begun = file.read(7)
        store.delete(name)
        assert begun + file.read() == b"hello" * 1000


def test_an_open_chunk_takes_no_memory(store: ChunkStore):
    names = [store.put(bytes([i]) * CHUNK_BYTES) for i in range(4)]
    tracemalloc.start()
    try:
        with ExitStack() as files:
            for name in names:
                file, _ = store.open(name)
                files.enter_context(file)
            assert tracemalloc.get_traced_memory()[0] < CHUNK_BYTES
    finally:
        tracemalloc.stop()


def left(store: ChunkStore) -> set[str]:
    """Every file or object there is, a chunk or not."""
    if isinstance(store, S3Chunks):
        return set(_everything(store))
    assert isinstance(store, LocalChunks)
    files = (path for path in store.folder.rglob("*") if path.is_file())
    return {path.relative_to(store.folder).as_posix() for path in files}


def partial(store: ChunkStore) -> set[str]:
    """What is being written now; it has no name yet."""
    return {path for path in left(store) if path.startswith("partial/")}


# On a disk


@pytest.mark.parametrize("damage", ["truncate", "alter", "lengthen"])
def test_an_altered_chunk_is_named_and_put_again(local: LocalChunks, damage: str):
    data = b"some bytes"
    name = local.put(data)
    path = local.folder / name[:2] / name[2:]
    path.write_bytes({"truncate": b"some", "alter": b"some bites", "lengthen": data * 2}[damage])
    with pytest.raises(CorruptFileError, match=name):
        local.get(name)
    assert local.put(data) == name
    assert local.get(name) == data


def test_putting_again_makes_a_chunk_young(local: LocalChunks):
    name = local.put(b"old")
    os.utime(local.folder / name[:2] / name[2:], (1000, 1000))
    assert dict(local.stored()) == {name: 1000}
    local.put(b"old")
    assert dict(local.stored())[name] > 1000


def test_foreign_files_are_no_chunks(local: LocalChunks):
    name = local.put(b"x")
    (local.folder / "ab").mkdir(exist_ok=True)
    (local.folder / "ab" / "notes.txt").write_text("mine")
    (local.folder / "README").write_text("mine")
    (local.folder / "partial" / "half").write_bytes(b"ha")
    assert [stored for stored, _ in local.stored()] == [name]


def test_a_synced_store_is_the_same(tmp_path: Path):
    store = LocalChunks(tmp_path / "chunks", sync=True)
    assert LocalChunks(tmp_path / "chunks").get(store.put(b"x")) == b"x"


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no kill -9")
def test_a_store_survives_kill_9(tmp_path: Path):
    writing = """
        import os, sys
        from pathlib import Path
        from blocktrain.storage.chunks import LocalChunks
        store = LocalChunks(Path(sys.argv[1]), sync=False)
        print("ready", flush=True)
        while True:
            store.put(os.urandom(200_000))
    """
    command = [sys.executable, "-c", textwrap.dedent(writing), str(tmp_path)]
    writers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    for writer in writers:
        assert writer.stdout and writer.stdout.readline() == b"ready\n"
    time.sleep(0.2)
    for writer in writers:
        writer.kill()
        writer.communicate()
    store = LocalChunks(tmp_path)
    names = [name for name, _ in store.stored()]
    assert len(names) > 10
    assert all(len(store.get(name)) == 200_000 for name in names)
    store.clear_leftovers(time.time() + 60)
    assert list((tmp_path / "partial").iterdir()) == []
    assert sorted(name for name, _ in store.stored()) == sorted(names)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no kill -9")
def test_kill_9_while_parts_come_leaves_no_chunk(tmp_path: Path):
    writing = """
        import sys
        from pathlib import Path
        from blocktrain.storage.chunks import LocalChunks
        with LocalChunks(Path(sys.argv[1])).incoming() as arriving:
            arriving.write(b"half of")
            print("half", flush=True)
            sys.stdin.read()
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(writing), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with child:
        assert child.stdout and child.stdout.readline() == b"half\n"
        child.kill()
    store = LocalChunks(tmp_path)
    assert list(store.stored()) == []
    assert len(left(store)) == 1
    store.clear_leftovers(time.time() + 60)
    assert left(store) == set()


def test_what_is_being_written_is_no_leftover(local: LocalChunks):
    begun = local.folder / "partial" / "begun"
    begun.write_bytes(b"ha")
    local.clear_leftovers(time.time() - 3600)
    assert begun.exists()


def test_a_disk_gives_no_urls(local: LocalChunks):
    name = local.put(b"x")
    assert local.get_url(name, 60) is None
    assert local.put_url(UPLOAD, name, 60) is None
    assert local.admit(UPLOAD, name, 1)
    assert not local.admit(UPLOAD, ABSENT, 1)
    local.clear_quarantine(UPLOAD)


def test_a_folder_that_cannot_be_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="file"):
        LocalChunks(tmp_path / "file" / "chunks")


# In S3


def test_a_chunk_can_be_got_by_its_url(s3: S3Chunks):
    data = os.urandom(100_000)
    url = s3.get_url(s3.put(data), 60)
    assert url is not None
    assert httpx.get(url).content == data
    part = httpx.get(url, headers={"Range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, data[10:20])
    assert httpx.put(url, content=b"other").status_code == 403
    assert httpx.get(url.replace("Signature=", "Signature=0")).status_code == 403


def test_addresses_are_signed_for_where_workers_reach_the_storage(s3: S3Chunks, server: S3Server):
    place = server.endpoint.replace("127.0.0.1", "localhost")
    assert place != server.endpoint
    region = "us-east-1"
    store = S3Chunks(server.bucket, secrets.token_hex(8), server.endpoint, region, public=place)
    name = store.put(b"some bytes")
    url = store.get_url(name, 60)
    assert url is not None and url.startswith(place)
    assert httpx.get(url).content == b"some bytes"


def test_an_upload_is_admitted_once_it_is_checked(s3: S3Chunks):
    data = os.urandom(CHUNK_BYTES)
    name = name_of(data)
    assert not s3.admit(UPLOAD, name, len(data)), "nothing was sent yet"
    _send(s3, name, data)
    assert s3.has([name]) == set()
    assert list(s3.stored()) == []
    assert s3.admit(UPLOAD, name, len(data))
    assert s3.get(name) == data
    assert s3.admit(UPLOAD, name, len(data)), "asked again, the same answer"
    assert _everything(s3) == [f"{name[:2]}/{name[2:]}"]


@pytest.mark.parametrize("sent", [b"wrong!", b"right", b"right. ", b"", bytes(CHUNK_BYTES + 1)])
def test_a_wrong_upload_is_removed(s3: S3Chunks, sent: bytes):
    data = b"right."
    name = name_of(data)
    _send(s3, name, sent)
    assert not s3.admit(UPLOAD, name, len(data))
    assert _everything(s3) == []
    _send(s3, name, data)
    assert s3.admit(UPLOAD, name, len(data))


def test_the_right_bytes_of_a_wrong_size_are_removed(s3: S3Chunks):
    name = name_of(b"right.")
    _send(s3, name, b"right.")
    assert not s3.admit(UPLOAD, name, 5)
    assert _everything(s3) == []


def test_what_is_changed_after_the_check_is_not_admitted(s3: S3Chunks, server: S3Server):
    """Whoever holds the URL may send something else at the worst moment."""
    data = b"right."
    name = name_of(data)

    class Raced(S3Chunks):
        def _read(self, path: str, name: str, most: int) -> bytes | None:
            found = super()._read(path, name, most)
            _send(s3, name, b"wrong!")
            return found

    prefix = str(s3).removeprefix(f"s3://{server.bucket}/")
    raced = Raced(server.bucket, prefix, server.endpoint, "us-east-1")
    _send(s3, name, data)
    assert raced.admit(UPLOAD, name, len(data))
    assert s3.get(name) == data


def test_quarantine_is_cleared_by_upload_and_by_age(s3: S3Chunks):
    names = [name_of(bytes([i])) for i in range(3)]
    for upload in (UPLOAD, UPLOAD + "2"):
        for name in names:
            _send(s3, name, b"x", upload)
    s3.clear_quarantine(UPLOAD)
    assert sorted(_everything(s3)) == sorted(f"quarantine/{UPLOAD}2/{name}" for name in names)
    s3.clear_leftovers(time.time() - 3600)
    assert len(_everything(s3)) == 3
    s3.clear_leftovers(time.time() + 3600)
    assert _everything(s3) == []
    s3.clear_quarantine(UPLOAD)


@pytest.mark.parametrize("upload", ["", "..", "a/b", "a\n", "a" * 129])
def test_only_names_of_uploads_are_names(s3: S3Chunks, upload: str):
    for call in (lambda: s3.put_url(upload, ABSENT, 60), lambda: s3.clear_quarantine(upload)):
        with pytest.raises(ProtocolError, match="not the name of an upload"):
            call()


def test_an_altered_object_is_named(s3: S3Chunks):
    name = s3.put(b"some bytes")
    for altered in (b"some bites", bytes(CHUNK_BYTES + 1)):
        s3._store.put(f"{name[:2]}/{name[2:]}", altered)
        with pytest.raises(CorruptFileError, match=name):
            s3.get(name)


def test_bad_credentials_are_refused(
    s3: S3Chunks, server: S3Server, monkeypatch: pytest.MonkeyPatch
):
    name = s3.put(b"x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    stranger = open_chunks(server.url("elsewhere"))
    for call in (lambda: stranger.put(b"x"), lambda: stranger.get(name)):
        with pytest.raises(ConfigError, match="credentials"):
            call()
    with pytest.raises(ConfigError, match="credentials"):
        stranger.has([name])
    url = stranger.put_url(UPLOAD, name, 60)
    assert url is not None and httpx.put(url, content=b"x").status_code == 403


@pytest.mark.usefixtures("s3")
def test_a_missing_bucket_or_server_is_named(server: S3Server):
    with pytest.raises(UnreachableError, match=r"s3://nowhere.*404"):
        list(S3Chunks("nowhere", "", server.endpoint).stored())
    with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:9/"):
        S3Chunks("chunks", "", "http://127.0.0.1:9").get(ABSENT)


def _send(store: S3Chunks, name: str, data: bytes, upload: str = UPLOAD) -> None:
    url = store.put_url(upload, name, 60)
    assert url is not None
    assert httpx.put(url, content=data).is_success


def _everything(store: S3Chunks) -> list[str]:
    return [path for path, _ in store.objects()]


# By address


def test_a_path_or_a_file_url_is_a_folder(tmp_path: Path):
    name = LocalChunks(tmp_path / "chunks dir").put(b"x")
    for url in (str(tmp_path / "chunks dir"), (tmp_path / "chunks dir").as_uri()):
        assert open_chunks(url).get(name) == b"x"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "use a path"),
        ("gs://bucket", "gs:// is not a chunk store"),
        ("http://host/bucket", "http:// is not a chunk store"),
        ("file://host/folder", "file:///PATH"),
        ("file://", "file:///PATH"),
        ("s3://", "s3://BUCKET/PREFIX"),
        ("s3:///prefix", "s3://BUCKET/PREFIX"),
        ("s3://key:secret@bucket/prefix", "s3://BUCKET/PREFIX"),
        ("s3://bucket/prefix?endpiont=http://x", "endpiont.*use one of endpoint, public, region"),
        ("s3://bucket/prefix?endpoint=localhost:8333", "endpoint.*http://HOST"),
        ("s3://bucket/prefix?endpoint=ftp://host", "endpoint.*http://HOST"),
        ("s3://bucket/prefix?endpoint=", "endpoint.*http://HOST"),
    ],
)
def test_a_bad_address_says_what_is_wrong(url: str, message: str):
    with pytest.raises(ConfigError, match=message):
        open_chunks(url)


def test_a_bucket_without_its_extra_names_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "obstore.store", None)  # as where it was never installed
    with pytest.raises(ConfigError, match=r"pip install 'blocktrain\[s3\]'"):
        open_chunks("s3://bucket/prefix")
