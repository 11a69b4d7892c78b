"""The hub: files put in place by hand, downloads from a real server, and no server at all."""

import hashlib
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from tests.support.hub_server import HubHandler, HubServer
from tests.support.web import serving, unused_address

from blocktrain.config import DataConfig
from blocktrain.data import hub
from blocktrain.data.corpus import load_corpus
from blocktrain.data.documents import read_parquet
from blocktrain.data.hub import choose_files, fetch
from blocktrain.errors import DataError

LIMIT = 1_000_000
SPLITS = ("train", "valid", "test")
COMMIT = hub.WIKITEXT["wikitext-2"].revision
REPOSITORY = hub.WIKITEXT["wikitext-2"].repository
WIKI_ROWS = {
    "train": ["", " = Title = \n", "", " First line \n", " Second line \n"],
    "validation": ["", " Held out \n"],
    "test": [" Last \n", ""],
}
WIKI_TEXTS = {
    "train": b" \n = Title = \n \n First line \n Second line \n",
    "valid": b" \n Held out \n",
    "test": b" Last \n \n",
}
WIKI_SUMS = {split: hashlib.sha256(text).hexdigest() for split, text in WIKI_TEXTS.items()}
RELEASES = {"tiny": hub.wikitext(config="tiny-v1", sha256=WIKI_SUMS)}


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy of the environment would not find servers of this machine."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


class Datasets(HubServer):
    """Serves dictionaries of files as dataset repositories."""

    def __init__(self) -> None:
        super().__init__(COMMIT)
        self.repositories: dict[str, dict[str, bytes]] = {}

    def answer(self, path: str) -> bytes | None:
        for name, files in self.repositories.items():
            if path in (f"/api/datasets/{name}", f"/api/datasets/{name}/revision/{COMMIT}"):
                siblings = [{"rfilename": k, "size": len(v)} for k, v in files.items()]
                return json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode()
            prefix = f"/datasets/{name}/resolve/{COMMIT}/"
            if path.startswith(prefix):
                return files.get(path.removeprefix(prefix))
        return None


@pytest.fixture
def server() -> Iterator[Datasets]:
    server = Datasets()
    with serving(server):
        yield server


@pytest.fixture
def nobody() -> str:
    return unused_address()


def packed(rows: list[str | None], column: str = "text") -> bytes:
    out = pa.BufferOutputStream()
    parquet.write_table(pa.table({column: pa.array(rows, pa.string())}), out)
    return bytes(out.getvalue())


def serve_tiny_wikitext(server: Datasets) -> None:
    files = {
        f"tiny-v1/{name}-00000-of-00001.parquet": packed([*rows])
        for name, rows in WIKI_ROWS.items()
        if name != "train"
    }
    files["tiny-v1/train-00000-of-00002.parquet"] = packed([*WIKI_ROWS["train"][:2]])
    files["tiny-v1/train-00001-of-00002.parquet"] = packed([*WIKI_ROWS["train"][2:]])
    files["tiny-raw-v1/train-00000-of-00001.parquet"] = b"another configuration"
    server.repositories[REPOSITORY] = files


def place(cache: Path, name: str, texts: dict[str, bytes]) -> Path:
    folder = cache / "hub" / name
    folder.mkdir(parents=True)
    for split, text in texts.items():
        (folder / f"{split}.txt").write_bytes(text)
    return folder


def refusal(fetch: Callable[[], object]) -> str:
    with pytest.raises(DataError) as caught:
        fetch()
    assert caught.value.exit_code == 3
    assert "\n" not in str(caught.value)
    return str(caught.value)


def contents(files: dict[str, list[Path]]) -> dict[str, bytes]:
    return {split: b"".join(path.read_bytes() for path in paths) for split, paths in files.items()}


