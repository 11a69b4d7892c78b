"""Datasets of the Hugging Face hub, stored as plain text in the cache.

A dataset becomes `CACHE/hub/NAME/train.txt`, and `valid.txt` and `test.txt` if it has those splits.
Files that exist already, even if a user put them there, are used without a network request. Of the
repository's own files, one at a time is on disk.
`train.ends` lists where the documents of `train.txt` end; without it, the file is one document.

WikiText-2 is checked against the sha256 of the official word-level release, WikiText-103 only
against the number of lines of each split. Their valid and test splits differ, since WikiText-103
has the larger vocabulary.

huggingface_hub and pyarrow are an optional extra, imported only for a download.
"""

import importlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import numpy as np
from filelock import FileLock

from blocktrain.data.documents import (
    END_TYPE,
    as_line,
    last_end,
    one_line,
    read_chunks,
    read_marked_text,
    read_parquet,
)
from blocktrain.data.sources import SPLITS, Budget, Source, TextFile, path_source, split_of
from blocktrain.errors import DataError, DownloadError
from blocktrain.files import UNFINISHED, file_sha256, move, write_bytes

FOLDER = "hub"
TIMEOUT_SECONDS = 10
DATASET = re.compile(r"hf:([\w-][\w.-]*/[\w-][\w.-]*)(?::([\w-][\w.-]*))?", re.ASCII)


@dataclass(frozen=True)
class Dataset:
    """A dataset of the hub; `lines` and `sha256` are the expected values of each split."""

    repository: str
    config: str = ""
    revision: str | None = None
    needed: tuple[str, ...] = ("train",)
    line: Callable[[bytes], bytes] = as_line
    rows_are_documents: bool = True
    lines: Mapping[str, int] = field(default_factory=dict)
    sha256: Mapping[str, str] = field(default_factory=dict)


def _wikitext_line(row: bytes) -> bytes:
    """A line of WikiText from a row of the hub. WikiText's blank lines hold one space; the hub
    stores them as empty rows."""
    return row or b" \n"


wikitext = partial(
    Dataset,
    "Salesforce/wikitext",
    revision="b08601e04326c79dfdd32d625aee71d232d685c3",
    needed=SPLITS,
    line=_wikitext_line,
    rows_are_documents=False,
)
WIKITEXT: Mapping[str, Dataset] = {
    "wikitext-2": wikitext(
        config="wikitext-2-v1",
        sha256={
            "train": "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
            "valid": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
            "test": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
        },
    ),
    "wikitext-103": wikitext(
        config="wikitext-103-v1", lines={"train": 1_801_350, "valid": 3_760, "test": 4_358}
    ),
}


def fetch(
    spec: str,
    cache: Path,
    limit: int,
    endpoint: str | None = None,
    named: Mapping[str, Dataset] = WIKITEXT,
    most: int = 0,
) -> dict[str, list[Path]]:
    """The text files of each split, downloaded if they are not in the cache. `spec` is a name in
    `named`, hf:OWNER/REPO or hf:OWNER/REPO:CONFIG. `most`: bytes of training text; 0: all."""
    text = _text(spec, cache, endpoint, named, most)
    text.fill(limit)
    files = {split: [path] for split in SPLITS if (path := text.path(split)).exists()}
    for split, [path] in files.items():
        _check(path, split, spec, text.dataset)
    return files


def hub_source(spec: str, cache: Path, limit: int, most: int = 0) -> Source:
    """The source of a dataset, downloaded if it is not in the cache."""
    source = path_source(spec, "text", fetch(spec, cache, limit, most=most))
    text = _text(spec, cache, most=most)
    files = {
        split: [text.with_ends(split, file) for file in source.files[split]]
        for split in source.files
    }
    return replace(source, files=files)


def is_cached(spec: str, cache: Path) -> bool:
    """Whether a dataset's text is in the cache; False if `spec` names no dataset."""
    try:
        return _text(spec, cache).is_complete
    except DataError:
        return False


def choose_files(spec: str, names: Iterable[str], config: str) -> dict[str, list[str]]:
    """The files of each split: those in the configuration's folder or, without a configuration,
    all. Uses .parquet files if there are any, else .txt files."""
    inside = {name: rest for name in sorted(names) if (rest := _inside(name, config))}
    chosen = [name for name in inside if name.endswith(".parquet")]
    chosen = chosen or [name for name in inside if name.endswith(".txt")]
    if not config:
        _refuse_several_configs(spec, chosen)
    by_split = {
        split: [name for name in chosen if split_of(inside[name]) == split] for split in SPLITS
    }
    if not by_split["train"]:
        where = f"the folder {config} of the repository" if config else "the repository"
        raise DataError(
            f"{spec}: {where} has no .parquet or .txt file to train on; use another dataset"
        )
    return by_split


def _inside(name: str, config: str) -> str:
    """A file's path within the folder of a configuration; empty if it lies elsewhere."""
    if not config:
        return name
    *folders, last = name.split("/")
    if config not in folders:
        return ""
    return "/".join([*folders[folders.index(config) + 1 :], last])


