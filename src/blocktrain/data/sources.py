"""Where text comes from: the prose that every Python carries, local files, or a hub."""

import ast
import glob
import gzip
import io
import lzma
import math
import os
import pydoc_data.topics
import re
import sys
import sysconfig
import tokenize
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path

from blocktrain.errors import DataError

REVISION = 2
# Installed by the user, or by some systems only on request; tests hold data rather than prose.
SKIPPED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "distutils",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "tkinter",
    "turtledemo",
}
SHORTEST_PIECE = 20
SHORTEST_COMMENT_LINES = 2
WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def collect() -> bytes:
    """All of it as one text, every piece once, in an order that mixes the kinds everywhere."""
    pieces = list(dict.fromkeys([*_topics(), *_module_texts()]))
    stride = _coprime_stride(len(pieces))
    ordered = [pieces[i * stride % len(pieces)] for i in range(len(pieces))]
    return "\n\n".join(ordered).encode("utf-8", errors="replace")


def _topics() -> Iterator[str]:
    for name in sorted(pydoc_data.topics.topics):
        yield pydoc_data.topics.topics[name].strip()


def _module_texts() -> Iterator[str]:
    for path in _modules(Path(sysconfig.get_paths()["stdlib"])):
        for text in _texts(path):
            piece = cleandoc(text)
            if len(piece) >= SHORTEST_PIECE:
                yield piece


def _modules(root: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - SKIPPED)
        for name in sorted(files):
            if name.endswith(".py"):
                yield Path(folder, name)


def _texts(path: Path) -> list[str]:
    try:
        with tokenize.open(path) as file:
            source = file.read()
        return [*_docstrings(source), *_comments(source)]
    except (SyntaxError, UnicodeDecodeError):
        return []  # a stray file: not everything in that folder need be Python 3


def _docstrings(source: str) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of stray backslashes in that source
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, WITH_DOCSTRING):
            yield ast.get_docstring(node, clean=False) or ""


def _comments(source: str) -> Iterator[str]:
    """Runs of lines that are nothing but comment."""
    run: list[str] = []
    for line in (*source.splitlines(), ""):
        if line.lstrip().startswith("#"):
            run.append(line.strip().lstrip("#"))
            continue
        if len(run) >= SHORTEST_COMMENT_LINES:
            yield "\n".join(run)
        run = []


def _coprime_stride(count: int) -> int:
    """A step near the golden section of `count` that visits every one of `count` places."""
    stride = max(1, int(count * 0.618))
    while math.gcd(stride, count) > 1:
        stride += 1
    return stride


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
            yield collect()

    version = ".".join(map(str, sys.version_info[:3]))
    return Source(f"stdlib {REVISION} {version}", chunks, ("valid", "test"))


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
