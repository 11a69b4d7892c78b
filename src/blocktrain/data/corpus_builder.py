"""Builds a corpus: the documents of a source become one file of tokens per split.

Threads tokenise the text, and tokens are appended in its order. A journal records how much of the
files is complete, so that a killed build continues from there. A corpus gets its final place only
when it is complete. Memory does not grow with the text.
"""

import hashlib
import json
import math
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from blocktrain.data.conversations import is_chat
from blocktrain.data.documents import Piece
from blocktrain.data.sources import SPLITS, Budget, Source
from blocktrain.data.tokenizer import (
    MASKED_DTYPE,
    Lengths,
    Tokenizer,
    Tokens,
    ids_of,
    trained_on,
)
from blocktrain.environment import machine_threads
from blocktrain.errors import DataError, DownloadError
from blocktrain.files import errors_naming, sync_folder, write_bytes

DESCRIPTION = "corpus.json"
JOURNAL = "journal.json"
BATCH_BYTES = 1 << 20  # bytes of text that a thread tokenises at once
COMMIT_BYTES = 1 << 24  # bytes of text between entries of the journal
BLOCK = 1 << 22  # tokens that are processed at once
CARVED_SHARE = 0.05
CARVED_MOST = 2_000_000
SMALLEST_SPLIT = 512
ABANDONED_SECONDS = 7 * 86_400.0

OnProgress = Callable[[int, int], None]  # bytes of the source's files: processed, total


class TextBatch(NamedTuple):
    """Text that is tokenised at once, and the position after it in the source."""

    pieces: list[Piece]
    file: int
    pieces_done: int  # of that file
    size: int  # bytes of text


@dataclass
class Journal:
    """How much of a build is complete."""

    split: str = SPLITS[0]
    file: int = 0
    pieces_done: int = 0
    text_bytes: int = 0  # of all splits so far
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    carved: bool = False

    @classmethod
    def load(cls, folder: Path) -> Self:
        path = folder / JOURNAL
        return cls(**json.loads(path.read_bytes())) if path.exists() else cls()

    def save(self, folder: Path) -> None:
        write_bytes(folder / JOURNAL, json.dumps(asdict(self)).encode())


def build_corpus(
    source: Source,
    spec: str,
    tokenizer: Tokenizer,
    folder: Path,
    limit: int,
    on_progress: OnProgress = lambda done, total: None,
    most: int = 0,
) -> None:
    """Build a corpus in `folder`, or continue a build. `limit`: bytes that the source may unpack
    to. `most`: bytes of training text to use; 0: all. Other processes that need the same corpus
    wait until it is built."""
    scratch = folder.parent.parent / "building" / folder.name
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch.parent.mkdir(exist_ok=True)
        with FileLock(scratch.with_suffix(".lock")):
            if (folder / DESCRIPTION).exists():
                return
            _delete_abandoned(scratch.parent)
            scratch.mkdir(exist_ok=True)
            with _deleted_if_refused(scratch):
                CorpusBuilder(source, spec, tokenizer, scratch, limit, on_progress, most).build()
            shutil.rmtree(folder, ignore_errors=True)  # an incomplete one
            scratch.rename(folder)
    except OSError as error:
        raise DataError(
            f"{spec}: cannot write the corpus to {folder}: {error};"
            " free space there or set BLOCKTRAIN_CACHE to another folder"
        ) from None


@contextmanager
def _deleted_if_refused(scratch: Path) -> Iterator[None]:
    """Delete a build whose source is unusable. After a failed download it stays, so that another
    attempt continues it."""
    try:
        yield
    except DownloadError:
        raise
    except DataError:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _delete_abandoned(building: Path) -> None:
    """Delete builds that have not been continued for a week."""
    for scratch in filter(Path.is_dir, building.iterdir()):
        if time.time() - scratch.stat().st_mtime > ABANDONED_SECONDS:
            shutil.rmtree(scratch, ignore_errors=True)


