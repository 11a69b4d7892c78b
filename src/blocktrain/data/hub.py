"""Datasets of the Hugging Face hub, stored as plain text in the cache.

A dataset becomes `CACHE/hub/NAME/train.txt`, and `valid.txt` and `test.txt` where it has them.
Files that are there already are used, also if a user put them there, without asking the network.

WikiText-2 is checked against the sha256 of the official word-level release, WikiText-103 only
against the number of lines of each split. Their valid and test splits differ, since WikiText-103
knows more of the words.

huggingface_hub and pyarrow are an optional extra, imported only when there is something to fetch.
"""

import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from filelock import FileLock

from blocktrain.data.sources import SPLITS, Budget, split_of
from blocktrain.errors import DataError
from blocktrain.files import atomic_write, file_sha256

FOLDER = "hub"
TEXT_COLUMN = "text"
TIMEOUT_SECONDS = 10
DATASET_NAME = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?::([\w-][\w.-]*))?", re.ASCII)

WIKITEXT_REPOSITORY = "Salesforce/wikitext"
WIKITEXT_REVISION = "b08601e04326c79dfdd32d625aee71d232d685c3"


@dataclass(frozen=True)
class Release:
    """A published dataset, and what each of its splits must be like."""

    config: str
    lines: Mapping[str, int] = field(default_factory=dict)
    sha256: Mapping[str, str] = field(default_factory=dict)


WIKITEXT: Mapping[str, Release] = {
    "wikitext-2": Release(
        "wikitext-2-v1",
        sha256={
            "train": "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
            "valid": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
            "test": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
        },
    ),
    "wikitext-103": Release(
        "wikitext-103-v1", lines={"train": 1_801_350, "valid": 3_760, "test": 4_358}
    ),
}


@dataclass(frozen=True)
class _Dataset:
    """Where a dataset is on the hub, and where its text is stored."""

    spec: str
    repository: str
    config: str
    revision: str | None
    endpoint: str | None
    folder: Path
    needed: tuple[str, ...]
    line: Callable[[bytes], bytes]

    def path(self, split: str) -> Path:
        return self.folder / f"{split}.txt"

    @property
    def is_complete(self) -> bool:
        return all(self.path(split).exists() for split in self.needed)

    @property
    def by_hand(self) -> str:
        """What to do without the hub."""
        names = ", ".join(self.path(split).name for split in self.needed)
        return f"put {names} into {self.folder.absolute()}"


def fetch_wikitext(
    spec: str,
    cache: Path,
    limit: int,
    releases: Mapping[str, Release] = WIKITEXT,
    endpoint: str | None = None,
) -> dict[str, list[Path]]:
    """The files of a WikiText release by split, downloaded if they are not in the cache."""
    release = releases[spec]
    dataset = _Dataset(
        spec=spec,
        repository=WIKITEXT_REPOSITORY,
        config=release.config,
        revision=WIKITEXT_REVISION,
        endpoint=endpoint,
        folder=cache / FOLDER / spec,
        needed=SPLITS,
        line=_wikitext_line,
    )
    _fill(dataset, limit)
    for split in SPLITS:
        _check(dataset.path(split), split, spec, release)
    return {split: [dataset.path(split)] for split in SPLITS}


def fetch_dataset(
    name: str, cache: Path, limit: int, endpoint: str | None = None
) -> dict[str, list[Path]]:
    """The files of a dataset named OWNER/REPO or OWNER/REPO:CONFIG, for the splits it has."""
    spec = f"hf:{name}"
    parsed = DATASET_NAME.fullmatch(name)
    if not parsed or ".." in name or "--" in name:
        raise DataError(f"{spec!r} is not of the form hf:OWNER/REPO or hf:OWNER/REPO:CONFIG")
    repository, config = parsed.groups(default="")
    dataset = _Dataset(
        spec=spec,
        repository=repository,
        config=config,
        revision=None,
        endpoint=endpoint,
        folder=cache / FOLDER / re.sub("[/:]", "--", name),
        needed=("train",),
        line=_document,
    )
    _fill(dataset, limit)
    return {split: [dataset.path(split)] for split in SPLITS if dataset.path(split).exists()}


def choose_files(spec: str, names: Iterable[str], config: str) -> dict[str, list[str]]:
    """The files of each split: those in the configuration's folder, or all without one.

    Parquet is taken if there is any, else .txt.
    """
    inside = {name: rest for name in sorted(names) if (rest := _inside(name, config))}
    chosen = [name for name in inside if name.endswith(".parquet")]
    chosen = chosen or [name for name in inside if name.endswith(".txt")]
    if not config:
        _refuse_several_configs(spec, chosen)
    by_split = {
        split: [name for name in chosen if split_of(inside[name]) == split] for split in SPLITS
    }
    if not by_split["train"]:
        where = f"in its folder {config}" if config else "in the repository"
        raise DataError(f"{spec}: no .parquet or .txt file to train on {where}")
    return by_split


def read_parquet(path: Path, line: Callable[[bytes], bytes]) -> Iterator[bytes]:
    """The rows of a parquet file's text column, each passed through `line`."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as table:
            if TEXT_COLUMN not in table.schema_arrow.names:
                raise DataError(f"{path} has no column named {TEXT_COLUMN}")
            for batch in table.iter_batches(columns=[TEXT_COLUMN]):
                # As bytes: text that is not valid UTF-8 is still text to a model of bytes.
                rows = batch.column(0).cast(pyarrow.binary()).to_pylist()
                yield b"".join(line(row or b"") for row in rows)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"cannot read {path} ({_one_line(error)}): delete it to have it downloaded again"
        ) from None


def _wikitext_line(row: bytes) -> bytes:
    """The hub stores the blank lines of WikiText, which hold one space, as empty rows."""
    return row or b" \n"


def _document(row: bytes) -> bytes:
    return row if row.endswith(b"\n") else row + b"\n"


def _inside(name: str, config: str) -> str:
    """A file's path within the folder of a configuration; empty if it lies elsewhere."""
    if not config:
        return name
    *folders, last = name.split("/")
    if config not in folders:
        return ""
    return "/".join([*folders[folders.index(config) + 1 :], last])


