"""Sources: what a spec resolves to, and what unreadable or hostile files lead to."""

import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest

from blocktrain.data.corpus import open_source
from blocktrain.data.sources import Source, split_of
from blocktrain.errors import DataError

LIMIT = 10_000_000
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".txt": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
}


def read(source: Source, split: str) -> bytes:
    return b"".join(piece.text for file in source.files[split] for piece in file.pieces())


def refusal(spec: str, cache: Path, limit: int = LIMIT) -> str:
    """The one line a source is refused with, whether on opening or on reading."""
    with pytest.raises(DataError) as caught:
        read(open_source(spec, limit, cache), "train")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_file_is_read_plain_or_packed(tmp_path: Path, suffix: str) -> None:
    content = bytes(range(256)) * 10_000  # more than one chunk
    (tmp_path / f"book{suffix}").write_bytes(PACKERS[suffix](content))
    source = open_source(f"text:{tmp_path}/*", LIMIT, tmp_path)
    assert read(source, "train") == content
    assert source.missing == ("valid", "test")


def test_files_are_joined_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b", "c", "a"):
        (tmp_path / f"{name}.txt").write_text(name)
    assert read(open_source(f"text:{tmp_path}/*.txt", LIMIT, tmp_path), "train") == b"abc"


def test_a_pattern_reaches_into_folders(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "book.txt").write_text("text")
    assert read(open_source(f"text:{tmp_path}/**/*.txt", LIMIT, tmp_path), "train") == b"text"


def test_a_pattern_may_start_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "book.txt").write_text("text")
    assert read(open_source("text:~/book.txt", LIMIT, tmp_path), "train") == b"text"


def test_files_named_like_splits_are_those_splits(tmp_path: Path) -> None:
    for name in ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"):
        (tmp_path / name).write_text(name)
    source = open_source(f"text:{tmp_path}/*", LIMIT, tmp_path)
    assert [read(source, split) for split in ("train", "valid", "test")] == [
        b"wiki.train.tokens",
        b"wiki.valid.tokens",
        b"wiki.test.tokens",
    ]
    assert source.missing == ()


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("valid.txt", "valid"),
        ("VALIDATION-00000-of-00001.parquet", "valid"),
        ("val_1.txt.gz", "valid"),
        ("dev/0.txt", "valid"),
        ("my-test.txt", "test"),
        ("test/0.txt", "test"),
        ("train.txt", "train"),
        ("latest.txt", "train"),
        ("invalid.txt", "train"),
        ("testament.txt", "train"),
    ],
)
def test_a_name_says_its_split_in_whole_words(name: str, split: str) -> None:
    assert split_of(name) == split


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_a_truncated_archive_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"book{suffix}"
    path.write_bytes(PACKERS[suffix](bytes(range(256)) * 100)[:-20])
    assert str(path) in refusal(f"text:{path}", tmp_path)


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_an_archive_of_garbage_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"book{suffix}"
    path.write_bytes(b"this was never an archive" * 100)
    assert str(path) in refusal(f"text:{path}", tmp_path)


@pytest.mark.parametrize(
    ("suffix", "at"), [(".gz", 10), (".gz", -6), (".xz", 30)], ids=["stream", "checksum", "xz"]
)
def test_an_archive_altered_inside_is_named(tmp_path: Path, suffix: str, at: int) -> None:
    path = tmp_path / f"book{suffix}"
    packed = bytearray(PACKERS[suffix](bytes(range(256)) * 100))
    packed[at] = packed[at] ^ 0xFF | 0x07  # 7: a kind of block that deflate does not have
    path.write_bytes(packed)
    assert str(path) in refusal(f"text:{path}", tmp_path)


def test_a_pattern_that_matches_nothing_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path}/none*" in refusal(f"text:{tmp_path}/none*", tmp_path)


def test_a_test_split_alone_is_nothing_to_train_on(tmp_path: Path) -> None:
    (tmp_path / "test.txt").write_text("text")
    assert f"no file to train on, only {tmp_path}" in refusal(f"text:{tmp_path}/*", tmp_path)


@pytest.mark.parametrize("spec", ["", "text:", "hf:", "wikitext", "stdlib:x", "file:book.txt"])
def test_an_unknown_source_lists_the_known_ones(tmp_path: Path, spec: str) -> None:
    message = refusal(spec, tmp_path)
    assert repr(spec) in message
    assert "stdlib, text:GLOB" in message


def test_the_fingerprint_follows_content_size_and_files(tmp_path: Path) -> None:
    def fingerprint() -> str:
        return open_source(f"text:{tmp_path}/*", LIMIT, tmp_path).fingerprint

    (tmp_path / "a.txt").write_text("text")
    first = fingerprint()
    assert fingerprint() == first
    (tmp_path / "a.txt").write_text("longer text")
    second = fingerprint()
    (tmp_path / "b.txt").write_text("more")
    assert len({first, second, fingerprint()}) == 3


def test_a_folder_means_the_text_files_below_it(tmp_path: Path) -> None:
    folder = tmp_path / "[notes]"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("one ")
    (folder / "deep" / "b.md").write_text("two")
    (folder / "deep" / "c.png").write_bytes(b"\x89PNG\0\0")
    (folder / "rows.jsonl").write_text('{"text": "three"}\n')
    assert read(open_source(f"text:{folder}", LIMIT, tmp_path), "train") == b"one two"
    assert read(open_source(f"jsonl:{folder}", LIMIT, tmp_path), "train") == b"three\n"
    assert "no file below" in refusal(f"parquet:{folder}", tmp_path)
    (folder / "a.txt").unlink()
    (folder / "deep" / "b.md").unlink()
    assert "c.png is not text; leave it out" in refusal(f"text:{folder}", tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "remedy"),
    [
        ("rows.parquet", b"PAR1\x15\0", "use parquet:GLOB#COLUMN"),
        ("rows.jsonl", b'{"text": "a"}\n{"text": "b"}\n', "use jsonl:GLOB#COLUMN"),
        ("rows.gz", gzip.compress(b'{"text": "a"}\n', mtime=0), "use jsonl:GLOB#COLUMN"),
        ("photo.jpg", b"\xff\xd8\xff\0\0", "is not text; leave it out"),
        ("code.c", b"{ braces }\nof C\n", ""),
        ("essay.txt", "grüße".encode(), ""),
    ],
)
def test_files_that_are_not_plain_text_are_reported(
    tmp_path: Path, name: str, content: bytes, remedy: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / name).write_bytes(content)
    open_source(f"text:{tmp_path}/{name}", LIMIT, tmp_path)
    assert remedy in caplog.text
    assert bool(caplog.records) == bool(remedy)
