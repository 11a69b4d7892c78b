"""A corpus: one memory-mapped array of tokens per split, and the windows that are cut from it.

The arrays are built once from a source and a tokenizer, and cached. Batch number i is a pure
function of (seed, i). An epoch visits every window once, in the order of a keyed permutation, which
is computed and not stored. Each epoch has its own order and offset.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from blocktrain.config import BYTE_VOCABULARY, DataConfig, Vocabulary
from blocktrain.config.settings import SOURCES
from blocktrain.data import hub
from blocktrain.data.conversations import chat_source, is_chat
from blocktrain.data.corpus_builder import (
    DESCRIPTION,
    OnProgress,
    build_corpus,
    count_bytes,
    split_dtype,
)
from blocktrain.data.sources import FILE_KINDS, SPLITS, Source, file_source, stdlib_source
from blocktrain.data.tokenizer import (
    ByteTokenizer,
    Lengths,
    Tokenizer,
    Tokens,
    ids_of,
    trained_on,
)
from blocktrain.environment import CACHE, XDG_CACHE_HOME
from blocktrain.errors import DataError
from blocktrain.numerics.sampling import mixed_seed

Bytes = Tokens
Ids = npt.NDArray[np.signedinteger]
Indices = npt.NDArray[np.uint64]

LAYOUT = 2  # version of the cached files' format; part of their folder's name
FEISTEL_ROUNDS = 4
MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Corpus:
    """The splits of one source, and their digests, which machines can compare."""

    source: str
    splits: dict[str, Tokens]
    digests: dict[str, str]
    lengths: Lengths | None = None  # bytes of text of each token; None: every token is a byte

    def split(self, name: str, window: int = 1, windows: int = 1) -> Tokens:
        """A split; DataError if it is shorter than this many windows."""
        if name not in self.splits:
            raise DataError(
                f"this run has no {name} split of {self.source} on this machine; name its text with"
                " --data"
            )
        data = self.splits[name]
        if len(data) < window * windows:
            unit = "bytes" if self.lengths is None else "tokens"
            raise DataError(
                f"{self.source}: the {name} split has {len(data)} {unit},"
                f" fewer than {windows} x model.window = {window}; use more text, or a smaller"
                " model.window"
            )
        return data

    def bytes_of(self, tokens: Tokens) -> int:
        """The number of bytes of text in these tokens, as far as they are trained on."""
        if self.lengths is None:
            return trained_on(tokens).size
        return count_bytes(tokens, self.lengths)


def cache_dir() -> Path:
    if chosen := CACHE.get():
        return Path(chosen)
    return Path(XDG_CACHE_HOME.get() or Path.home() / ".cache") / "blocktrain"


def load_corpus(
    settings: DataConfig,
    tokenizer: Tokenizer | None = None,
    on_progress: OnProgress = lambda done, total: None,
) -> Corpus:
    """Open a source's corpus; build its cached arrays first if they are missing. Without a
    tokenizer, the tokens are bytes."""
    limit, most = settings.unpack_limit_mb * MEGABYTE, settings.most_mb * MEGABYTE
    tokenizer = tokenizer or ByteTokenizer()
    source = open_source(settings.source, limit, cache_dir(), most, tokenizer)
    named = f"{LAYOUT}\n{source.fingerprint}"
    if most:
        named += f"\nfirst {most}"
    if digest := tokenizer.vocabulary.sha256:
        named += f"\n{digest}"
    folder = cache_dir() / "corpora" / hashlib.sha256(named.encode()).hexdigest()[:24]
    if not (folder / DESCRIPTION).exists():
        build_corpus(source, settings.source, tokenizer, folder, limit, on_progress, most)
    return _open(folder, settings.source, tokenizer)


def open_source(
    spec: str, limit: int, cache: Path, most: int = 0, tokenizer: Tokenizer | None = None
) -> Source:
    """The source that `spec` names. Downloads a dataset of the hub; else reads no text yet.
    `tokenizer`: its chat template writes conversations."""
    kind, _, rest = spec.partition(":")
    if spec == "stdlib":
        return stdlib_source()
    if is_chat(spec) and rest:
        return chat_source(spec, tokenizer or ByteTokenizer())
    if kind in FILE_KINDS and rest:
        return file_source(spec)
    if spec in hub.WIKITEXT or (kind == "hf" and rest):
        return hub.hub_source(spec, cache, limit, most)
    raise DataError(f"unknown data source {spec!r}: use {SOURCES}")


def _open(folder: Path, spec: str, tokenizer: Tokenizer) -> Corpus:
    lengths = tokenizer.token_lengths() if tokenizer.vocabulary.sha256 else None
    try:
        described = json.loads((folder / DESCRIPTION).read_text())
        sizes = described["bytes"]
        splits = {
            split: open_split(folder / f"{split}.bin", sizes[split], split_dtype(spec, tokenizer))
            for split in SPLITS
        }
        return Corpus(spec, splits, described["sha256"], lengths)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{spec}: the cached corpus is damaged ({error}); delete {folder} to rebuild it"
        ) from None


def open_split(path: Path, size: int, dtype: npt.DTypeLike = np.uint8) -> Tokens:
    """A file of tokens, memory-mapped and read-only; ValueError if it is not `size` bytes long."""
    if path.stat().st_size != size:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes instead of {size}")
    if size == 0:
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, "r")


@dataclass(frozen=True)
class TrainingWindows:
    data: Tokens
    window: int
    batch: int
    seed: int

    @property
    def per_epoch(self) -> int:
        # One window less than would fit, so that epochs can start at different offsets.
        return max(1, len(self.data) // self.window - 1)

    def __getitem__(self, index: int) -> Tokens:
        """Batch number `index`, shaped batch x window."""
        ranks = np.arange(index * self.batch, (index + 1) * self.batch)
        epochs = ranks // self.per_epoch
        out = np.empty((self.batch, self.window), self.data.dtype)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            starts = self._starts(int(epoch), ranks[rows] % self.per_epoch)
            out[rows] = self.data[starts[:, None] + np.arange(self.window)]
        return out

    def _starts(self, epoch: int, ranks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        key = mixed_seed(self.seed, epoch)
        spare = len(self.data) - self.per_epoch * self.window
        offset = key % (min(spare, self.window) + 1)
        order = permute(ranks.astype(np.uint64), self.per_epoch, key)
        return order.astype(np.int64) * self.window + offset


def permute(ranks: Indices, count: int, key: int) -> Indices:
    """A keyed permutation of 0..count-1, evaluated at `ranks` without building it.

    A Feistel network permutes the numbers below the next power of four. Results of `count` or more
    pass through it again until they are smaller (cycle walking), so it stays a permutation.
    """
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    state = np.random.SeedSequence(key).generate_state(FEISTEL_ROUNDS, np.uint64)
    keys = state.astype(np.uint64)
    result = ranks.copy()
    outside = np.ones(len(ranks), bool)
    while outside.any():
        result[outside] = _feistel(result[outside], half, keys)
        outside = result >= count
    return result


def _feistel(values: Indices, half: np.uint64, keys: Indices) -> Indices:
    low_bits = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & low_bits
    for key in keys:
        left, right = right, left ^ (_scramble(right ^ key) & low_bits)
    return (left << half) | right


def _scramble(x: Indices) -> Indices:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def evaluation_windows(data: Tokens, window: int, most: int | None = None) -> Tokens:
    """Non-overlapping windows from the start, shaped count x window. An incomplete last window is
    dropped."""
    count = len(data) // window
    if most is not None:
        count = min(count, most)
    return np.asarray(data[: count * window]).reshape(count, window)


def shifted(targets: Tokens, vocabulary: Vocabulary = BYTE_VOCABULARY) -> Ids:
    """The context that predicts each token: BOS, then the tokens before it."""
    targets = ids_of(targets)
    # Signed, since torch lacks most unsigned types.
    context = np.empty(targets.shape, np.min_scalar_type(-vocabulary.ids))
    context[:, 0] = vocabulary.bos
    context[:, 1:] = targets[:, :-1]
    return context
