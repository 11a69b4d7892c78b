import hashlib
from pathlib import Path

import numpy as np
import pytest
from tests.support.fault_server import Fault, FaultServer
from tests.support.small_tokenizer import small_tokenizer
from tests.support.worker_side import described

from blocktrain.config import Config, DataConfig
from blocktrain.data.corpus import load_corpus
from blocktrain.data.tokenizer import ByteTokenizer, SubwordTokenizer
from blocktrain.errors import DataError, ProtocolError
from blocktrain.protocol.messages import Blob, RunDescription
from blocktrain.worker.client import Client
from blocktrain.worker.downloads import open_corpus, open_tokenizer
from blocktrain.worker.transfer import BlobCache, Transfer

TEXT = {"train": b"some text " * 5000, "valid": b"other text " * 100, "test": b""}
NOWHERE = DataConfig(source="text:/nowhere/*.txt")
BYTES = ByteTokenizer()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def transfer(client: Client, tmp_path: Path) -> Transfer:
    cache = BlobCache(tmp_path / "chunks")
    return Transfer(client, cache)


def description(server: FaultServer, text: dict[str, bytes]) -> RunDescription:
    return described(
        corpus={split: server.hold(data) for split, data in text.items()},
        corpus_digests={split: hashlib.sha256(data).hexdigest() for split, data in text.items()},
    )


def test_the_runs_text_is_fetched_once(
    server: FaultServer, client: Client, transfer: Transfer, cache: Path
):
    run = description(server, TEXT)
    corpus = open_corpus(run, NOWHERE, BYTES, transfer, client.deadline())
    assert {split: data.tobytes() for split, data in corpus.splits.items()} == TEXT
    assert corpus.digests == run.corpus_digests
    assert isinstance(corpus.splits["train"], np.memmap)
    assert not corpus.splits["train"].flags.writeable
    asked = len(server.seen)
    again = open_corpus(run, NOWHERE, BYTES, transfer, client.deadline())
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
    server: FaultServer, client: Client, transfer: Transfer, own: DataConfig, cache: Path
):
    corpus = open_corpus(description(server, TEXT), own, BYTES, transfer, client.deadline())
    assert corpus.splits["train"].tobytes() == TEXT["train"]
    assert server.lines("GET /v1/blobs")
    assert not (cache / "corpora").exists()


def test_the_owners_copy_is_used_if_it_is_identical(
    server: FaultServer, client: Client, transfer: Transfer, own: DataConfig, tmp_path: Path
):
    told: list[str] = []
    same = load_corpus(own)
    run = description(server, {split: data.tobytes() for split, data in same.splits.items()})
    corpus = open_corpus(run, NOWHERE, BYTES, transfer, client.deadline(), own.source, told.append)
    assert corpus.splits["train"].tobytes() == same.splits["train"].tobytes()
    assert not server.seen
    assert not told
    (tmp_path / "own.txt").write_bytes(TEXT["train"] + b"and more " * 200)
    corpus = open_corpus(run, NOWHERE, BYTES, transfer, client.deadline(), own.source, told.append)
    assert corpus.splits["train"].tobytes() == same.splits["train"].tobytes()
    assert server.lines("GET /v1/blobs")
    assert told == [
        f"--data {own.source} is not the run's text (train, valid, test differ);"
        " downloading the run's text instead"
    ]


def test_a_missing_copy_is_an_error(server: FaultServer, client: Client, transfer: Transfer):
    with pytest.raises(DataError, match="no file matches"):
        open_corpus(
            description(server, TEXT), NOWHERE, BYTES, transfer, client.deadline(), NOWHERE.source
        )


def test_no_other_host_is_contacted(server: FaultServer, client: Client, transfer: Transfer):
    run = description(server, TEXT)
    for source in ("wikitext-2", "hf:some/dataset"):
        corpus = open_corpus(run, DataConfig(source=source), BYTES, transfer, client.deadline())
        assert corpus.splits["valid"].tobytes() == TEXT["valid"]
        assert corpus.source == source


def test_a_file_the_hub_left_counts_as_its_own(
    server: FaultServer, client: Client, transfer: Transfer, cache: Path
):
    folder = cache / "hub" / "some--dataset"
    folder.mkdir(parents=True)
    for split in ("train", "valid", "test"):
        (folder / f"{split}.txt").write_bytes(TEXT["train"] + split.encode())
    settings = DataConfig(source="hf:some/dataset")
    own = load_corpus(settings)
    run = description(server, {split: data.tobytes() for split, data in own.splits.items()})
    open_corpus(run, settings, BYTES, transfer, client.deadline())
    assert not server.seen