def _refuse_several_configs(spec: str, names: Iterable[str]) -> None:
    """Refuse files of several configurations. These are mostly variants of the same text, which
    would be read several times."""
    folders = {name.split("/")[0] for name in names if "/" in name}
    configs = sorted(name for name in folders if name != "train" and split_of(name) == "train")
    if len(configs) > 1:
        choices = ", ".join(f"{spec}:{name}" for name in configs)
        raise DataError(f"{spec} has several configurations; use one of {choices}")


def _refuse_unsafe(spec: str, names: Iterable[str]) -> None:
    """Refuse file names that lead out of the cache, in which they become paths."""
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name:
            raise DataError(
                f"{spec}: the repository has a file with an unsafe name, {name!r}; use another"
                " dataset"
            )


@dataclass(frozen=True)
class _Text:
    """The text of a dataset in the cache."""

    spec: str
    dataset: Dataset
    folder: Path
    endpoint: str | None
    most: int  # bytes of training text; 0: all

    def path(self, split: str) -> Path:
        return self.folder / f"{split}.txt"

    def ends(self, split: str) -> Path:
        return self.folder / f"{split}.ends"

    def with_ends(self, split: str, file: TextFile) -> TextFile:
        """The same file, read as separate documents if it is known where they end."""
        path, ends = self.path(split), self.ends(split)
        if not ends.exists() or last_end(ends) != file.size:
            return file
        return replace(file, pieces=partial(read_marked_text, path, ends))

    @property
    def is_complete(self) -> bool:
        return all(self.path(split).exists() for split in self.dataset.needed)

    @property
    def _downloads(self) -> Path:
        return self.folder / "download"

    def fill(self, limit: int) -> None:
        """Download the missing splits, one process at a time."""
        if self.is_complete:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with FileLock(self.folder / ".lock"):
                if not self.is_complete:  # another process may have been first
                    self._fetch(limit)
        except OSError as error:
            raise DataError(
                f"cannot write to {self.folder}: {one_line(error)};"
                " free space there or set BLOCKTRAIN_CACHE to another folder"
            ) from None

    def _fetch(self, limit: int) -> None:
        budget = Budget(self.spec, limit)
        commit, by_split = self._list(limit)
        # The training split comes last: once it exists, so do the others.
        for split in reversed(SPLITS):
            if by_split[split] and not self.path(split).exists():
                self._write(split, commit, by_split[split], budget)
        shutil.rmtree(self._downloads, ignore_errors=True)

    def _write(self, split: str, commit: str, names: Sequence[str], budget: Budget) -> None:
        """Append the text of these files, one after another, and delete each. A journal records the
        files that are complete, so that a killed download continues."""
        path, ends_path = self.path(split), self.ends(split)
        text, ends = (each.with_name(f"{each.name}{UNFINISHED}") for each in (path, ends_path))
        journal = path.with_suffix(".journal")
        done = _read_journal(journal, commit, text, ends)
        budget.take(done["text"])
        with _appending(text, done["text"]) as out, _appending(ends, done["ends"]) as out_ends:
            for number in range(done["files"], len(names)):
                if self._is_enough(split, out.tell()):
                    break
                downloaded = self._download(commit, names[number])
                self._append(split, downloaded, budget, out, out_ends)
                for file in (out, out_ends):
                    file.flush()
                    os.fsync(file.fileno())
                done = {"files": number + 1, "text": out.tell(), "ends": out_ends.tell()}
                write_bytes(journal, json.dumps({"commit": commit, **done}).encode())
                downloaded.unlink()
        if self.dataset.rows_are_documents:
            move(ends, ends_path, sync=True)
        move(text, path, sync=True)
        for left in (journal, ends):
            left.unlink(missing_ok=True)

    def _append(
        self, split: str, path: Path, budget: Budget, out: BinaryIO, out_ends: BinaryIO
    ) -> None:
        """Append a file's text, and the positions at which its documents end."""
        rows = path.suffix == ".parquet" and self.dataset.rows_are_documents
        for text in budget.spend(self._read(path)):
            out.write(text)
            if rows:
                out_ends.write(_as_end(out.tell()))
            if self._is_enough(split, out.tell()):
                break
        if not rows:
            out_ends.write(_as_end(out.tell()))

    def _is_enough(self, split: str, size: int) -> bool:
        return bool(self.most) and split == SPLITS[0] and size >= self.most

    def _read(self, path: Path) -> Iterator[bytes]:
        if path.suffix != ".parquet":
            return (chunk for chunk, _ in read_chunks(path))
        remedy = "delete it to download it again"
        return (self.dataset.line(row) for row, _ in read_parquet(path, remedy=remedy))

    def _list(self, limit: int) -> tuple[str, dict[str, list[str]]]:
        """The commit to read from, and the files of each split."""
        with self._hub_errors():
            from huggingface_hub import HfApi

            # Comes first, since it fails at once without a network, while a download retries.
            info = HfApi(endpoint=self.endpoint).dataset_info(
                self.dataset.repository,
                revision=self.dataset.revision,
                files_metadata=True,
                timeout=TIMEOUT_SECONDS,
            )
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
        _refuse_unsafe(self.spec, sizes)
        by_split = choose_files(self.spec, sizes, self.dataset.config)
        whole = SPLITS[1:] if self.most else SPLITS  # splits that are downloaded whole
        packed = sum(sizes[name] for split in whole for name in by_split[split])
        if packed > limit:
            raise DataError(
                f"{self.spec}: {packed / 1e6:.0f} MB to download, more than"
                " data.unpack_limit_mb allows; raise it, or use the beginning of the text with"
                " data.most_mb"
            )
        return info.sha or "main", by_split

    def _download(self, commit: str, name: str) -> Path:
        with self._hub_errors():
            from huggingface_hub import hf_hub_download

            path = hf_hub_download(
                self.dataset.repository,
                name,
                repo_type="dataset",
                revision=commit,
                endpoint=self.endpoint,
                local_dir=self._downloads,
                etag_timeout=TIMEOUT_SECONDS,
            )
        return Path(path)

    def _hub_errors(self) -> AbstractContextManager[None]:
        names = ", ".join(self.path(split).name for split in self.dataset.needed)
        by_hand = f"put {names} into {self.folder.absolute()}"
        # pyarrow too: if it is missing, fail before the download
        return hub_errors(self.spec, by_hand, ("huggingface_hub", "pyarrow"))