class CorpusBuilder:
    def __init__(
        self,
        source: Source,
        spec: str,
        tokenizer: Tokenizer,
        folder: Path,
        limit: int,
        on_progress: OnProgress,
        most: int,
    ) -> None:
        self._source, self._spec = source, spec
        self._folder, self._on_progress, self._most = folder, on_progress, most
        self._threads = machine_threads()
        # One per thread, since threads that share a tokenizer wait for each other.
        self._idle = [tokenizer, *(tokenizer.copy() for _ in range(self._threads - 1))]
        self._journal = Journal.load(folder)
        self._budget = Budget(spec, limit - self._journal.text_bytes)
        self._dtype = split_dtype(spec, tokenizer)
        self._lengths = tokenizer.token_lengths()

    def build(self) -> None:
        if not self._journal.carved:
            for split in SPLITS[SPLITS.index(self._journal.split) :]:
                self._write_split(split)
            self._carve_missing()
        for split in SPLITS:
            os.truncate(self._path(split), self._journal.tokens[split] * self._itemsize)
        self._describe()
        (self._folder / JOURNAL).unlink(missing_ok=True)
        sync_folder(self._folder)

    def _path(self, split: str) -> Path:
        return self._folder / f"{split}.bin"

    @property
    def _itemsize(self) -> int:
        return np.dtype(self._dtype).itemsize

    def _write_split(self, split: str) -> None:
        journal = self._journal
        if split != journal.split:
            journal.split, journal.file, journal.pieces_done = split, 0, 0
        self._path(split).touch()
        with errors_naming(self._path(split)), self._path(split).open("r+b") as out:
            out.truncate(journal.tokens[split] * self._itemsize)
            out.seek(0, os.SEEK_END)
            uncommitted = 0
            for batch, tokens in self._tokenised(self._batches(split)):
                out.write(tokens.tobytes())
                journal.tokens[split] += len(tokens)
                journal.file, journal.pieces_done = batch.file, batch.pieces_done
                journal.text_bytes += batch.size
                uncommitted += batch.size
                self._report(batch)
                if uncommitted >= COMMIT_BYTES:
                    self._commit(out.fileno(), out.flush)
                    uncommitted = 0
            self._commit(out.fileno(), out.flush)

    def _commit(self, descriptor: int, flush: Callable[[], None]) -> None:
        flush()
        os.fsync(descriptor)
        self._journal.save(self._folder)

    def _batches(self, split: str) -> Iterator[TextBatch]:
        """The text of a split, from where the journal ends."""
        pieces: list[Piece] = []
        size = number = done = 0
        for number, done, piece in self._pieces(split):
            self._budget.take(len(piece.text))
            pieces.append(piece)
            size += len(piece.text)
            if size >= BATCH_BYTES:
                yield TextBatch(pieces, number, done, size)
                pieces, size = [], 0
        if pieces:
            yield TextBatch(pieces, number, done, size)

    def _pieces(self, split: str) -> Iterator[tuple[int, int, Piece]]:
        """The pieces of a split that are not in the journal, each with the number of its file and
        its own number there."""
        first, skipped = self._journal.file, self._journal.pieces_done
        left: float = self._most if self._most and split == SPLITS[0] else math.inf
        left -= self._journal.text_bytes
        for number, file in enumerate(self._source.files.get(split, [])):
            if number < first:
                continue
            for done, piece in enumerate(file.pieces(), 1):
                if number == first and done <= skipped:
                    continue
                if left <= 0:
                    return
                left -= len(piece.text)
                yield number, done, piece._replace(ends=piece.ends or left <= 0)

    def _tokenised(self, batches: Iterator[TextBatch]) -> Iterator[tuple[TextBatch, Tokens]]:
        """Batches with their tokens, in order. A few are tokenised ahead, to keep threads busy."""
        waiting: deque[tuple[TextBatch, Future[Tokens]]] = deque()

        def encode(batch: TextBatch) -> Tokens:
            tokenizer = self._idle.pop()
            try:
                return encode_pieces(tokenizer, batch.pieces)
            finally:
                self._idle.append(tokenizer)

        with ThreadPoolExecutor(self._threads) as executor:
            for batch in batches:
                waiting.append((batch, executor.submit(encode, batch)))
                if len(waiting) > 2 * self._threads:
                    first, tokens = waiting.popleft()
                    yield first, tokens.result()
            for first, tokens in waiting:
                yield first, tokens.result()

    def _report(self, batch: TextBatch) -> None:
        sizes = {split: [f.size for f in files] for split, files in self._source.files.items()}
        split = self._journal.split
        before = sum(sum(sizes.get(earlier, [])) for earlier in SPLITS[: SPLITS.index(split)])
        before += sum(sizes[split][: batch.file])
        total = sum(map(sum, sizes.values()))
        self._on_progress(before + batch.pieces[-1].position, total)

    def _carve_missing(self) -> None:
        """Cut the splits that a source lacks off the end of its training text."""
        missing, journal = self._source.missing, self._journal
        data = open_tokens(self._path("train"), journal.tokens["train"], self._dtype)
        size = count_bytes(data, self._lengths)
        if size == 0:
            raise DataError(
                f"{self._spec}: the training files are empty; use files that contain text"
            )
        each = min(int(size * CARVED_SHARE), CARVED_MOST)
        if missing and each < SMALLEST_SPLIT:
            raise DataError(
                f"{self._spec}: {size} bytes are too few to cut {' and '.join(missing)} from;"
                f" use at least {round(SMALLEST_SPLIT / CARVED_SHARE)} bytes of text"
            )
        for split in reversed(missing):
            start = tail_of(data, each, self._lengths)
            write_bytes(self._path(split), data[start:].tobytes())
            journal.tokens[split], data = len(data) - start, data[:start]
        journal.tokens["train"], journal.carved = len(data), True
        journal.save(self._folder)

    def _describe(self) -> None:
        counts = self._journal.tokens
        splits = {s: open_tokens(self._path(s), counts[s], self._dtype) for s in SPLITS}
        described = {
            "source": self._spec,
            "bytes": {split: data.nbytes for split, data in splits.items()},
            "sha256": {split: _sha256(data) for split, data in splits.items()},
        }
        write_bytes(self._folder / DESCRIPTION, json.dumps(described).encode())