def test_text_with_another_hash_is_refused(
    server: FaultServer, client: Client, transfer: Transfer, cache: Path
):
    run = description(server, TEXT)
    wrong = {**run.corpus_digests, "train": "ab" * 32}
    with pytest.raises(ProtocolError, match="does not match its hash"):
        open_corpus(
            run.model_copy(update={"corpus_digests": wrong}),
            NOWHERE,
            BYTES,
            transfer,
            client.deadline(),
        )
    assert not list((cache / "splits").glob("*.bin"))
    with pytest.raises(ProtocolError, match="train split"):
        open_corpus(
            run.model_copy(update={"corpus_digests": {**wrong, "train": "../../x"}}),
            NOWHERE,
            BYTES,
            transfer,
            client.deadline(),
        )


def test_a_damaged_file_is_named(
    server: FaultServer, client: Client, transfer: Transfer, cache: Path
):
    run = description(server, TEXT)
    open_corpus(run, NOWHERE, BYTES, transfer, client.deadline())
    path = cache / "splits" / f"{run.corpus_digests['train']}.bin"
    path.write_bytes(b"short")
    with pytest.raises(DataError, match="is damaged; delete it"):
        open_corpus(run, NOWHERE, BYTES, transfer, client.deadline())


def test_the_download_survives_failures(server: FaultServer, client: Client, transfer: Transfer):
    run = description(server, TEXT)
    server.faults = [
        Fault("GET /v1/chunks", cut_after=1000),
        Fault("GET /v1/blobs", status=503),
    ]
    corpus = open_corpus(run, NOWHERE, BYTES, transfer, client.deadline())
    assert corpus.splits["train"].tobytes() == TEXT["train"]


def with_tokenizer(
    server: FaultServer, files: dict[str, bytes]
) -> tuple[RunDescription, Config, SubwordTokenizer]:
    """A run with the small tokenizer, whose description names these files."""
    tokenizer = small_tokenizer()
    tokens = {split: np.array(tokenizer.encode(text.decode()), np.uint16).tobytes()
              for split, text in TEXT.items()}  # fmt: skip
    run = description(server, tokens)
    blobs = {name: server.hold(data) for name, data in files.items()}
    return (
        run.model_copy(update={"tokenizer": blobs}),
        Config(vocab=tokenizer.vocabulary),
        tokenizer,
    )


def test_tokens_are_read_with_the_runs_tokenizer(
    server: FaultServer, client: Client, transfer: Transfer
):
    run, config, tokenizer = with_tokenizer(server, small_tokenizer().files)
    fetched = open_tokenizer(run, config, transfer, client.deadline())
    assert fetched.files == tokenizer.files
    corpus = open_corpus(run, NOWHERE, fetched, transfer, client.deadline())
    train = corpus.splits["train"]
    assert train.dtype == np.uint16
    assert tokenizer.decode(train.tolist()) == TEXT["train"]
    assert corpus.bytes_of(train) == len(TEXT["train"])


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({}, "has the files none"),
        ({"tokenizer.json": b"{}", "code.py": b""}, "has the files code.py, tokenizer.json"),
        ({"tokenizer.json": b"no JSON"}, "cannot be read"),
        ({**small_tokenizer().files, "chat_template.jinja": b"another"}, "was altered"),
    ],
)
def test_another_tokenizer_than_the_settings_name_is_refused(
    server: FaultServer, client: Client, transfer: Transfer, files: dict[str, bytes], why: str
):
    run, config, _ = with_tokenizer(server, files)
    with pytest.raises(ProtocolError, match=why):
        open_tokenizer(run, config, transfer, client.deadline())


def test_a_tokenizer_that_is_too_large_is_not_downloaded(
    server: FaultServer, client: Client, transfer: Transfer
):
    run, config, _ = with_tokenizer(server, small_tokenizer().files)
    huge = {"tokenizer.json": Blob(name="ab" * 32, size=65 << 20)}
    with pytest.raises(ProtocolError, match="the limit is"):
        open_tokenizer(
            run.model_copy(update={"tokenizer": huge}), config, transfer, client.deadline()
        )
    assert not server.lines("GET /v1/blobs")
