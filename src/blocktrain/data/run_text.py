"""A run's text: its tokenizer, and its corpus in that tokenizer's tokens.

A new run stores the tokenizer that its settings name: a file, one of the Hugging Face hub, or one
trained on the run's text. It records the vocabulary in the settings. From then on it uses the
stored tokenizer, whatever happens to the original.
"""

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tokenizers
from filelock import FileLock

from blocktrain.config import Config, DataConfig, Vocabulary
from blocktrain.data.corpus import Corpus, cache_dir, load_corpus, open_split
from blocktrain.data.corpus_builder import OnProgress, split_dtype
from blocktrain.data.hub import TIMEOUT_SECONDS, hub_errors
from blocktrain.data.sources import FILE_KINDS
from blocktrain.data.tokenizer import (
    EOS_NAMES,
    MERGES_FILE,
    SIDE_FILES,
    TOKENIZER_FILE,
    VOCABULARY_FILE,
    ByteTokenizer,
    SubwordTokenizer,
    Tokenizer,
    Tokens,
    ids_of,
    padded_size,
    stored_tokenizer,
    trained_on,
)
from blocktrain.errors import ConfigError, DataError, RunError
from blocktrain.files import file_sha256
from blocktrain.storage.run_dir import RunDir

FOLDER = "tokenizers"  # in the cache
LOCAL_KINDS = (*FILE_KINDS, "chat")  # of sources that are files of this machine
HUB_NAME = re.compile(r"hf:((?:[\w-][\w.-]*/)?[\w-][\w.-]*)", re.ASCII)
SAMPLE_BYTES = 1 << 26  # bytes of text to train a tokenizer on
SLICE_BYTES = 1 << 16
SMALLEST = 257  # tokens: all bytes, and the end of a document
USUAL_BYTES_PER_TOKEN = 4.0


@dataclass(frozen=True)
class RunText:
    config: Config  # including the tokenizer's vocabulary
    tokenizer: Tokenizer
    corpus: Corpus


def new_text(config: Config, on_progress: OnProgress = lambda done, total: None) -> RunText:
    """The text of a new run. With train.warm_start, it uses that run's tokenizer."""
    if origin := _origin_with_tokenizer(config):
        tokenizer, vocabulary = run_tokenizer(origin), origin.config.vocab
    else:
        tokenizer = resolve_tokenizer(config.data, on_progress)
        vocabulary = tokenizer.vocabulary
    corpus = load_corpus(config.data, tokenizer, on_progress)
    if config.vocab.sha256 not in ("", vocabulary.sha256):
        raise ConfigError(
            f"data.tokenizer = {config.data.tokenizer!r} is not the tokenizer that [vocab]"
            " describes; leave [vocab] out of the settings of a new run"
        )
    if vocabulary.sha256:
        train = corpus.splits["train"]
        average = corpus.bytes_of(train) / max(1, len(trained_on(train)))
        vocabulary = replace(vocabulary, bytes_per_token=average)
    return RunText(replace(config, vocab=vocabulary), tokenizer, corpus)


def expected_vocabulary(config: Config) -> Vocabulary:
    """The vocabulary of a new run as far as it is known before its text is read. The number of
    bytes per token is that of usual text."""
    if config.vocab.sha256:
        return config.vocab
    if origin := _origin_with_tokenizer(config):
        return origin.config.vocab
    if size := _size_to_train(config.data):
        vocabulary = Vocabulary("not trained yet", padded_size(size), mask=size)
    else:
        vocabulary = resolve_tokenizer(config.data).vocabulary
    average = USUAL_BYTES_PER_TOKEN if vocabulary.sha256 else 1.0
    return replace(vocabulary, bytes_per_token=average)


def _origin_with_tokenizer(config: Config) -> RunDir | None:
    """The run of train.warm_start, if it has a tokenizer."""
    origin = RunDir.open(Path(config.train.warm_start)) if config.train.warm_start else None
    if not origin or not origin.config.vocab.sha256:
        return None
    if config.data.tokenizer not in ("bytes", origin.config.data.tokenizer):
        raise ConfigError(
            f"data.tokenizer = {config.data.tokenizer!r} differs from"
            f" {origin.config.data.tokenizer!r} of train.warm_start; leave it out"
        )
    return origin


def stored_text(
    run: RunDir,
    data: DataConfig | None = None,
    on_progress: OnProgress = lambda done, total: None,
) -> RunText:
    """The text of a stored run or, with `data`, another text in the run's tokens."""
    tokenizer = run_tokenizer(run)
    corpus = load_corpus(data or run.config.data, tokenizer, on_progress)
    return RunText(run.config, tokenizer, corpus)


def scored_text(
    run: RunDir, data: str | None = None, on_progress: OnProgress = lambda done, total: None
) -> RunText:
    """The text to score a run on: `data`, written as data.source, or the run's own. A fetched run's
    settings are untrusted and must not choose local files."""
    settings = run.config.data
    if not data and run.origin:
        raise ConfigError(f"{run.path} is an imported model, without a text: name one with --data")
    if not data and run.text_folder.is_dir():
        return _fetched_text(run)
    if not data and run.fetched and settings.source.partition(":")[0] in LOCAL_KINDS:
        raise ConfigError(
            f"the run was trained on {settings.source} on another machine;"
            " name this machine's copy with --data text:GLOB"
        )
    return stored_text(run, replace(settings, source=data) if data else settings, on_progress)


