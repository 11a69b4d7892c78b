import hashlib
import os
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from blocktrain import files
from blocktrain.files import atomic_write, file_sha256, write_bytes


def test_a_file_is_replaced_only_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "settings"
    path.write_bytes(b"old")
    with atomic_write(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_after_an_error_the_old_file_is_there_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "settings"
    path.write_bytes(b"old")

    def pieces() -> Iterator[bytes]:
        yield b"half of the n"
        raise RuntimeError

    with pytest.raises(RuntimeError), atomic_write(path) as file:
        file.writelines(pieces())
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_of_one_file_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "settings"
    both_open = threading.Barrier(2)

    def write(data: bytes) -> None:
        with atomic_write(path) as file:
            both_open.wait(10)
            file.write(data)

    threads = [threading.Thread(target=write, args=(letter * 100_000,)) for letter in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(path.read_bytes()) == 100_000
    assert len(set(path.read_bytes())) == 1


@pytest.mark.skipif(os.name == "nt", reason="Windows has no permission bits")
def test_a_private_file_is_private_from_its_first_byte(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with atomic_write(path, mode=0o600):
        (unfinished,) = tmp_path.iterdir()
        assert stat.S_IMODE(unfinished.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("sync", [True, False])
def test_only_what_is_synced_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(files.os, "fsync", synced.append)
    write_bytes(tmp_path / "file", b"data", sync=sync)
    assert bool(synced) is sync


def test_the_hash_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"data")
    assert file_sha256(tmp_path / "file") == hashlib.sha256(b"data").hexdigest()


@pytest.mark.skipif(sys.platform == "win32", reason="no limit of a file's size")
def test_an_error_while_writing_names_the_file(tmp_path: Path):
    """The limit of a file's size stands for a full disk: neither error has a path of its own."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="large") as caught:
            write_bytes(tmp_path / "model", bytes(200))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
