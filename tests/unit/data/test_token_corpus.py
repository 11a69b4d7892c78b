"""Corpora of tokens: documents, threads, interrupted builds, and the tokenizer of a new run."""

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from tests.support.small_tokenizer import TEXT, small_tokenizer

from blocktrain.config import Config, DataConfig
from blocktrain.data import corpus_builder
from blocktrain.data.corpus import Corpus, load_corpus, open_source
from blocktrain.data.corpus_builder import build_corpus
from blocktrain.data.documents import LONGEST_ROW, Piece
from blocktrain.data.run_text import expected_vocabulary, fetch_tokenizer, new_text
from blocktrain.data.sources import Source, TextFile
from blocktrain.data.tokenizer import ByteTokenizer
from blocktrain.environment import THREADS
from blocktrain.errors import ConfigError, DataError, DownloadError
from blocktrain.storage.run_dir import RunDir

DOCUMENTS = ["a first document", "", "a second one\n", "\u65e5\u672c " * 9000]
TOKENIZER = small_tokenizer()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(folder))
    return folder


def write_json_lines(path: Path, column: str = "text") -> None:
    lines = "".join(json.dumps({"id": 1, column: text}) + "\n" for text in DOCUMENTS)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif path.suffix == ".zst":
        with pyarrow.output_stream(path, compression="zstd") as out:
            out.write(lines.encode())
    else:
        path.write_text(lines)


def write_parquet(path: Path, column: str = "text") -> None:
    parquet.write_table(pyarrow.table({"id": [1] * len(DOCUMENTS), column: DOCUMENTS}), path)


WRITERS: dict[str, Callable[[Path, str], None]] = {
    "jsonl": write_json_lines,
    "jsonl.gz": write_json_lines,
    "jsonl.zst": write_json_lines,
    "parquet": write_parquet,
}


def documents(tokens: np.ndarray) -> list[str]:
    """Each document's text; every one must end with the end token."""
    *parts, rest = np.split(tokens, np.flatnonzero(tokens == TOKENIZER.end) + 1)
    assert rest.size == 0
    return [TOKENIZER.decode(part[:-1].tolist()).decode() for part in parts]


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("column", ["text", "content"])
def test_every_document_ends_with_the_end_token(tmp_path: Path, suffix: str, column: str):
    for split in ("train", "valid", "test"):
        WRITERS[suffix](tmp_path / f"{split}.{suffix}", column)
    kind = suffix.partition(".")[0]
    named = "" if column == "text" else f"#{column}"
    settings = DataConfig(f"{kind}:{tmp_path}/*.{suffix}{named}")
    corpus = load_corpus(settings, TOKENIZER)
    texts = [text if text.endswith("\n") else text + "\n" for text in DOCUMENTS if text]
    train = corpus.splits["train"]
    assert documents(train) == texts
    assert train.dtype == np.uint16
    assert corpus.bytes_of(train) == len("".join(texts).encode())
    as_bytes = load_corpus(settings).splits["train"]
    assert as_bytes.tobytes().decode() == "".join(texts)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('{"body": "text"}', "there is no 'text', only body; .* #COLUMN|jsonl:GLOB#COLUMN"),
        ('{"text": 5}', "'text' is not text"),
        ("{text}", "line 1: not valid JSON"),
        ("[1]", "only no columns"),
    ],
)
def test_a_line_that_is_no_document_is_named(tmp_path: Path, content: str, why: str):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match=why):
        load_corpus(DataConfig(f"jsonl:{tmp_path}/a.jsonl"))


def test_a_line_without_an_end_is_not_read_whole(tmp_path: Path):
    with (tmp_path / "a.jsonl").open("wb") as file:
        file.truncate(LONGEST_ROW + 1)
    with pytest.raises(DataError, match="line 1: longer than 256 MB"):
        load_corpus(DataConfig(f"jsonl:{tmp_path}/a.jsonl", unpack_limit_mb=9))


def test_a_parquet_file_without_the_column_names_its_columns(tmp_path: Path):
    write_parquet(tmp_path / "a.parquet", "body")
    with pytest.raises(DataError, match="no column named text; use one of id, body"):
        load_corpus(DataConfig(f"parquet:{tmp_path}/a.parquet"))


