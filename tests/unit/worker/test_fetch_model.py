"""A model is fetched while the run goes on, and what it is made of is replaced meanwhile."""

import hashlib
import json
import tempfile
from pathlib import Path

import pytest
from tests.support.fault_server import FaultServer
from tests.support.worker_side import RUN, described

from blocktrain.config import Config
from blocktrain.data.corpus import Corpus
from blocktrain.data.run_text import scored_text
from blocktrain.errors import DataError, RefusedError, RunError
from blocktrain.protocol.messages import Blob
from blocktrain.protocol.status_messages import BlockStatus, Moved, Status
from blocktrain.storage import tensor_file
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.device import resolve
from blocktrain.training.trainer import BlockTrainer
from blocktrain.worker.client import Client
from blocktrain.worker.downloads import fetch_model
from blocktrain.worker.machine import Deadline

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
    fetched = fetch_model(client, tmp_path / "model").run
    manifest = json.loads((fetched.path / "manifest.json").read_text())
    (fetched.path / "manifest.json").write_text(json.dumps({**manifest, "run": "another0"}))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    asked = len(server.lines("GET /v1/blobs"))
    for folder, why in (
        ("trained", "contains a run's blocks"),
        ("model", "contains another model"),
        ("mine", "not empty"),
    ):
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
    assert [[path.name for path in paths] for paths in held] == [["config.toml"]] * 3
    assert sorted(path.name for path in out.iterdir()) == [
        "config.toml", "manifest.json", "model.safetensors"
    ]  # fmt: skip


def test_a_fetched_run_is_updated_and_brings_along_the_text_to_score_it_on(
    client: Client, server: FaultServer, blocks: Blocks, config: Config, corpus: Corpus,
    tmp_path: Path,
):  # fmt: skip
    out = tmp_path / "model"
    text = {split: bytes(corpus.splits[split]) for split in ("train", "valid", "test")}
    described_run = described(
        config=config.with_settings(data__source="text:/etc/passwd").to_toml(),
        corpus={split: server.hold(data) for split, data in text.items()},
        corpus_digests={split: hashlib.sha256(data).hexdigest() for split, data in text.items()},
    )
    server.on("GET /v1/run", lambda body: described_run)
    run = fetch_model(client, out).run
    blocks.told = [[(6, weights)] for [(_, weights)] in blocks.told]
    requests = len(server.lines("GET /v1/chunks"))
    assert fetch_model(client, out).versions == [6, 6]
    assert len(server.lines("GET /v1/chunks")) == requests + 2  # two blocks, no text
    scored = scored_text(run).corpus
    assert bytes(scored.split("valid")) == text["valid"]
    assert bytes(scored.split("test")) == text["test"]
    with pytest.raises(DataError, match=r"no train split .* --data"):
        scored.split("train")
    (run.text_folder / "valid.bin").write_bytes(b"damaged")
    fetch_model(client, out)
    assert bytes(scored_text(run).corpus.split("valid")) == text["valid"]
