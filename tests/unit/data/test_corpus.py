"""A corpus: how its splits are cut, what is cached, and what happens when the cache is shared."""

import gzip
import json
import lzma
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import pytest

from blocktrain.config import DataConfig
from blocktrain.data.corpus import Corpus, load_corpus, open_source
from blocktrain.data.corpus_builder import build_corpus
from blocktrain.data.tokenizer import ByteTokenizer
from blocktrain.errors import DataError

SPLITS = ("train", "valid", "test")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(folder))
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    return folder


def load(folder: Path) -> Corpus:
    return load_corpus(DataConfig(f"text:{folder}/*"))


def refusal(folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def random_bytes(count: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(count)


def built(cache: Path) -> list[Path]:
    return sorted((cache / "corpora").iterdir())


def test_splits_are_cut_off_the_end_in_order(texts: Path) -> None:
    content = random_bytes(100_000)
    (texts / "book.txt").write_bytes(content)
    corpus = load(texts)
    assert [len(corpus.splits[split]) for split in SPLITS] == [90_000, 5_000, 5_000]
    assert b"".join(corpus.splits[split].tobytes() for split in SPLITS) == content


def test_a_cut_split_is_bounded_for_a_large_corpus(texts: Path) -> None:
    (texts / "book.xz").write_bytes(lzma.compress(bytes(50_000_000), preset=0))
    corpus = load(texts)
    assert [len(corpus.splits[split]) for split in SPLITS] == [46_000_000, 2_000_000, 2_000_000]


def test_named_splits_are_left_as_they_are(texts: Path) -> None:
    for split in SPLITS:
        (texts / f"{split}.txt").write_text(split)
    corpus = load(texts)
    assert {split: corpus.splits[split].tobytes().decode() for split in SPLITS} == {
        split: split for split in SPLITS
    }


def test_only_the_missing_split_is_cut(texts: Path) -> None:
    content = random_bytes(20_000)
    (texts / "train.txt").write_bytes(content)
    (texts / "valid.txt").write_bytes(b"as it was")
    corpus = load(texts)
    assert corpus.splits["valid"].tobytes() == b"as it was"
    assert corpus.splits["test"].tobytes() == content[-1000:]
    assert corpus.splits["train"].tobytes() == content[:-1000]


def test_the_smallest_corpus_that_can_be_cut(texts: Path) -> None:
    (texts / "book.txt").write_bytes(random_bytes(10_240))
    assert len(load(texts).splits["valid"]) == 512
    (texts / "book.txt").write_bytes(random_bytes(10_239))
    assert "10239 bytes are too few" in refusal(texts)


def test_an_empty_corpus_is_refused(texts: Path) -> None:
    (texts / "book.txt").touch()
    assert "training files are empty" in refusal(texts)


def test_a_split_shorter_than_a_window_is_refused(texts: Path) -> None:
    (texts / "book.txt").write_bytes(random_bytes(20_000))
    corpus = load(texts)
    assert len(corpus.split("valid", window=1000)) == 1000
    with pytest.raises(DataError, match=r"valid split has 1000 bytes.* model.window = 1001"):
        corpus.split("valid", window=1001)


def test_a_refused_corpus_leaves_nothing_in_the_cache(texts: Path, cache: Path) -> None:
    (texts / "book.gz").write_bytes(b"never an archive")
    assert "book.gz" in refusal(texts)
    assert built(cache) == []


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_an_archive_that_unpacks_too_large_leaves_nothing_in_the_cache(
    texts: Path, cache: Path, pack: Callable[[bytes], bytes]
) -> None:
    suffix = {gzip.compress: "gz", lzma.compress: "xz"}[pack]
    (texts / f"bomb.{suffix}").write_bytes(pack(bytes(3_000_000)))
    with pytest.raises(DataError, match="unpack_limit_mb"):
        load_corpus(DataConfig(f"text:{texts}/*", unpack_limit_mb=2))
    assert built(cache) == []
    assert not any(map(Path.is_dir, (cache / "building").iterdir()))


def test_the_bound_is_on_all_files_together_and_exact(texts: Path, cache: Path) -> None:
    for name in ("a.gz", "b.gz"):
        (texts / name).write_bytes(gzip.compress(bytes(10_000)))
    spec = f"text:{texts}/*.gz"
    source = open_source(spec, 0, cache)
    with pytest.raises(DataError, match="unpack_limit_mb"):
        build_corpus(source, spec, ByteTokenizer(), cache / "corpora" / "a", 19_999)
    build_corpus(source, spec, ByteTokenizer(), cache / "corpora" / "a", 20_000)


def test_a_corpus_is_built_once(texts: Path, cache: Path) -> None:
    book = texts / "book.gz"
    book.write_bytes(gzip.compress(random_bytes(20_000)))
    first = load(texts)
    # Unreadable now, yet the same to all appearances: building it again would fail.
    before = book.stat()
    book.write_bytes(bytes(before.st_size))
    os.utime(book, ns=(before.st_atime_ns, before.st_mtime_ns))
    second = load(texts)
    assert len(built(cache)) == 1
    assert second.digests == first.digests
    assert second.splits["train"].tobytes() == first.splits["train"].tobytes()


def test_a_changed_file_gives_a_new_corpus(texts: Path, cache: Path) -> None:
    book = texts / "book.txt"
    book.write_bytes(random_bytes(20_000))
    first = load(texts)
    book.write_bytes(random_bytes(20_000, seed=1))
    os.utime(book, ns=(0, 0))  # even where the clock is too coarse to tell the two writes apart
    second = load(texts)
    assert len(built(cache)) == 2
    assert second.digests["train"] != first.digests["train"]


def test_the_digest_names_the_content_and_not_the_place(tmp_path: Path) -> None:
    corpora = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "book.txt").write_bytes(random_bytes(20_000))
        corpora.append(load(tmp_path / name))
    assert corpora[0].digests == corpora[1].digests


def _load_at_once(folder: Path, start: Barrier, results: "Queue[dict[str, str]]") -> None:
    start.wait()
    results.put(load(folder).digests)


def test_two_processes_may_build_the_same_corpus_at_once(texts: Path, cache: Path) -> None:
    # Packed, so that building takes far longer than the two starts lie apart.
    (texts / "book.xz").write_bytes(lzma.compress(random_bytes(3_000_000), preset=0))
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(2), context.Queue()
    processes = [
        context.Process(target=_load_at_once, args=(texts, start, results)) for _ in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert results.get(timeout=5) == results.get(timeout=5)
    assert len(built(cache)) == 1


@pytest.mark.parametrize("damage", ["truncated", "missing", "garbled"])
def test_a_damaged_cache_is_named(texts: Path, cache: Path, damage: str) -> None:
    (texts / "book.txt").write_bytes(random_bytes(20_000))
    load(texts)
    [folder] = built(cache)
    if damage == "truncated":
        os.truncate(folder / "train.bin", 100)
    elif damage == "missing":
        (folder / "valid.bin").unlink()
    else:
        (folder / "corpus.json").write_text(json.dumps({"source": "?"})[:-3])
    assert f"delete {folder}" in refusal(texts)


def test_a_cache_that_cannot_be_written_is_named(texts: Path, cache: Path) -> None:
    (texts / "book.txt").write_bytes(random_bytes(20_000))
    cache.write_text("a file where the folder should be")
    assert str(cache) in refusal(texts)