def text_files(folder: Path) -> DataConfig:
    folder.mkdir(exist_ok=True)
    for name in "abc":
        (folder / f"{name}.txt").write_text((name + TEXT.read_text()) * 40)
    return DataConfig(f"text:{folder}/*.txt")


def test_every_number_of_threads_gives_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(corpus_builder, "BATCH_BYTES", 1 << 14)
    digests = []
    for threads in ("1", "3"):
        monkeypatch.setenv(THREADS.name, threads)
        digests.append(load_corpus(text_files(tmp_path / threads), TOKENIZER).digests)
    assert digests[0] == digests[1]


def test_a_split_is_cut_by_its_text_and_cached_by_tokenizer(tmp_path: Path, cache: Path):
    settings = text_files(tmp_path / "texts")
    tokens, plain = load_corpus(settings, TOKENIZER), load_corpus(settings)
    assert len(list((cache / "corpora").iterdir())) == 2
    for split in ("valid", "test"):
        assert tokens.bytes_of(tokens.splits[split]) == pytest.approx(
            len(plain.splits[split]), abs=100
        )
    whole = b"".join(
        TOKENIZER.decode(tokens.splits[s].tolist()) for s in ("train", "valid", "test")
    )
    assert whole == b"".join(plain.splits[split].tobytes() for split in ("train", "valid", "test"))


def breaking(source: Source, after: int) -> Source:
    """The same source, whose connection breaks after so many pieces of each file."""

    def broken(file: TextFile) -> Callable[[], Iterator[Piece]]:
        def pieces() -> Iterator[Piece]:
            for number, piece in enumerate(file.pieces()):
                if number == after:
                    raise DownloadError("the connection broke")
                yield piece

        return pieces

    files = {
        split: [replace(file, pieces=broken(file)) for file in files]
        for split, files in source.files.items()
    }
    return replace(source, files=files)