def _read_journal(journal: Path, commit: str, text: Path, ends: Path) -> dict[str, int]:
    """How much of an interrupted download is complete: files of the repository, and bytes of text
    and of ends."""
    with suppress(OSError, ValueError, KeyError):
        done = json.loads(journal.read_bytes())
        sizes = {"text": text.stat().st_size, "ends": ends.stat().st_size}
        if done.pop("commit") == commit and all(sizes[name] >= done[name] for name in sizes):
            return {name: int(done[name]) for name in ("files", "text", "ends")}
    return {"files": 0, "text": 0, "ends": 0}


@contextmanager
def _appending(path: Path, size: int) -> Iterator[BinaryIO]:
    """Open a file to write after its first `size` bytes."""
    path.touch()
    with path.open("r+b") as file:
        file.truncate(size)
        file.seek(size)
        yield file


def _as_end(position: int) -> bytes:
    return np.array(position, END_TYPE).tobytes()


@contextmanager
def hub_errors(spec: str, by_hand: str, modules: Sequence[str]) -> Iterator[None]:
    """Raise a DataError for any failure to reach or read the hub. `by_hand`: what to do instead."""
    try:
        for module in modules:
            importlib.import_module(module)
        errors = download_errors()
    except ImportError:
        raise DataError(
            f"{spec} needs {' and '.join(modules)}: pip install 'blocktrain[hub]', or {by_hand}"
        ) from None
    try:
        yield
    except errors as error:
        raise DownloadError(
            f"{spec}: cannot download it ({one_line(error)}); try again, or {by_hand}"
        ) from None


def _text(
    spec: str,
    cache: Path,
    endpoint: str | None = None,
    named: Mapping[str, Dataset] = WIKITEXT,
    most: int = 0,
) -> _Text:
    dataset = named.get(spec) or _parsed(spec)
    name = re.sub("[/:]", "--", spec.removeprefix("hf:")) + f"--first-{most}" * bool(most)
    return _Text(spec, dataset, cache / FOLDER / name, endpoint, most)


def _parsed(spec: str) -> Dataset:
    parsed = DATASET.fullmatch(spec)
    if not parsed or ".." in spec or "--" in spec:
        raise DataError(f"{spec!r} is not of the form hf:OWNER/REPO or hf:OWNER/REPO:CONFIG")
    repository, config = parsed.groups(default="")
    return Dataset(repository, config)


def download_errors() -> tuple[type[BaseException], ...]:
    """The exceptions that huggingface_hub raises when a request fails.

    They include those of its HTTP library, which depends on its version (requests, httpx, httpx2).
    The base class of HfHubHTTPError covers them.
    """
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    transport = [base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)]
    return (*transport, EntryNotFoundError, OSError, RuntimeError, ValueError)


def _check(path: Path, split: str, spec: str, dataset: Dataset) -> None:
    """Compare a file with the expected values of its split."""
    facts: tuple[tuple[str, Mapping[str, object], Callable[[Path], object]], ...] = (
        ("sha256", dataset.sha256, file_sha256),
        ("lines", dataset.lines, _count_lines),
    )
    for fact, expected, measure in facts:
        if split in expected and (actual := measure(path)) != expected[split]:
            raise DataError(
                f"{path} is not the {split} split of {spec}"
                f" ({fact} {actual}, not {expected[split]}); delete it to download it again"
            )


def _count_lines(path: Path) -> int:
    return sum(chunk.count(b"\n") for chunk, _ in read_chunks(path))
