"""Who works in a folder has it for itself, and begins without what a killed worker left."""

from pathlib import Path

import pytest

from blocktrain.errors import RunError
from blocktrain.worker.machine import lock_folder
from blocktrain.worker.transfer import BlobCache


def test_a_folder_is_one_workers_at_a_time(tmp_path: Path):
    cache = BlobCache(tmp_path / "chunks")
    half = tmp_path / "chunks" / "partial" / "half"
    with lock_folder(tmp_path, cache):
        half.write_bytes(b"being written")
        with pytest.raises(RunError, match="another worker uses"), lock_folder(tmp_path, cache):
            pytest.fail("two are in it")
        assert half.exists()
    with lock_folder(tmp_path, cache):
        assert not half.exists()


def test_whole_chunks_stay(tmp_path: Path):
    cache = BlobCache(tmp_path / "chunks")
    name = cache.chunks.put(b"whole")
    with lock_folder(tmp_path, cache):
        assert cache.chunks.get(name) == b"whole"
