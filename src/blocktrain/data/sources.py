"""Sources of text: files sorted by split, and the prose in Python's standard library (its
documentation, docstrings and comments)."""

import ast
import glob
import itertools
import logging
import math
import os
import re
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from inspect import cleandoc
from pathlib import Path

from blocktrain.data.documents import (
    TEXT_COLUMN,
    Piece,
    read_chunks,
    read_json_lines,
    read_parquet_rows,
    read_text,
)
from blocktrain.errors import DataError

SPLITS = ("train", "valid", "test")
ALIASES = {"valid": {"valid", "validation", "val", "dev"}, "test": {"test"}}
KIND_NAMES = {"text": "plain text", "jsonl": "*.jsonl", "parquet": "*.parquet"}
FILE_KINDS = tuple(KIND_NAMES)
SNIFFED = 1 << 16  # bytes of a file that are looked at to see what it contains
STDLIB_REVISION = 2
# Folders that not every Python has, and tests, which contain data rather than prose.
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


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextFile:
    """A file of a source."""

    name: str
    size: int  # bytes on disk, for progress
    pieces: Callable[[], Iterator[Piece]]  # reads its documents from the beginning


@dataclass(frozen=True)
class Source:
    fingerprint: str
    files: Mapping[str, Sequence[TextFile]]  # by split

    @property
    def missing(self) -> tuple[str, ...]:
        """The splits that must be cut from the training text."""
        return tuple(split for split in SPLITS[1:] if not self.files.get(split))


