"""A model is fetched while the run goes on, and what it is made of is replaced meanwhile."""

import tempfile
from pathlib import Path

import pytest
from tests.support.fault_server import FaultServer
from tests.support.worker_side import RUN, described

from blocktrain.config import Config
from blocktrain.data.corpus import Corpus
from blocktrain.errors import RefusedError, RunError
from blocktrain.protocol.messages import Blob, BlockStatus, Moved, Status
from blocktrain.storage import tensor_file
from blocktrain.storage.run_dir import RunDir
from blocktrain.train.device import resolve
from blocktrain.train.trainer import BlockTrainer
from blocktrain.worker.client import Client
from blocktrain.worker.timing import Deadline
from blocktrain.worker.versions import fetch_model

GONE = Blob(name="ab" * 32, size=1000)


class Blocks:
    """The versions of each block that are told one after another; the last one stays."""

    def __init__(self, server: FaultServer, config: Config, corpus: Corpus) -> None:
        self.told: list[list[tuple[int, Blob]]] = []
        for block in range(config.block_count):
            weights = BlockTrainer(config, block, corpus, resolve("cpu", "fp32"), None).weights()
            self.told.append([(5, server.hold(b"".join(tensor_file.encode(weights))))])
        server.on("GET /v1/run", lambda body: described(config=config.to_toml()))
        server.on("GET /v1/status", lambda body: self._status())

    def _status(self) -> Status:
        now = [told.pop(0) if len(told) > 1 else told[0] for told in self.told]
        return Status(
            run=RUN, state="running", ce=None, codec="none", workers=(), seconds=1.0,
            blocks=tuple(
                BlockStatus(
                    index=index, version=version, weights=weights, ce=None, bytes_trained=1,
                    progress=0.5, replicas=1, participation=1.0, pending_updates=0, moved=Moved(),
                )
                for index, (version, weights) in enumerate(now)
            ),
        )  # fmt: skip


@pytest.fixture
def blocks(server: FaultServer, config: Config, corpus: Corpus) -> Blocks:
    return Blocks(server, config, corpus)


def test_if_a_version_was_deleted_meanwhile_a_newer_one_is_fetched(
    client: Client, blocks: Blocks, tmp_path: Path
):
    blocks.told[0][:0] = [(3, GONE), (4, GONE)]
    fetched = fetch_model(client, tmp_path / "model")
    assert fetched.versions == [5, 5]
    assert fetched.run.config.block_count == 2


def test_a_version_that_stays_missing_is_an_error(client: Client, blocks: Blocks, tmp_path: Path):
    blocks.told[1] = [(5, GONE)]
    with pytest.raises(RefusedError, match="no chunk"):
        fetch_model(client, tmp_path / "model")
    assert [path.name for path in tmp_path.rglob("*.*")] == ["config.toml"]
    blocks.told[1] = blocks.told[0]
    assert fetch_model(client, tmp_path / "model").versions == [5, 5]


def test_a_folder_that_holds_a_model_is_refused_before_anything_is_fetched(
    client: Client, blocks: Blocks, server: FaultServer, config: Config, tmp_path: Path
):
    RunDir.create(tmp_path / "trained", config).block(0).path.mkdir()
    fetch_model(client, tmp_path / "model")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    asked = len(server.lines("GET /v1/blobs"))
    for folder, why in (
        ("trained", "holds a run's blocks"), ("model", "is there already"), ("mine", "not empty"),
    ):  # fmt: skip
        with pytest.raises(RunError, match=why):
            fetch_model(client, tmp_path / folder)
    assert len(server.lines("GET /v1/blobs")) == asked


def test_a_fetch_needs_disk_space_for_one_block_beside_the_model(
    client: Client, blocks: Blocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out, held = tmp_path / "model", []
    status = client.status

    def looked(deadline: Deadline | None = None) -> Status:
        held.append(
            [path for path in out.rglob("*") if path.is_file() and path.stat().st_size > 999]
        )
        return status(deadline)

    monkeypatch.setattr(client, "status", looked)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: pytest.fail("another file system"))
    fetch_model(client, out)
    assert [[path.name for path in paths] for paths in held] == [["config.toml"]] * 2
    assert sorted(path.name for path in out.iterdir()) == [
        "config.toml", "manifest.json", "model.safetensors"
    ]  # fmt: skip
