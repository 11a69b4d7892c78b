from pathlib import Path

import pytest

from blocktrain.storage.blobs import Blobs
from blocktrain.storage.chunks import LocalChunks


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return Blobs(LocalChunks(tmp_path, sync=False))
