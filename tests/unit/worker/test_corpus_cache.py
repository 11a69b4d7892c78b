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
from blocktrain.storage.blobs import Blobs
from blocktrain.storage.chunks import LocalChunks
from blocktrain.worker.client import Client
from blocktrain.worker.corpus_cache import CorpusCache
from blocktrain.worker.throttle import Throttle
from blocktrain.worker.traffic import Traffic
from blocktrain.worker.transfer import Transfer

TEXT = {"train": b"some text " * 5000, "valid": b"other text " * 100, "test": b""}
NOWHERE = DataConfig(source="text:/nowhere/*.txt")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def corpora(client: Client, tmp_path: Path) -> CorpusCache:
    cache = Blobs(LocalChunks(tmp_path / "chunks", sync=False))
    return CorpusCache(Transfer(client, cache, Throttle(None, client.clock), Traffic()))


def description(server: FaultServer, text: dict[str, bytes]) -> RunDescription:
    return described(
        corpus={split: server.hold(data) for split, data in text.items()},
        corpus_digests={split: hashlib.sha256(data).hexdigest() for split, data in text.items()},
    )


def test_the_runs_text_is_fetched_once(
    server: FaultServer, client: Client, corpora: CorpusCache, cache: Path
):
    run = description(server, TEXT)
    corpus = corpora.open(run, NOWHERE, client.patience())
    assert {split: data.tobytes() for split, data in corpus.splits.items()} == TEXT
    assert corpus.digests == run.corpus_digests
    assert isinstance(corpus.splits["train"], np.memmap)
    assert not corpus.splits["train"].flags.writeable
    asked = len(server.seen)
    again = corpora.open(run, NOWHERE, client.patience())
    assert again.splits["train"].tobytes() == TEXT["train"]
    assert len(server.seen) == asked
    assert sorted(path.suffix for path in (cache / "splits").glob("*")) == sorted(
        [".bin", ".lock"] * 3
    )


def test_a_copy_of_its_own_is_used_where_it_is_the_same(
    server: FaultServer, client: Client, corpora: CorpusCache, tmp_path: Path
):
    (tmp_path / "own.txt").write_bytes(TEXT["train"])
    settings = DataConfig(source=f"text:{tmp_path}/own.txt")
    own = load_corpus(settings)
    run = description(server, {split: data.tobytes() for split, data in own.splits.items()})
    corpus = corpora.open(run, settings, client.patience())
    assert corpus.splits["train"].tobytes() == own.splits["train"].tobytes()
    assert not server.seen
    (tmp_path / "own.txt").write_bytes(TEXT["train"] + b"and more " * 200)
    corpus = corpora.open(run, settings, client.patience())
    assert corpus.splits["train"].tobytes() == own.splits["train"].tobytes()
    assert server.lines("GET /v1/blobs")


def test_no_other_network_is_asked(server: FaultServer, client: Client, corpora: CorpusCache):
    run = description(server, TEXT)
    for source in ("wikitext-2", "hf:some/dataset"):
        corpus = corpora.open(run, DataConfig(source=source), client.patience())
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
    corpora.open(run, settings, client.patience())
    assert not server.seen


def test_text_that_is_not_the_described_one_is_refused(
    server: FaultServer, client: Client, corpora: CorpusCache, cache: Path
):
    run = description(server, TEXT)
    wrong = {**run.corpus_digests, "train": "ab" * 32}
    with pytest.raises(ProtocolError, match="not the one it describes"):
        corpora.open(run.model_copy(update={"corpus_digests": wrong}), NOWHERE, client.patience())
    assert not list((cache / "splits").glob("*.bin"))
    with pytest.raises(ProtocolError, match="train split"):
        corpora.open(
            run.model_copy(update={"corpus_digests": {**wrong, "train": "../../x"}}),
            NOWHERE,
            client.patience(),
        )


def test_a_damaged_file_is_named(
    server: FaultServer, client: Client, corpora: CorpusCache, cache: Path
):
    run = description(server, TEXT)
    corpora.open(run, NOWHERE, client.patience())
    path = cache / "splits" / f"{run.corpus_digests['train']}.bin"
    path.write_bytes(b"short")
    with pytest.raises(DataError, match="is damaged; delete it"):
        corpora.open(run, NOWHERE, client.patience())


def test_failures_on_the_way_do_not_matter(
    server: FaultServer, client: Client, corpora: CorpusCache
):
    run = description(server, TEXT)
    server.faults = [
        Fault("GET /v1/chunks", cut_after=1000),
        Fault("GET /v1/blobs", status=503),
    ]
    corpus = corpora.open(run, NOWHERE, client.patience())
    assert corpus.splits["train"].tobytes() == TEXT["train"]
