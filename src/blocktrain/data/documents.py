"""Reads documents from files: plain text, JSON lines and parquet, compressed or not.

A document comes in pieces, so memory is bounded. It is cut where no token is likely to cross.
The cuts depend on the document only, so the same files give the same tokens on every machine.
"""

import gzip
import importlib
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from blocktrain.errors import DataError

PIECE = 1 << 14  # bytes; every piece but a document's last has one to two times as many
CHUNK = 1 << 20
LONGEST_ROW = 1 << 28
ROWS_AT_ONCE = 1024  # rows of a parquet file that are read at once
TEXT_COLUMN = "text"
END_TYPE = np.dtype("<u8")  # type of the positions in a file of documents' ends
BY_HAND = "replace the file or leave it out"
LONE_SPACE = re.compile(rb"(?<=\S) (?=\S)")
LONE_BREAK = re.compile(rb"(?<=\S)\n(?=\S)")


class Piece(NamedTuple):
    """A part of a document, or a whole one."""

    text: bytes
    begins: bool  # it is the document's first piece
    ends: bool  # it is the document's last piece
    position: int  # bytes of the file on disk that were read so far
    counts: bool | None = None  # in a conversation, whether it is trained on


Chunks = Iterable[tuple[bytes, int]]  # text, and the position after it


def pieces_of(document: Chunks) -> Iterator[Piece]:
    """Cut a document into pieces; an empty one has none."""
    rest, begins, position = b"", True, 0
    for chunk, position in document:
        rest, start = rest + chunk, 0
        while len(rest) - start >= 2 * PIECE:
            end = _cut(rest, start + PIECE, start + 2 * PIECE)
            yield Piece(rest[start:end], begins, False, position)
            start, begins = end, False
        rest = rest[start:]
    if rest:
        yield Piece(rest, begins, True, position)


def _cut(text: bytes, start: int, end: int) -> int:
    """Where to cut between `start` and `end`: best before a single space between other characters,
    since tokenizers split words there; else before a single line break; else between two
    characters."""
    for place in (LONE_SPACE, LONE_BREAK):
        if match := place.search(text, start, end):
            return match.start()
    while text[start] & 0xC0 == 0x80 and start < end - 1:  # inside a character
        start += 1
    return start


def read_text(path: Path) -> Iterator[Piece]:
    """Read a file of plain text as one document."""
    return pieces_of(read_chunks(path))


def read_marked_text(path: Path, ends_path: Path) -> Iterator[Piece]:
    """Read a file of plain text with many documents; `ends_path` lists where they end."""
    ends, start = np.fromfile(ends_path, END_TYPE), 0
    with path.open("rb") as file:
        for end in map(int, ends):
            yield from pieces_of([(file.read(end - start), end)])
            start = end


def last_end(ends_path: Path) -> int:
    ends = np.fromfile(ends_path, END_TYPE)
    return int(ends[-1]) if len(ends) else 0


def read_chunks(path: Path) -> Chunks:
    with _opened(path) as (file, position):
        while chunk := file.read(CHUNK):
            yield chunk, position()


def read_json_lines(path: Path, column: str = TEXT_COLUMN) -> Iterator[Piece]:
    """Read a file whose lines are JSON objects with a document each."""
    for number, line, position in read_lines(path):
        yield from _row(_text_of(line, column, f"{path}, line {number}"), position)


def read_lines(path: Path) -> Iterator[tuple[int, bytes, int]]:
    """The lines of a file that are not blank: their number, text, and the position after them."""
    with _opened(path) as (file, position):
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_ROW), b""), 1):
            if len(line) == LONGEST_ROW:
                raise DataError(
                    f"{path}, line {number}: longer than {LONGEST_ROW >> 20} MB; {BY_HAND}"
                )
            if line.strip():
                yield number, line, position()


def _text_of(line: bytes, column: str, where: str) -> bytes:
    try:
        row = json.loads(line)
    except ValueError:
        raise DataError(f"{where}: not valid JSON; {BY_HAND}") from None
    text = row.get(column) if isinstance(row, dict) else None
    if text is None and not (isinstance(row, dict) and column in row):
        columns = ", ".join(row) if isinstance(row, dict) else "no columns"
        raise DataError(
            f"{where}: there is no {column!r}, only {columns}; name the column with the text, as in"
            " jsonl:GLOB#COLUMN"
        )
    if not isinstance(text, str | None):
        raise DataError(f"{where}: {column!r} is not text; name another column")
    return (text or "").encode(errors="replace")


def read_parquet(
    path: Path, column: str = TEXT_COLUMN, remedy: str = BY_HAND
) -> Iterator[tuple[bytes, int]]:
    """The rows of a parquet file's text column, and the position in the file after each."""
    pyarrow, parquet = _import("pyarrow", path), _import("pyarrow.parquet", path)
    size, done = path.stat().st_size, 0
    try:
        with parquet.ParquetFile(path) as table:
            names = table.schema_arrow.names
            if column not in names:
                raise DataError(
                    f"{path} has no column named {column}; use one of {', '.join(names)}"
                )
            for batch in table.iter_batches(ROWS_AT_ONCE, columns=[column]):
                done += batch.num_rows
                position = size * done // max(1, table.metadata.num_rows)
                # As bytes, since the text need not be valid UTF-8.
                for row in batch.column(0).cast(pyarrow.binary()).to_pylist():
                    yield row or b"", position
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"cannot read {path} ({one_line(error)}); {remedy}") from None


def read_parquet_rows(path: Path, column: str = TEXT_COLUMN) -> Iterator[Piece]:
    """Read a parquet file whose rows have a document each."""
    for text, position in read_parquet(path, column):
        yield from _row(text, position)


def _row(text: bytes, position: int) -> Iterator[Piece]:
    return pieces_of([(as_line(text), position)] if text else [])


def as_line(text: bytes) -> bytes:
    """End a row with a line break, so that a model of bytes sees its end."""
    return text if text.endswith(b"\n") else text + b"\n"


@contextmanager
def _opened(path: Path) -> Iterator[tuple[io.BufferedIOBase, Callable[[], int]]]:
    """A decompressed file, and a function that returns the position in the compressed one."""
    try:
        with path.open("rb") as packed, _unpacked(packed, path) as file:
            yield file, packed.tell
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {one_line(error)}; {BY_HAND}") from None


def _unpacked(packed: io.BufferedReader, path: Path) -> io.BufferedIOBase:
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=packed)
    if path.suffix == ".xz":
        return lzma.LZMAFile(packed)
    if path.suffix == ".zst":
        pyarrow = _import("pyarrow", path)
        stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(packed, "r"), "zstd")
        return io.BufferedReader(stream, CHUNK)
    return packed


def _import(module: str, path: Path) -> Any:
    """Import pyarrow or a module of it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise DataError(
            f"{path}: reading it needs pyarrow: pip install 'blocktrain[hub]'"
        ) from None


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
