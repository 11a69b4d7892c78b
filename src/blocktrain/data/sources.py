"""Where text comes from: the interpreter itself, local files, or a hub.

A source yields the bytes of each split it has, says which splits are missing, and carries a
fingerprint that changes when its content does. Foreign errors become DataError here.
"""

import glob
import gzip
import io
import lzma
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from blocktrain.data import hub, stdlib_text
from blocktrain.data.splits import SPLITS, Budget, split_of
from blocktrain.errors import DataError

CHUNK = 1 << 20


@dataclass(frozen=True)
class Source:
    fingerprint: str
    chunks: Callable[[str], Iterator[bytes]]
    missing: tuple[str, ...]


def open_source(spec: str, limit: int, cache: Path) -> Source:
    """Resolve a source's name; nothing is read yet but file names and sizes."""
    kind, _, rest = spec.partition(":")
    if spec == "stdlib":
        return _stdlib()
    if kind == "text" and rest:
        return _files(spec, rest, limit)
    if spec in hub.WIKITEXT:
        return _split_files(spec, hub.fetch_wikitext(spec, cache, limit), limit)
    if kind == "hf" and rest:
        return _split_files(spec, hub.fetch_dataset(rest, cache, limit), limit)
    raise DataError(
        f"unknown data source {spec!r}: use stdlib, text:GLOB, wikitext-2, wikitext-103 or hf:NAME"
    )


def _stdlib() -> Source:
    def chunks(split: str) -> Iterator[bytes]:
        if split == "train":
            yield stdlib_text.collect()

    version = ".".join(map(str, sys.version_info[:3]))
    return Source(f"stdlib {stdlib_text.REVISION} {version}", chunks, ("valid", "test"))


def _files(spec: str, pattern: str, limit: int) -> Source:
    paths = sorted(Path(name) for name in glob.glob(os.path.expanduser(pattern), recursive=True))
    files = [path for path in paths if path.is_file()]
    if not files:
        raise DataError(f"{spec}: no file matches {pattern}")
    by_split: dict[str, list[Path]] = {split: [] for split in SPLITS}
    for path in files:
        by_split[split_of(path.name)].append(path)
    if not by_split["train"]:
        raise DataError(f"{spec}: only {', '.join(map(str, files))}; no file to train on")
    return _split_files(spec, by_split, limit)


def _split_files(spec: str, by_split: dict[str, list[Path]], limit: int) -> Source:
    budget = Budget(spec, limit)

    def chunks(split: str) -> Iterator[bytes]:
        for path in by_split.get(split, []):
            for chunk in _unpacked(path):
                budget.spend(len(chunk))
                yield chunk

    facts = [
        f"{split} {path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}"
        for split in SPLITS
        for path in by_split.get(split, [])
    ]
    missing = tuple(split for split in SPLITS[1:] if not by_split.get(split))
    return Source("\n".join([spec, *facts]), chunks, missing)


def _unpacked(path: Path) -> Iterator[bytes]:
    try:
        with _opened(path) as file:
            while chunk := file.read(CHUNK):
                yield chunk
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}") from None


def _opened(path: Path) -> io.BufferedIOBase:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix == ".xz":
        return lzma.open(path, "rb")
    return path.open("rb")