def open_tokens(path: Path, count: int, dtype: npt.DTypeLike) -> Tokens:
    """The first tokens of a file, memory-mapped and read-only."""
    if count == 0:
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, "r", shape=(count,))


def encode_pieces(tokenizer: Tokenizer, pieces: list[Piece]) -> Tokens:
    """The tokens of documents, each followed by the tokenizer's end token."""
    if pieces[0].counts is not None:
        return np.concatenate([_encode_part(tokenizer, piece) for piece in pieces])
    arrays = tokenizer.encode_pieces([(piece.text, piece.begins) for piece in pieces])
    if tokenizer.end is None:
        return np.concatenate(arrays)
    end = np.array([tokenizer.end], tokenizer.dtype)
    parts = [part for array, piece in zip(arrays, pieces, strict=True)
             for part in ((array, end) if piece.ends else (array,))]  # fmt: skip
    return np.concatenate(parts)


def _encode_part(tokenizer: Tokenizer, piece: Piece) -> Tokens:
    """The tokens of a part of a conversation, in which special tokens are spelled out."""
    tokens = tokenizer.encode(piece.text.decode(errors="replace"), marks=True)
    if piece.ends and tokenizer.end is not None:
        tokens.append(tokenizer.end)
    ids = np.array(tokens, MASKED_DTYPE)
    return ids if piece.counts else ~ids


def split_dtype(spec: str, tokenizer: Tokenizer) -> npt.DTypeLike:
    """The dtype of a source's tokens."""
    return MASKED_DTYPE if is_chat(spec) else tokenizer.dtype


def count_bytes(tokens: Tokens, lengths: Lengths) -> int:
    """The number of bytes of text in these tokens, as far as they are trained on."""
    flat = trained_on(tokens)
    return sum(int(lengths[flat[i : i + BLOCK]].sum()) for i in range(0, len(flat), BLOCK))


def tail_of(data: Tokens, size: int, lengths: Lengths) -> int:
    """The start of the shortest tail that contains this many bytes of text."""
    end = len(data)
    while end:
        block = lengths[ids_of(data[max(0, end - BLOCK) : end])][::-1].cumsum()
        if block[-1] >= size:
            return end - 1 - int(np.searchsorted(block, size))
        size -= int(block[-1])
        end -= len(block)
    return 0


def _sha256(data: Tokens) -> str:
    digest = hashlib.sha256()
    for start in range(0, len(data), BLOCK):
        digest.update(data[start : start + BLOCK].tobytes())
    return digest.hexdigest()