def _fetched_text(run: RunDir) -> RunText:
    """The splits that a fetched run has brought along."""
    tokenizer = run_tokenizer(run)
    files = {path.stem: path for path in run.text_folder.glob("*.bin")}
    dtype = split_dtype(run.config.data.source, tokenizer)
    splits = {split: open_split(path, path.stat().st_size, dtype) for split, path in files.items()}
    digests = {split: file_sha256(path) for split, path in files.items()}
    lengths = tokenizer.token_lengths() if tokenizer.vocabulary.sha256 else None
    corpus = Corpus(run.config.data.source, splits, digests, lengths)
    return RunText(run.config, tokenizer, corpus)


def run_tokenizer(run: RunDir) -> Tokenizer:
    return stored_tokenizer(run.tokenizer_files(), run.config.vocab)


def refuse_other_tokenizer(run: RunDir) -> None:
    """Raise RunError if data.tokenizer is a file that differs from the run's stored tokenizer."""
    path = Path(run.config.data.tokenizer).expanduser()
    if not run.config.vocab.sha256 or not path.exists():
        return
    if SubwordTokenizer.open(path).digest != run.config.vocab.sha256:
        raise RunError(
            f"the tokenizer {path} is not the one that {run.path} was started with; use another"
            " --out to train with it, or move it away to use the run's own copy"
        )


def resolve_tokenizer(
    settings: DataConfig, on_progress: OnProgress = lambda done, total: None
) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names."""
    if settings.tokenizer == "bytes":
        return ByteTokenizer()
    if size := _size_to_train(settings):
        return train_tokenizer(settings, size, on_progress)
    if settings.tokenizer.startswith("hf:"):
        return SubwordTokenizer.open(fetch_tokenizer(settings.tokenizer, cache_dir()))
    return SubwordTokenizer.open(Path(settings.tokenizer).expanduser())


def _size_to_train(settings: DataConfig) -> int:
    """The number of tokens of bpe:N; 0 if data.tokenizer names a tokenizer that exists."""
    kind, _, size = settings.tokenizer.partition(":")
    if kind != "bpe":
        return 0
    if not size.isdecimal() or int(size) < SMALLEST:
        raise ConfigError(
            f"data.tokenizer = {settings.tokenizer!r} must be bpe:N, where N is at least {SMALLEST}"
        )
    return int(size)


def train_tokenizer(
    settings: DataConfig, size: int, on_progress: OnProgress = lambda done, total: None
) -> SubwordTokenizer:
    """Train a byte-level BPE of `size` tokens on evenly spaced slices of the training text, at most
    64 MiB in all."""
    text = load_corpus(settings, None, on_progress).splits["train"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[EOS_NAMES[0]],
        show_progress=False,  # it would print to standard output
    )
    tokenizer.train_from_iterator(slices(text), trainer)
    return SubwordTokenizer({TOKENIZER_FILE: tokenizer.to_str(pretty=True).encode()})


def slices(text: Tokens) -> Iterator[str]:
    """Evenly spaced slices of text, cut at spaces."""
    count = min(SAMPLE_BYTES, len(text)) // SLICE_BYTES or 1
    for index in range(count):
        start = index * len(text) // count
        piece = ids_of(text[start : start + SLICE_BYTES]).astype(np.uint8).tobytes()
        spaces = [match.start() for match in re.finditer(rb"(?<=\S)[ \n](?=\S)", piece)] or [0]
        yield piece[spaces[0] if index else 0 : spaces[-1] or len(piece)].decode(errors="replace")


def fetch_tokenizer(spec: str, cache: Path, endpoint: str | None = None) -> Path:
    """The folder of a tokenizer of the hub, downloaded if it is not in the cache."""
    parsed = HUB_NAME.fullmatch(spec)
    if not parsed or ".." in spec or "--" in spec:
        raise DataError(f"{spec!r} is not of the form hf:OWNER/NAME")
    folder = cache / FOLDER / parsed[1].replace("/", "--")
    if _is_complete(folder):
        return folder
    by_hand = (
        f"put {TOKENIZER_FILE} and, if there is one, {SIDE_FILES[0]} (or {VOCABULARY_FILE} and"
        f" {MERGES_FILE}) of https://huggingface.co/{parsed[1]} into {folder.absolute()}"
    )
    download = folder.with_name(f"{folder.name}.download")
    download.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        if _is_complete(folder):  # another process has downloaded it
            return folder
        with hub_errors(spec, by_hand, ["huggingface_hub"]):
            _download(parsed[1], download, endpoint)
        if not _is_complete(download):
            raise DataError(f"{spec} has no {TOKENIZER_FILE}; use another tokenizer, or {by_hand}")
        shutil.rmtree(folder, ignore_errors=True)
        download.rename(folder)  # so all files appear together
    return folder


def _download(name: str, folder: Path, endpoint: str | None) -> None:
    from huggingface_hub import HfApi, snapshot_download

    # Comes first, since it fails at once without a network, while a download retries.
    HfApi(endpoint=endpoint).model_info(name, timeout=TIMEOUT_SECONDS)
    snapshot_download(
        name,
        endpoint=endpoint,
        local_dir=folder,
        allow_patterns=[*SIDE_FILES, VOCABULARY_FILE, MERGES_FILE, TOKENIZER_FILE],
        etag_timeout=TIMEOUT_SECONDS,
    )


def _is_complete(folder: Path) -> bool:
    pair = (VOCABULARY_FILE, MERGES_FILE)
    return (folder / TOKENIZER_FILE).is_file() or all((folder / n).is_file() for n in pair)