def _refuse_several_configs(spec: str, names: Iterable[str]) -> None:
    """Configurations are mostly variants of the same text: reading them all would repeat it."""
    folders = {name.split("/")[0] for name in names if "/" in name}
    configs = sorted(name for name in folders if name != "train" and split_of(name) == "train")
    if len(configs) > 1:
        raise DataError(f"{spec}: add one of its configurations: {spec}:{', :'.join(configs)}")


def _refuse_unsafe(spec: str, names: Iterable[str]) -> None:
    """File names become paths in the cache: none may lead out of it."""
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name:
            raise DataError(f"{spec}: the repository holds a file with an unsafe name, {name!r}")


def _fill(dataset: _Dataset, limit: int) -> None:
    """Fetch the splits that are not there yet."""
    if dataset.is_complete:
        return
    with _writing(dataset.folder):
        if dataset.is_complete:  # another process was first
            return
        budget = Budget(dataset.spec, limit)
        commit, by_split = _list(dataset, limit)
        # The training split comes last: once it is there, so is everything else.
        for split in reversed(SPLITS):
            if by_split[split] and not dataset.path(split).exists():
                chunks = _chunks(dataset, commit, by_split[split], budget)
                _write_whole(dataset.path(split), chunks)
        shutil.rmtree(_downloads(dataset), ignore_errors=True)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Only one process at a time writes to a folder of the cache."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            yield
    except OSError as error:
        raise DataError(f"cannot write to {folder}: {_one_line(error)}") from None


def _write_whole(path: Path, chunks: Iterator[bytes]) -> None:
    """Write a file that appears complete or not at all."""
    with atomic_write(path) as out:
        for chunk in chunks:
            out.write(chunk)


def _list(dataset: _Dataset, limit: int) -> tuple[str, dict[str, list[str]]]:
    """The commit to read from, and the files of each split."""
    with _asking_hub(dataset):
        from huggingface_hub import HfApi

        # Asked first because it fails at once without a network; a download would keep trying.
        info = HfApi(endpoint=dataset.endpoint).dataset_info(
            dataset.repository,
            revision=dataset.revision,
            files_metadata=True,
            timeout=TIMEOUT_SECONDS,
        )
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    _refuse_unsafe(dataset.spec, sizes)
    by_split = choose_files(dataset.spec, sizes, dataset.config)
    packed = sum(sizes[name] for names in by_split.values() for name in names)
    if packed > limit:
        raise DataError(
            f"{dataset.spec}: {packed / 1e6:.0f} MB to download,"
            " more than data.unpack_limit_mb allows"
        )
    return info.sha or "main", by_split


def _chunks(
    dataset: _Dataset, commit: str, names: Iterable[str], budget: Budget
) -> Iterator[bytes]:
    for name in names:
        path = _download(dataset, commit, name)
        chunks = _plain(path) if name.endswith(".txt") else read_parquet(path, dataset.line)
        for chunk in chunks:
            budget.spend(len(chunk))
            yield chunk


def _plain(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                yield chunk
    except OSError as error:
        raise DataError(f"cannot read {path}: {_one_line(error)}") from None


def _download(dataset: _Dataset, commit: str, name: str) -> Path:
    with _asking_hub(dataset):
        from huggingface_hub import hf_hub_download

        path = hf_hub_download(
            dataset.repository,
            name,
            repo_type="dataset",
            revision=commit,
            endpoint=dataset.endpoint,
            local_dir=_downloads(dataset),
            etag_timeout=TIMEOUT_SECONDS,
        )
    return Path(path)


def _downloads(dataset: _Dataset) -> Path:
    return dataset.folder / "download"


@contextmanager
def _asking_hub(dataset: _Dataset) -> Iterator[None]:
    """Every failure to reach or read the hub becomes a DataError."""
    try:
        import pyarrow  # noqa: F401  a missing reader is noticed before anything is downloaded

        errors = _hub_errors()
    except ImportError:
        raise DataError(
            f"{dataset.spec} needs huggingface_hub and pyarrow: pip install 'blocktrain[hub]',"
            f" or {dataset.by_hand}"
        ) from None
    try:
        yield
    except errors as error:
        raise DataError(
            f"{dataset.spec}: cannot download it ({_one_line(error)}); {dataset.by_hand}"
        ) from None


def _hub_errors() -> tuple[type[BaseException], ...]:
    """What huggingface_hub lets out when a request fails.

    That includes errors of the HTTP library below it, and which one that is depends on its
    version (requests, httpx, httpx2): the base of its own error is the class they share.
    """
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    transport = [base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)]
    return (*transport, EntryNotFoundError, OSError, RuntimeError, ValueError)


def _check(path: Path, split: str, spec: str, release: Release) -> None:
    """Compare a file with the release."""
    facts: tuple[tuple[str, Mapping[str, object], Callable[[Path], object]], ...] = (
        ("sha256", release.sha256, file_sha256),
        ("lines", release.lines, _count_lines),
    )
    for fact, known, measure in facts:
        if split in known and (found := measure(path)) != known[split]:
            raise DataError(
                f"{path} is not the {split} split of {spec}"
                f" ({fact} {found}, not {known[split]}): delete it to have it downloaded again"
            )


def _count_lines(path: Path) -> int:
    return sum(chunk.count(b"\n") for chunk in _plain(path))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