@dataclass
class Budget:
    """The number of bytes of a source that may still be unpacked."""

    spec: str
    left: int

    def spend(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self.take(len(chunk))
            yield chunk

    def take(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise DataError(
                f"{self.spec}: unpacks to more than data.unpack_limit_mb allows;"
                " raise it if you trust the text"
            )


def split_of(name: str) -> str:
    """The split of a file, by its name: valid.txt and dev/0.parquet are valid, wiki.test.tokens is
    test, and all other files are train."""
    words = re.split(r"[-_./]", name.lower())
    for split, aliases in ALIASES.items():
        if not aliases.isdisjoint(words):
            return split
    return "train"


def stdlib_source() -> Source:
    def pieces() -> Iterator[Piece]:
        for text in stdlib_prose():
            yield Piece(text, True, True, 0)

    version = ".".join(map(str, sys.version_info[:3]))
    return Source(f"stdlib {STDLIB_REVISION} {version}", {"train": [TextFile("stdlib", 0, pieces)]})


def file_source(spec: str) -> Source:
    """The files that match the pattern of text:GLOB, jsonl:GLOB or parquet:GLOB, or that are below
    such a folder, sorted into splits by their names. The name of the column with the text may
    follow after a #."""
    kind, _, pattern = spec.partition(":")
    column = TEXT_COLUMN
    if kind != "text" and "#" in pattern:
        pattern, _, column = pattern.rpartition("#")
    files = _matching(spec, kind, os.path.expanduser(pattern))
    for path in files if kind == "text" else ():
        if problem := problem_of(path):
            log.warning("%s: %s %s", spec, path, problem)
    by_split: dict[str, list[Path]] = {split: [] for split in SPLITS}
    for path in files:
        by_split[split_of(path.name)].append(path)
    if not by_split["train"]:
        names = ", ".join(map(str, files))
        raise DataError(
            f"{spec}: no file to train on, only {names}; add one without valid or test in its name"
        )
    return path_source(spec, kind, by_split, column)


def _matching(spec: str, kind: str, pattern: str) -> list[Path]:
    """The files that match a pattern or, if it is a folder, the files of this kind below it."""
    if not Path(pattern).is_dir():
        paths = sorted(Path(name) for name in glob.glob(pattern, recursive=True))
        if files := [path for path in paths if path.is_file()]:
            return files
        raise DataError(f"{spec}: no file matches {pattern}; check the path")
    names = glob.glob(os.path.join(glob.escape(pattern), "**", "*"), recursive=True)
    below = sorted(path for path in map(Path, names) if path.is_file())
    if kind != "text":
        files = [path for path in below if f".{kind}" in path.suffixes]
    else:
        files = [path for path in below if not problem_of(path)]
    if files:
        return files
    other = f"; {below[0]} {problem_of(below[0])}" if below and kind == "text" else ""
    raise DataError(f"{spec}: no file below {pattern} is {KIND_NAMES[kind]}{other}")


def problem_of(path: Path) -> str:
    """Why a file is not plain text, and what to use instead; empty if it seems to be."""
    start = b""
    with suppress(DataError):  # raised again when the whole file is read
        start = next((chunk for chunk, _ in read_chunks(path)), b"")[:SNIFFED]
    if start.startswith(b"PAR1"):
        return "is a parquet file; use parquet:GLOB#COLUMN"
    if b"\0" in start:
        return "is not text; leave it out"
    first = start.lstrip().split(b"\n", 1)[0]
    if re.match(rb'\{\s*"', first):
        return "contains JSON lines; use jsonl:GLOB#COLUMN, unless the model should learn JSON"
    return ""


def path_source(
    spec: str, kind: str, by_split: Mapping[str, Sequence[Path]], column: str = TEXT_COLUMN
) -> Source:
    """A source of files of one kind that are already sorted into splits."""
    facts = [
        f"{split} {path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}"
        for split in SPLITS
        for path in by_split.get(split, [])
    ]
    files = {
        split: [text_file(path, kind, column) for path in paths]
        for split, paths in by_split.items()
    }
    return Source("\n".join([spec, *facts]), files)


def text_file(path: Path, kind: str, column: str = TEXT_COLUMN) -> TextFile:
    size = path.stat().st_size
    if kind == "text":
        return TextFile(str(path), size, partial(read_text, path))
    read = read_json_lines if kind == "jsonl" else read_parquet_rows
    return TextFile(str(path), size, partial(read, path, column))


def stdlib_prose() -> list[bytes]:
    """All pieces of prose, each once: documentation and comments mixed, with an empty line between
    them."""
    pieces = list(dict.fromkeys([*manual_topics(), *module_prose()]))
    stride = coprime_stride(len(pieces))
    ordered = (pieces[i * stride % len(pieces)] for i in range(len(pieces)))
    texts = [piece.encode("utf-8", errors="replace") for piece in ordered]
    return [*(text + b"\n\n" for text in texts[:-1]), texts[-1]]


def manual_topics() -> Iterator[str]:
    import pydoc_data.topics

    for name in sorted(pydoc_data.topics.topics):
        yield pydoc_data.topics.topics[name].strip()


def module_prose() -> Iterator[str]:
    for path in _modules(Path(sysconfig.get_paths()["stdlib"])):
        for text in prose_of(path):
            piece = cleandoc(text)
            if len(piece) >= SHORTEST_PIECE:
                yield piece


def _modules(root: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - SKIPPED)
        for name in sorted(files):
            if name.endswith(".py"):
                yield Path(folder, name)


def prose_of(path: Path) -> list[str]:
    try:
        with tokenize.open(path) as file:
            source = file.read()
        return [*docstrings(source), *comments(source)]
    except (SyntaxError, UnicodeDecodeError):
        return []  # not every file in that folder is Python 3


def docstrings(source: str) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in that source
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, WITH_DOCSTRING):
            yield ast.get_docstring(node, clean=False) or ""


def comments(source: str) -> Iterator[str]:
    """Consecutive lines with nothing but a comment, joined."""
    run: list[str] = []
    for line in (*source.splitlines(), ""):
        if line.lstrip().startswith("#"):
            run.append(line.strip().lstrip("#"))
            continue
        if len(run) >= SHORTEST_COMMENT_LINES:
            yield "\n".join(run)
        run = []


def coprime_stride(count: int) -> int:
    """A stride near the golden section of `count` that visits every index."""
    strides = itertools.count(max(1, int(count * 0.618)))
    return next(stride for stride in strides if math.gcd(stride, count) == 1)
