import hashlib
from pathlib import Path

import numpy as np
import pytest
from tests.support.fault_server import Fault, FaultServer
from tests.support.worker_side import described

from blocktrain.config import DataConfig
from blocktrain.data.corpus import load_corpus
from blocktrain.errors import DataError, ProtocolError
from blocktrain.protocol.messages import RunDescription
from blocktrain.worker.blob_cache import BlobCache
from blocktrain.worker.client import Client
from blocktrain.worker.corpus_cache import CorpusCache
from blocktrain.worker.transfer import Transfer

TEXT = {"train": b"some text " * 5000, "valid": b"other text " * 100, "test": b""}
NOWHERE = DataConfig(source="text:/nowhere/*.txt")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def transfer(client: Client, tmp_path: Path) -> Transfer:
    cache = BlobCache(tmp_path / "chunks")
    return Transfer(client, cache)


@pytest.fixture
def corpora(transfer: Transfer) -> CorpusCache:
    return CorpusCache(transfer)


def description(server: FaultServer, text: dict[str, bytes]) -> RunDescription:
    return described(
        corpus={split: server.hold(data) for split, data in text.items()},
        corpus_digests={split: hashlib.sha256(data).hexdigest() for split, data in text.items()},
    )


def test_the_runs_text_is_fetched_once(
    server: FaultServer, client: Client, corpora: CorpusCache, cache: Path
):
    run = description(server, TEXT)
    corpus = corpora.open(run, NOWHERE, client.deadline())
    assert {split: data.tobytes() for split, data in corpus.splits.items()} == TEXT
    assert corpus.digests == run.corpus_digests
    assert isinstance(corpus.splits["train"], np.memmap)
    assert not corpus.splits["train"].flags.writeable
    asked = len(server.seen)
    again = corpora.open(run, NOWHERE, client.deadline())
    assert again.splits["train"].tobytes() == TEXT["train"]
    assert len(server.seen) == asked
    assert sorted(path.suffix for path in (cache / "splits").glob("*")) == sorted(
        [".bin", ".lock"] * 3
    )


@pytest.fixture
def own(tmp_path: Path) -> DataConfig:
    """Files of the machine's owner."""
    (tmp_path / "own.txt").write_bytes(TEXT["train"])
    return DataConfig(source=f"text:{tmp_path}/own.txt")


def test_no_file_is_read_because_a_run_names_it(
    server: FaultServer, client: Client, corpora: CorpusCache, own: DataConfig, cache: Path
):
    corpus = corpora.open(description(server, TEXT), own, client.deadline())
    assert corpus.splits["train"].tobytes() == TEXT["train"]
    assert server.lines("GET /v1/blobs")
    assert not (cache / "corpora").exists()


def test_the_owners_copy_is_used_if_it_is_identical(
    server: FaultServer, client: Client, transfer: Transfer, own: DataConfig, tmp_path: Path
):
    told: list[str] = []
    corpora = CorpusCache(transfer, own.source, told.append)
    same = load_corpus(own)
    run = description(server, {split: data.tobytes() for split, data in same.splits.items()})
    corpus = corpora.open(run, NOWHERE, client.deadline())
    assert corpus.splits["train"].tobytes() == same.splits["train"].tobytes()
    assert not server.seen
    assert not told
    (tmp_path / "own.txt").write_bytes(TEXT["train"] + b"and more " * 200)
    corpus = corpora.open(run, NOWHERE, client.deadline())
    assert corpus.splits["train"].tobytes() == same.splits["train"].tobytes()
    assert server.lines("GET /v1/blobs")
    assert told == [
        f"--data {own.source} is not the run's text (train, valid, test differ);"
        " downloading the run's"
    ]


def test_a_missing_copy_is_an_error(server: FaultServer, client: Client, transfer: Transfer):
    with pytest.raises(DataError, match="no file matches"):
        CorpusCache(transfer, NOWHERE.source).open(
            description(server, TEXT), NOWHERE, client.deadline()
        )


def test_no_other_host_is_contacted(server: FaultServer, client: Client, corpora: CorpusCache):
    run = description(server, TEXT)
    for source in ("wikitext-2", "hf:some/dataset"):
        corpus = corpora.open(run, DataConfig(source=source), client.deadline())
        assert corpus.splits["valid"].tobytes() == TEXT["valid"]
        assert corpus.source == source


def test_a_file_the_hub_left_counts_as_its_own(
    server: FaultServer, client: Client, corpora: CorpusCache, cache: Path
):
    folder = cache / "hub" / "some--dataset"
    folder.mkdir(parents=True)
    for split in ("train", "valid", "test"):
        (folder / f"{split}.txt").write_bytes(TEXT["train"] + split.encode())
    settings = DataConfig(source="hf:some/dataset")
    own = load_corpus(settings)
    run = description(server, {split: data.tobytes() for split, data in own.splits.items()})
    corpora.open(run, settings, client.deadline())
    assert not server.seen


def test_text_with_another_hash_is_refused(
    server: FaultServer, client: Client, corpora: CorpusCache, cache: Path
):
    run = description(server, TEXT)
    wrong = {**run.corpus_digests, "train": "ab" * 32}
    with pytest.raises(ProtocolError, match="does not have the hash"):
        corpora.open(run.model_copy(update={"corpus_digests": wrong}), NOWHERE, client.deadline())
    assert not list((cache / "splits").glob("*.bin"))
    with pytest.raises(ProtocolError, match="train split"):
        corpora.open(
            run.model_copy(update={"corpus_digests": {**wrong, "train": "../../x"}}),
            NOWHERE,
            client.deadline(),
        )


def test_a_damaged_file_is_named(
    server: FaultServer, client: Client, corpora: CorpusCache, cache: Path
):
    run = description(server, TEXT)
    corpora.open(run, NOWHERE, client.deadline())
    path = cache / "splits" / f"{run.corpus_digests['train']}.bin"
    path.write_bytes(b"short")
    with pytest.raises(DataError, match="is damaged; delete it"):
        corpora.open(run, NOWHERE, client.deadline())


def test_the_download_survives_failures(server: FaultServer, client: Client, corpora: CorpusCache):
    run = description(server, TEXT)
    server.faults = [
        Fault("GET /v1/chunks", cut_after=1000),
        Fault("GET /v1/blobs", status=503),
    ]
    corpus = corpora.open(run, NOWHERE, client.deadline())
    assert corpus.splits["train"].tobytes() == TEXT["train"]