def test_a_build_that_was_interrupted_goes_on_where_it_was(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(corpus_builder, "BATCH_BYTES", 1 << 14)
    monkeypatch.setattr(corpus_builder, "COMMIT_BYTES", 1 << 15)
    settings = text_files(tmp_path / "texts")
    source = open_source(settings.source, 1 << 30, cache)
    whole = load_corpus(settings, TOKENIZER)
    folder, limit = cache / "corpora" / "again", 1 << 30
    for after in (5, 9, 20):
        with pytest.raises(DownloadError):
            build_corpus(breaking(source, after), settings.source, TOKENIZER, folder, limit)
    encoded: list[int] = []

    class Counting(type(TOKENIZER)):  # type: ignore[misc]
        def encode_pieces(self, pieces: Any) -> Any:
            encoded.append(sum(len(text) for text, _ in pieces))
            return super().encode_pieces(pieces)

        def copy(self) -> "Counting":
            return Counting(self.files)

    reports: list[tuple[int, int]] = []
    build_corpus(
        source, settings.source, Counting(TOKENIZER.files), folder, limit,
        lambda done, total: reports.append((done, total)),
    )  # fmt: skip
    sizes = [file.stat().st_size for file in sorted((tmp_path / "texts").iterdir())]
    assert 0 < sum(encoded) < sum(sizes) - (1 << 15)
    assert reports[-1] == (sum(sizes), sum(sizes))
    described = json.loads((folder / "corpus.json").read_bytes())
    assert described["sha256"] == whole.digests


def test_only_the_beginning_of_the_training_text_is_used_if_so_set(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text(TEXT.read_text() * 100)
    settings = DataConfig(f"text:{tmp_path}/*.txt")
    some = load_corpus(replace(settings, most_mb=1), TOKENIZER)
    whole = load_corpus(settings, TOKENIZER)
    train = some.splits["train"]
    assert len(train) < len(whole.splits["train"])
    assert 1_000_000 <= some.bytes_of(train) < 1_050_000
    assert np.array_equal(train[:-1], whole.splits["train"][: len(train) - 1])
    assert train[-1] == TOKENIZER.end
    assert some.digests["valid"] == whole.digests["valid"]
    monkeypatch.setattr(corpus_builder, "BATCH_BYTES", 1 << 14)
    monkeypatch.setattr(corpus_builder, "COMMIT_BYTES", 1 << 15)
    source, folder = open_source(settings.source, 1 << 30, cache), cache / "corpora" / "again"
    arguments = (settings.source, TOKENIZER, folder, 1 << 30)
    with pytest.raises(DownloadError):
        build_corpus(breaking(source, 30), *arguments, most=1_000_000)
    build_corpus(source, *arguments, most=1_000_000)
    assert json.loads((folder / "corpus.json").read_bytes())["sha256"] == some.digests


def config(text: DataConfig, tokenizer: str, **settings: object) -> Config:
    data = replace(text, tokenizer=tokenizer)
    return replace(Config(), data=data).with_settings(**settings)


def test_a_new_run_has_the_expected_vocabulary(tmp_path: Path):
    text = text_files(tmp_path / "texts")
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER.files["tokenizer.json"])
    for tokenizer in ("bytes", "bpe:300", str(tmp_path / "tokenizer.json")):
        wanted = config(text, tokenizer)
        expected, found = expected_vocabulary(wanted), new_text(wanted).config.vocab
        assert (expected.size, expected.mask) == (found.size, found.mask)
        assert expected.is_bytes == found.is_bytes == (tokenizer == "bytes")
        assert expected_vocabulary(replace(wanted, vocab=found)) == found
    assert 1.5 < found.bytes_per_token < 4.0


def test_a_tokenizer_that_is_trained_is_the_same_on_every_machine(tmp_path: Path):
    text = text_files(tmp_path / "texts")
    first, second = (new_text(config(text, "bpe:300")) for _ in range(2))
    assert first.tokenizer.files == second.tokenizer.files
    assert first.tokenizer.vocabulary.size == 320
    assert first.tokenizer.end == 0


@pytest.mark.parametrize("name", ["bpe:", "bpe:x", "bpe:256"])
def test_a_tokenizer_of_no_size_is_refused(tmp_path: Path, name: str):
    for use in (expected_vocabulary, new_text):
        with pytest.raises(ConfigError, match="must be bpe:N, where N is at least 257"):
            use(config(text_files(tmp_path / "texts"), name))


def test_a_warm_start_brings_its_tokenizer(tmp_path: Path):
    text = text_files(tmp_path / "texts")
    origin = RunDir.create(tmp_path / "origin", new_text(config(text, "bpe:300")).config)
    origin.store_tokenizer(new_text(config(text, "bpe:300")).tokenizer.files)
    later = config(text, "bytes", train__warm_start=str(origin.path))
    assert new_text(later).config.vocab.sha256 == origin.config.vocab.sha256
    assert expected_vocabulary(later) == origin.config.vocab
    with pytest.raises(ConfigError, match=r"differs from 'bpe:300' of train\.warm_start"):
        new_text(config(text, "bpe:400", train__warm_start=str(origin.path)))


def test_a_tokenizer_of_the_hub_may_be_put_in_place_by_hand(tmp_path: Path, cache: Path):
    nobody = "http://127.0.0.1:9"
    with pytest.raises(DownloadError, match=r"put tokenizer\.json and") as refused:
        fetch_tokenizer("hf:owner/name", cache, nobody)
    folder = cache / "tokenizers" / "owner--name"
    assert f"https://huggingface.co/owner/name into {folder.absolute()}" in str(refused.value)
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_bytes(TOKENIZER.files["tokenizer.json"])
    assert fetch_tokenizer("hf:owner/name", cache, nobody) == folder
    for unsafe in ("hf:../name", "hf:owner/../..", "hf:a--b/c", "hf:"):
        with pytest.raises(DataError, match="not of the form"):
            fetch_tokenizer(unsafe, cache, nobody)


def test_bytes_need_no_end_token(tmp_path: Path):
    write_json_lines(tmp_path / "train.jsonl")
    write_json_lines(tmp_path / "valid.jsonl")
    write_json_lines(tmp_path / "test.jsonl")
    corpus: Corpus = load_corpus(DataConfig(f"jsonl:{tmp_path}/*"), ByteTokenizer())
    assert corpus.lengths is None
    assert corpus.bytes_of(corpus.splits["test"]) == len(corpus.splits["test"])
