"""Sources of text: the interpreter's own documentation and local files. See also hub.py.

A source yields the bytes of each split it has, says which splits are missing, and has a fingerprint
that changes with its content. Foreign errors become DataError here.
"""

import glob
import gzip
import io
import lzma
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from blocktrain.data import stdlib_text
from blocktrain.errors import DataError

CHUNK = 1 << 20
SPLITS = ("train", "valid", "test")
ALIASES = {"valid": {"valid", "validation", "val", "dev"}, "test": {"test"}}


@dataclass(frozen=True)
class Source:
    fingerprint: str
    chunks: Callable[[str], Iterator[bytes]]
    missing: tuple[str, ...]


@dataclass
class Budget:
    """How many bytes of a source may still be unpacked."""

    spec: str
    left: int

    def spend(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise DataError(f"{self.spec}: unpacks to more than data.unpack_limit_mb allows")


def split_of(name: str) -> str:
    """valid.txt, wiki.test.tokens and dev/0.parquet are those splits; all else is for training."""
    words = re.split(r"[-_./]", name.lower())
    for split, aliases in ALIASES.items():
        if not aliases.isdisjoint(words):
            return split
    return "train"


def stdlib_source() -> Source:
    def chunks(split: str) -> Iterator[bytes]:
        if split == "train":
            yield stdlib_text.collect()

    version = ".".join(map(str, sys.version_info[:3]))
    return Source(f"stdlib {stdlib_text.REVISION} {version}", chunks, ("valid", "test"))


def file_source(spec: str, pattern: str, limit: int) -> Source:
    """The files that match a pattern; their names say which split they belong to."""
    paths = sorted(Path(name) for name in glob.glob(os.path.expanduser(pattern), recursive=True))
    files = [path for path in paths if path.is_file()]
    if not files:
        raise DataError(f"{spec}: no file matches {pattern}")
    by_split: dict[str, list[Path]] = {split: [] for split in SPLITS}
    for path in files:
        by_split[split_of(path.name)].append(path)
    if not by_split["train"]:
        names = ", ".join(map(str, files))
        raise DataError(f"{spec}: no file to train on, only {names}")
    return split_source(spec, by_split, limit)


def split_source(spec: str, by_split: dict[str, list[Path]], limit: int) -> Source:
    """Files that are known by their split."""
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
