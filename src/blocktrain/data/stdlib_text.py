"""English prose that every Python already carries: pydoc topics and docstrings.

Docstrings are read from source files by parsing, never by importing, so collecting has no side
effects and gives the same bytes on every machine with the same Python version.
"""

import ast
import pydoc_data.topics
import sysconfig
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

REVISION = 1
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "idlelib", "turtledemo", "lib2to3"}
SHORTEST_DOCSTRING = 80
WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def collect() -> bytes:
    """All of it as one text, topics and modules interleaved so that every stretch is mixed."""
    pieces = [*_topics(), *_module_texts()]
    # A fixed stride visits every piece once in an order that mixes the kinds.
    stride = _coprime_stride(len(pieces))
    ordered = [pieces[i * stride % len(pieces)] for i in range(len(pieces))]
    return "\n\n".join(ordered).encode("utf-8", errors="replace")


def _topics() -> Iterator[str]:
    for name in sorted(pydoc_data.topics.topics):
        yield pydoc_data.topics.topics[name].strip()


def _module_texts() -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        if SKIPPED.isdisjoint(path.relative_to(root).parts):
            yield from _docstrings(path)


def _docstrings(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return  # the library keeps deliberately broken files for its own tests
    for node in ast.walk(tree):
        if isinstance(node, WITH_DOCSTRING):
            text = ast.get_docstring(node, clean=False)
            if text and len(text) >= SHORTEST_DOCSTRING:
                yield cleandoc(text)


def _coprime_stride(count: int) -> int:
    stride = max(1, int(count * 0.618))
    while any(stride % p == 0 and count % p == 0 for p in range(2, stride + 1)):
        stride += 1
    return stride
