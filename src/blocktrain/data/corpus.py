"""A corpus: one memory-mapped byte array per split, built once from a source and cached."""

import hashlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from blocktrain.config import DataConfig
from blocktrain.data import hub
from blocktrain.data.sources import SPLITS, Source, file_source, split_source, stdlib_source
from blocktrain.environment import CACHE, XDG_CACHE_HOME
from blocktrain.errors import DataError
from blocktrain.files import file_sha256
from blocktrain.vocabulary import BYTE_VOCABULARY

Bytes = npt.NDArray[np.uint8]

LAYOUT = 2  # of the cached files; part of their folder's name
CARVED_SHARE = 0.05
CARVED_MOST = 2_000_000
SMALLEST_SPLIT = 512


@dataclass(frozen=True)
class Corpus:
    """The splits of one source, and a name that two machines can compare."""

    source: str
    splits: dict[str, Bytes]
    digests: dict[str, str]

    def split(self, name: str, window: int = 1, windows: int = 1) -> Bytes:
        """A split that holds at least this many windows."""
        data = self.splits[name]
        if len(data) < window * windows:
            raise DataError(
                f"{self.source}: the {name} split has {len(data)} bytes,"
                f" fewer than {windows} x a window of {window}; use more text or a smaller window"
            )
        return data


def cache_dir() -> Path:
    if chosen := CACHE.get():
        return Path(chosen)
    return Path(XDG_CACHE_HOME.get() or Path.home() / ".cache") / "blocktrain"


def load_corpus(settings: DataConfig) -> Corpus:
    """Open the corpus of a source, building its cached arrays first if they are not there."""
    source = open_source(settings.source, settings.unpack_limit_mb * 1_000_000, cache_dir())
    name = hashlib.sha256(f"{LAYOUT}\n{source.fingerprint}".encode()).hexdigest()[:24]
    folder = cache_dir() / "corpora" / name
    if not (folder / "corpus.json").exists():
        _build(source, settings.source, folder)
    return _open(folder, settings.source)


def open_source(spec: str, limit: int, cache: Path) -> Source:
    """A source by its name; nothing is read yet but file names and sizes, or fetched from a hub."""
    kind, _, rest = spec.partition(":")
    if spec == "stdlib":
        return stdlib_source()
    if kind == "text" and rest:
        return file_source(spec, rest, limit)
    if spec in hub.WIKITEXT:
        return split_source(spec, hub.fetch_wikitext(spec, cache, limit), limit)
    if kind == "hf" and rest:
        return split_source(spec, hub.fetch_dataset(rest, cache, limit), limit)
    raise DataError(
        f"unknown data source {spec!r}: use stdlib, text:GLOB, wikitext-2, wikitext-103 or hf:NAME"
    )


def _open(folder: Path, spec: str) -> Corpus:
    try:
        described = json.loads((folder / "corpus.json").read_text())
        splits = {
            split: _map(folder / f"{split}.bin", described["bytes"][split]) for split in SPLITS
        }
        return Corpus(spec, splits, described["sha256"])
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{spec}: the cached corpus is damaged ({error});"
            f" delete {folder} to have it built again"
        ) from None


def _map(path: Path, size: int) -> Bytes:
    if path.stat().st_size != size:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes instead of {size}")
    if size == 0:
        return np.zeros(0, BYTE_VOCABULARY.dtype)
    return np.memmap(path, BYTE_VOCABULARY.dtype, "r")


def _build(source: Source, spec: str, folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as scratch:
            _lay_down(source, spec, Path(scratch) / folder.name)
            _publish(Path(scratch) / folder.name, folder)
    except OSError as error:
        raise DataError(f"{spec}: cannot write the corpus to {folder}: {error}") from None


def _lay_down(source: Source, spec: str, folder: Path) -> None:
    folder.mkdir()
    files = {split: folder / f"{split}.bin" for split in SPLITS}
    for split, path in files.items():
        _write(path, source.chunks(split))
    _carve_missing(folder, source.missing, spec)
    described = {
        "source": spec,
        "bytes": {split: path.stat().st_size for split, path in files.items()},
        "sha256": {split: file_sha256(path) for split, path in files.items()},
    }
    (folder / "corpus.json").write_text(json.dumps(described))


def _publish(scratch: Path, folder: Path) -> None:
    try:
        scratch.rename(folder)
    except OSError:
        # Another process may have built the same corpus first: its files are the same.
        if not (folder / "corpus.json").exists():
            raise


def _write(path: Path, chunks: Iterator[bytes]) -> None:
    with path.open("wb") as out:
        for chunk in chunks:
            out.write(chunk)


def _carve_missing(folder: Path, missing: tuple[str, ...], spec: str) -> None:
    """Cut the splits a source does not have off the end of its training text."""
    train = folder / "train.bin"
    size = train.stat().st_size
    if size == 0:
        raise DataError(f"{spec}: no training text (the files are empty)")
    each = min(int(size * CARVED_SHARE), CARVED_MOST)
    if missing and each < SMALLEST_SPLIT:
        raise DataError(
            f"{spec}: {size} bytes are too few to cut {' and '.join(missing)} from;"
            f" at least {round(SMALLEST_SPLIT / CARVED_SHARE)} are needed"
        )
    with train.open("r+b") as source:
        for split in reversed(missing):
            size -= each
            source.seek(size)
            (folder / f"{split}.bin").write_bytes(source.read(each))
        source.truncate(size)
