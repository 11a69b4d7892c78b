"""English prose that every Python already carries: pydoc topics, docstrings and long comments.

Source files are parsed, never imported, so collecting has no side effects and gives the same
bytes on every machine with the same Python version.
"""

import ast
import math
import os
import pydoc_data.topics
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

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