class TestByHand:
    def test_files_in_place_are_used_and_nobody_is_asked(
        self, tmp_path: Path, server: Datasets
    ) -> None:
        place(tmp_path, "tiny", WIKI_TEXTS)
        files = fetch("tiny", tmp_path, LIMIT, server.endpoint, RELEASES)
        assert contents(files) == WIKI_TEXTS
        assert server.asked == []

    def test_they_are_used_without_the_extra(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        place(tmp_path, "tiny", WIKI_TEXTS)
        assert contents(fetch("tiny", tmp_path, LIMIT, named=RELEASES)) == WIKI_TEXTS

    @pytest.mark.parametrize("split", SPLITS)
    def test_an_altered_file_is_named(self, tmp_path: Path, split: str) -> None:
        folder = place(tmp_path, "tiny", WIKI_TEXTS)
        path = folder / f"{split}.txt"
        path.write_bytes(path.read_bytes().replace(b" ", b"_", 1))
        message = refusal(lambda: fetch("tiny", tmp_path, LIMIT, named=RELEASES))
        assert f"{path} is not the {split} split" in message
        assert "delete it" in message

    def test_a_truncated_file_shows_in_its_lines(self, tmp_path: Path) -> None:
        lines = {split: text.count(b"\n") for split, text in WIKI_TEXTS.items()}
        releases = {"tiny": hub.wikitext(config="tiny-v1", lines=lines)}
        folder = place(tmp_path, "tiny", WIKI_TEXTS)
        assert contents(fetch("tiny", tmp_path, LIMIT, named=releases)) == WIKI_TEXTS
        (folder / "valid.txt").write_bytes(WIKI_TEXTS["valid"][:-1])
        message = refusal(lambda: fetch("tiny", tmp_path, LIMIT, named=releases))
        assert f"{folder / 'valid.txt'} is not the valid split of tiny (lines 1, not 2)" in message

    def test_the_official_release_is_told_from_any_other_text(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("BLOCKTRAIN_CACHE", str(tmp_path))
        folder = place(tmp_path, "wikitext-2", WIKI_TEXTS)
        message = refusal(lambda: load_corpus(DataConfig("wikitext-2")))
        assert str(folder / "train.txt") in message

    def test_a_dataset_by_hand_becomes_a_corpus(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("BLOCKTRAIN_CACHE", str(tmp_path))
        place(tmp_path, "owner--repo--config", {"train": b"x" * 20_000, "test": b"y" * 600})
        corpus = load_corpus(DataConfig("hf:owner/repo:config"))
        assert {name: len(split) for name, split in corpus.splits.items()} == {
            "train": 19_000,
            "valid": 1_000,
            "test": 600,
        }


class TestNoHub:
    def test_wikitext_says_which_files_to_put_where(self, tmp_path: Path, nobody: str) -> None:
        began = time.monotonic()
        message = refusal(lambda: fetch("wikitext-2", tmp_path, LIMIT, endpoint=nobody))
        assert time.monotonic() - began < 20
        assert f"put train.txt, valid.txt, test.txt into {tmp_path / 'hub/wikitext-2'}" in message
        assert "refused" in message

    def test_a_dataset_says_which_file_to_put_where(self, tmp_path: Path, nobody: str) -> None:
        message = refusal(lambda: fetch("hf:owner/repo", tmp_path, LIMIT, nobody))
        assert f"put train.txt into {tmp_path / 'hub/owner--repo'}" in message

    def test_a_server_that_is_no_hub(self, tmp_path: Path) -> None:
        class Portal(HubHandler):
            def respond(self, *, with_body: bool) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"<html>Please log in to this network</html>")

        with serving(ThreadingHTTPServer(("127.0.0.1", 0), Portal)) as endpoint:
            message = refusal(lambda: fetch("hf:owner/repo", tmp_path, LIMIT, endpoint))
        assert "cannot download" in message

    @pytest.mark.parametrize("module", ["huggingface_hub", "pyarrow"])
    def test_without_the_extra_it_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
    ) -> None:
        loaded = [name for name in sys.modules if name.split(".")[0] == module]
        for name in {module, *loaded}:
            monkeypatch.setitem(sys.modules, name, None)  # what makes an import fail
        message = refusal(lambda: fetch("wikitext-2", tmp_path, LIMIT))
        assert "pip install 'blocktrain[hub]'" in message
        assert str(tmp_path / "hub/wikitext-2") in message

    def test_a_cache_that_cannot_be_written_is_named(self, tmp_path: Path, nobody: str) -> None:
        (tmp_path / "hub").write_text("a file where the folder should be")
        message = refusal(lambda: fetch("wikitext-2", tmp_path, LIMIT, endpoint=nobody))
        assert f"cannot write to {tmp_path / 'hub/wikitext-2'}" in message


class TestDownload:
    def test_wikitext_comes_out_byte_for_byte(self, tmp_path: Path, server: Datasets) -> None:
        serve_tiny_wikitext(server)
        files = fetch("tiny", tmp_path, LIMIT, server.endpoint, RELEASES)
        assert contents(files) == WIKI_TEXTS
        assert files["train"] == [tmp_path / "hub/tiny/train.txt"]

    def test_it_is_downloaded_once_and_only_the_texts_are_kept(
        self, tmp_path: Path, server: Datasets
    ) -> None:
        serve_tiny_wikitext(server)
        fetch("tiny", tmp_path, LIMIT, server.endpoint, RELEASES)
        assert not any("tiny-raw" in asked for asked in server.asked)
        server.asked.clear()
        fetch("tiny", tmp_path, LIMIT, server.endpoint, RELEASES)
        assert server.asked == []
        assert {path.name for path in (tmp_path / "hub/tiny").iterdir()} == {
            "train.txt",
            "valid.txt",
            "test.txt",
            ".lock",
        }

    def test_a_file_put_there_by_hand_is_not_overwritten(
        self, tmp_path: Path, server: Datasets
    ) -> None:
        serve_tiny_wikitext(server)
        folder = place(tmp_path, "tiny", {"train": WIKI_TEXTS["train"]})
        written = (folder / "train.txt").stat().st_mtime_ns
        files = fetch("tiny", tmp_path, LIMIT, server.endpoint, RELEASES)
        assert contents(files) == WIKI_TEXTS
        assert (folder / "train.txt").stat().st_mtime_ns == written
        assert not any("/train-" in asked for asked in server.asked)

    def test_other_text_on_the_hub_is_noticed(self, tmp_path: Path, server: Datasets) -> None:
        serve_tiny_wikitext(server)
        files = server.repositories[REPOSITORY]
        files["tiny-v1/test-00000-of-00001.parquet"] = packed(["something else\n"])
        message = refusal(lambda: fetch("tiny", tmp_path, LIMIT, server.endpoint, RELEASES))
        assert f"{tmp_path / 'hub/tiny/test.txt'} is not the test split" in message

    def test_a_failed_download_is_taken_up_where_it_stopped(
        self, tmp_path: Path, server: Datasets
    ) -> None:
        serve_tiny_wikitext(server)
        files = server.repositories[REPOSITORY]
        last = "tiny-v1/train-00001-of-00002.parquet"
        good, files[last] = files[last], b"not a parquet file"

        def fetch_tiny() -> dict[str, list[Path]]:
            return fetch("tiny", tmp_path, LIMIT, server.endpoint, RELEASES)

        bad = tmp_path / "hub/tiny/download" / last
        assert f"cannot read {bad}" in refusal(fetch_tiny)
        assert not (tmp_path / "hub/tiny/train.txt").exists()
        files[last] = good
        bad.unlink()
        server.asked.clear()
        assert contents(fetch_tiny()) == WIKI_TEXTS
        downloaded = [asked for asked in server.asked if asked.startswith("GET /datasets/")]
        assert downloaded == [f"GET /datasets/{REPOSITORY}/resolve/{COMMIT}/{last}"]

    def test_one_file_at_a_time_is_on_disk_and_no_more_than_needed_are_downloaded(
        self, tmp_path: Path, server: Datasets, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rows = [f"document {number}" * 90 for number in range(100)]
        names = [f"data/train-{number:05d}-of-00004.parquet" for number in range(4)]
        server.repositories["owner/repo"] = {
            name: packed(rows[25 * number : 25 * (number + 1)]) for number, name in enumerate(names)
        }
        folder, on_disk = tmp_path / "hub/owner--repo--first-40000", []
        answer = server.answer

        def counted(path: str) -> bytes | None:
            on_disk.append(len(list(folder.glob("download/data/*.parquet"))))
            return answer(path)

        monkeypatch.setattr(server, "answer", counted)
        files = fetch("hf:owner/repo", tmp_path, LIMIT, server.endpoint, most=40_000)
        text = contents(files)["train"].decode()
        assert 40_000 <= len(text) < 42_000
        assert text.splitlines() == rows[: text.count("\n")]
        assert max(on_disk) == 0  # a file is asked for once the one before is gone
        asked = [path for path in server.asked if path.startswith("GET /datasets/")]
        assert [path.rsplit("/", 1)[1] for path in asked] == [
            name.rsplit("/", 1)[1] for name in names[:2]
        ]
        ends = np.fromfile(folder / "train.ends", "<u8")
        assert [text[:end].count("\n") for end in ends] == list(range(1, len(ends) + 1))
        whole = contents(fetch("hf:owner/repo", tmp_path, LIMIT, server.endpoint))["train"]
        assert whole.decode().splitlines() == rows

    def test_two_processes_may_fetch_at_once(self, tmp_path: Path, server: Datasets) -> None:
        serve_tiny_wikitext(server)
        context = multiprocessing.get_context("spawn")
        args = ("tiny", tmp_path, LIMIT, server.endpoint, RELEASES)
        processes = [context.Process(target=fetch, args=args) for _ in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=60)
        assert [process.exitcode for process in processes] == [0, 0]
        assert contents(fetch(*args)) == WIKI_TEXTS
        assert len([asked for asked in server.asked if asked.startswith("GET /api/")]) == 1

    def test_a_dataset_is_split_by_the_names_of_its_files(
        self, tmp_path: Path, server: Datasets
    ) -> None:
        server.repositories["owner/repo"] = {
            "README.md": b"about",
            "data/train-00001-of-00002.parquet": packed(["three\n", None]),
            "data/train-00000-of-00002.parquet": packed(["one", "two\n"]),
            "data/validation-00000-of-00001.parquet": packed(["held out"]),
        }
        files = fetch("hf:owner/repo", tmp_path, LIMIT, server.endpoint)
        assert contents(files) == {"train": b"one\ntwo\nthree\n\n", "valid": b"held out\n"}

    def test_a_dataset_of_plain_text(self, tmp_path: Path, server: Datasets) -> None:
        server.repositories["owner/repo"] = {"train/a.txt": b"A", "train/b.txt": b"B"}
        files = fetch("hf:owner/repo", tmp_path, LIMIT, server.endpoint)
        assert contents(files) == {"train": b"AB"}

    def test_one_configuration_of_several(self, tmp_path: Path, server: Datasets) -> None:
        server.repositories["owner/repo"] = {
            f"{config}/train.parquet": packed([config]) for config in ("en", "fr")
        }
        message = refusal(lambda: fetch("hf:owner/repo", tmp_path, LIMIT, server.endpoint))
        assert "use one of hf:owner/repo:en, hf:owner/repo:fr" in message
        files = fetch("hf:owner/repo:fr", tmp_path, LIMIT, server.endpoint)
        assert contents(files) == {"train": b"fr\n"}

    def test_a_repository_that_does_not_exist(self, tmp_path: Path, server: Datasets) -> None:
        message = refusal(lambda: fetch("hf:owner/none", tmp_path, LIMIT, server.endpoint))
        assert "hf:owner/none: cannot download it (404" in message

    def test_a_dataset_larger_than_the_limit_is_not_downloaded(
        self, tmp_path: Path, server: Datasets
    ) -> None:
        server.repositories["owner/repo"] = {"train.txt": bytes(2000)}
        message = refusal(lambda: fetch("hf:owner/repo", tmp_path, 1999, server.endpoint))
        assert "unpack_limit_mb" in message
        assert not any("/resolve/" in asked for asked in server.asked)

    def test_parquet_that_unpacks_too_large_is_refused(
        self, tmp_path: Path, server: Datasets
    ) -> None:
        bomb = packed(["x" * 5_000_000])
        assert len(bomb) < LIMIT
        server.repositories["owner/repo"] = {"train.parquet": bomb}
        message = refusal(lambda: fetch("hf:owner/repo", tmp_path, LIMIT, server.endpoint))
        assert "unpacks to more than data.unpack_limit_mb" in message
        assert not (tmp_path / "hub/owner--repo/train.txt").exists()

    @pytest.mark.parametrize("name", ["../../up/train.txt", "/train.txt", "a\\train.txt"])
    def test_a_file_name_that_leads_out_is_refused(
        self, tmp_path: Path, server: Datasets, name: str
    ) -> None:
        server.repositories["owner/repo"] = {"train.txt": b"text", name: b"text"}
        message = refusal(lambda: fetch("hf:owner/repo", tmp_path, LIMIT, server.endpoint))
        assert "unsafe name" in message


@pytest.mark.parametrize(
    "name",
    [
        "repo",
        "owner/",
        "/repo",
        "../repo",
        "owner/..",
        "owner/../../x",
        "owner/repo/extra",
        "owner/repo:",
        "owner/repo:..",
        "owner/repo:a/b",
        "owner/.hidden",
        "owner/re..po",
        "owner/repo--en",
        "own er/repo",
        "owner/repo\n",
    ],
)
def test_a_suspicious_name_is_refused(tmp_path: Path, server: Datasets, name: str) -> None:
    message = refusal(lambda: fetch(f"hf:{name}", tmp_path, LIMIT, server.endpoint))
    assert "is not of the form hf:OWNER/REPO" in message
    assert server.asked == []
    assert list(tmp_path.iterdir()) == []


def test_parquet_is_preferred_to_text_and_other_files_are_left() -> None:
    names = ["LICENSE.txt", "data/test-0.parquet", "data/train-0.parquet", "script.py"]
    assert choose_files("hf:x", names, "") == {
        "train": ["data/train-0.parquet"],
        "valid": [],
        "test": ["data/test-0.parquet"],
    }


def test_folders_named_like_splits_are_no_configurations() -> None:
    names = ["train/0.parquet", "validation/0.parquet", "test/0.parquet"]
    assert choose_files("hf:x", names, "") == {
        "train": ["train/0.parquet"],
        "valid": ["validation/0.parquet"],
        "test": ["test/0.parquet"],
    }


def test_the_name_of_a_configuration_is_not_taken_for_a_split() -> None:
    names = ["data/test/train.parquet", "data/test/valid.parquet", "data/other/train.parquet"]
    assert choose_files("hf:x", names, "test") == {
        "train": ["data/test/train.parquet"],
        "valid": ["data/test/valid.parquet"],
        "test": [],
    }


@pytest.mark.parametrize(
    ("names", "config"),
    [([], ""), (["a.csv"], ""), (["test.parquet"], ""), (["en/train.parquet"], "fr")],
)
def test_nothing_to_train_on(names: list[str], config: str) -> None:
    with pytest.raises(DataError, match=r"hf:x: .* has no \.parquet or \.txt file to train on"):
        choose_files("hf:x", names, config)


def texts(path: Path) -> list[bytes]:
    return [text for text, _ in read_parquet(path)]


class TestParquet:
    def test_rows_come_in_order_across_row_groups(self, tmp_path: Path) -> None:
        rows = [f"row {i}\n" for i in range(10_000)]
        path = tmp_path / "rows.parquet"
        parquet.write_table(pa.table({"id": range(10_000), "text": rows}), path, row_group_size=999)
        assert b"".join(texts(path)) == "".join(rows).encode()

    @pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary()])
    def test_any_kind_of_text_column(self, tmp_path: Path, kind: pa.DataType) -> None:
        path = tmp_path / "rows.parquet"
        parquet.write_table(pa.table({"text": pa.array(["é\n", None, ""], kind)}), path)
        assert texts(path) == ["é\n".encode(), b"", b""]

    def test_a_file_without_the_column_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.parquet"
        path.write_bytes(packed(["x"], column="content"))
        assert f"{path} has no column named text" in refusal(lambda: texts(path))

    def test_a_column_of_something_else_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.parquet"
        parquet.write_table(pa.table({"text": [[1], [2]]}), path)
        assert str(path) in refusal(lambda: texts(path))

    @pytest.mark.parametrize("keep", [0, 4, 100, -10])
    def test_a_truncated_file_is_named(self, tmp_path: Path, keep: int) -> None:
        path = tmp_path / "rows.parquet"
        path.write_bytes(packed(["text\n"] * 1000)[:keep])
        assert str(path) in refusal(lambda: texts(path))
