"""Converts text to tokens and back: bytes, or a tokenizer.json of the tokenizers library.

A run stores its tokenizer, and other machines fetch it by its hash. Code that does not load the
library reads a Vocabulary instead.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from blocktrain.config import BYTE_VOCABULARY, Vocabulary
from blocktrain.data.word_cache import WordCache, splits_into_words
from blocktrain.errors import DataError

# Ids. In text of which only a part is trained on, the other ids are stored as their complement
# (~id), which is negative.
Tokens = npt.NDArray[np.integer]
Lengths = npt.NDArray[np.int32]
MASKED_DTYPE = np.dtype(np.int32)  # of such text

TOKENIZER_FILE = "tokenizer.json"
SIDE_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
LARGEST_UINT16_VOCABULARY = 1 << 16
VOCABULARY_FILE, MERGES_FILE = "vocab.json", "merges.txt"
PADDED_TO = 64  # the vocabulary's size is a multiple of this, which suits tensor cores
SPACE_MARK = "\u2581"  # what SentencePiece writes for a space
BOS_NAMES = ("<|endoftext|>", "<s>", "<|begin_of_text|>", "<bos>")
EOS_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")


def ids_of(tokens: Tokens) -> Tokens:
    """The ids of tokens, whether they are trained on or not."""
    return np.maximum(tokens, ~tokens) if tokens.dtype == MASKED_DTYPE else tokens


def trained_on(tokens: Tokens) -> Tokens:
    """The tokens that are trained on, in one row; masked ones are left out."""
    return tokens[tokens >= 0] if tokens.dtype == MASKED_DTYPE else tokens.reshape(-1)


class Tokenizer(ABC):
    """How a run's text becomes tokens."""

    @property
    @abstractmethod
    def vocabulary(self) -> Vocabulary:
        """The settings that a run stores, all but `bytes_per_token`, which is measured later."""

    @property
    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """The files that another machine needs for this tokenizer, by name; bytes need none."""

    @abstractmethod
    def encode(self, text: str, *, marks: bool = False) -> list[int]:
        """The tokens of a text. With `marks`, the spelling of a special token, such as <|im_end|>,
        becomes that token."""

    @abstractmethod
    def encode_pieces(self, pieces: Sequence[tuple[bytes, bool]]) -> list[Tokens]:
        """Encode pieces of plain text, each with whether it begins a text or continues one."""

    @abstractmethod
    def copy(self) -> "Tokenizer":
        """A copy for another thread, since threads that share a tokenizer wait for each other."""

    @property
    @abstractmethod
    def dtype(self) -> npt.DTypeLike:
        """The dtype of tokenised text on disk."""

    @property
    def end(self) -> int | None:
        """The token that ends a document, if there is one."""
        return next(iter(self.vocabulary.eos), None)

    @abstractmethod
    def token_lengths(self) -> Lengths:
        """The number of bytes of text of each token; 0 for special tokens and padding."""

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token; empty for special tokens and padding."""

    def special_name(self, token: int) -> str:
        """The name of a token without text, such as a special token."""
        return f"<{token}>"

    def decode(self, tokens: Iterable[int]) -> bytes:
        return b"".join(map(self.token_bytes, tokens))


class ByteTokenizer(Tokenizer):
    """Every byte is a token."""

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary()

    @property
    def files(self) -> dict[str, bytes]:
        return {}

    def encode(self, text: str, *, marks: bool = False) -> list[int]:
        return list(text.encode(errors="surrogateescape"))

    def encode_pieces(self, pieces: Sequence[tuple[bytes, bool]]) -> list[Tokens]:
        return [np.frombuffer(text, np.uint8) for text, _ in pieces]

    def copy(self) -> "ByteTokenizer":
        return self

    @property
    def dtype(self) -> npt.DTypeLike:
        return np.uint8

    def token_lengths(self) -> Lengths:
        return np.ones(BYTE_VOCABULARY.size, np.int32)

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < BYTE_VOCABULARY.size else b""


class SubwordTokenizer(Tokenizer):
    """A tokenizer.json, and the files that other programs expect beside it."""

    def __init__(self, files: dict[str, bytes], size: int = 0) -> None:
        """`size`: rows of the model's embedding, if a model exists already."""
        self._files = files
        text = files[TOKENIZER_FILE]
        try:
            self._plain = tokenizers.Tokenizer.from_buffer(text)
        except Exception as error:  # the library raises nothing more specific
            raise DataError(
                f"{TOKENIZER_FILE} cannot be read ({error}); it must be a file of the tokenizers"
                " library"
            ) from None
        self._plain.encode_special_tokens = True
        self._described = json.loads(text)
        count = self._plain.get_vocab_size(with_added_tokens=True)
        if size and size < count:
            raise DataError(
                f"the tokenizer has {count} tokens but the model only {size}; use the model's own"
                " tokenizer"
            )
        self.count, self._size = count, size or padded_size(count)

    @classmethod
    def open(cls, folder: Path, size: int = 0) -> "SubwordTokenizer":
        """Open a tokenizer.json, a folder with one, or a folder with GPT-2's vocab.json and
        merges.txt."""
        if (folder / MERGES_FILE).is_file() and not (folder / TOKENIZER_FILE).is_file():
            return cls({TOKENIZER_FILE: _from_merges(folder)}, size)
        path = folder / TOKENIZER_FILE if folder.is_dir() else folder
        names = [path.name, *(n for n in SIDE_FILES if (path.parent / n).is_file())]
        try:
            files = {name: (path.parent / name).read_bytes() for name in names}
        except OSError as error:
            raise DataError(
                f"cannot read the tokenizer {path}: {error.strerror}; check the path"
            ) from None
        files[TOKENIZER_FILE] = files.pop(path.name)
        return cls(files, size)

    @property
    def files(self) -> dict[str, bytes]:
        return self._files

    @cached_property
    def vocabulary(self) -> Vocabulary:
        eos = self._special("eos_token", EOS_NAMES)
        spare = self.count if self.count < self._size else None
        start = next((i for i in (self.bos, eos, spare) if i is not None), 0)
        return Vocabulary(
            sha256=self.digest,
            size=self._size,
            bos=start,
            eos=() if eos is None else (eos,),
            mask=start if spare is None else spare,
        )

    @cached_property
    def bos(self) -> int | None:
        """The id of the token before a text, if there is such a token."""
        return self._special("bos_token", BOS_NAMES)

    @cached_property
    def _marked(self) -> tokenizers.Tokenizer:
        """Finds special tokens in a text by their spelling."""
        return tokenizers.Tokenizer.from_buffer(self._files[TOKENIZER_FILE])

    @property
    def adds_bos(self) -> bool:
        """Whether the tokenizer itself begins a text with `bos`."""
        return self._marked.encode("", add_special_tokens=True).ids[:1] == [self.bos]

    @cached_property
    def digest(self) -> str:
        """Hash of all files. It includes the chat template, which is part of a run too."""
        listed = [(n, hashlib.sha256(d).hexdigest()) for n, d in sorted(self._files.items())]
        return hashlib.sha256(json.dumps(listed).encode()).hexdigest()

    def encode(self, text: str, *, marks: bool = False) -> list[int]:
        chosen = self._marked if marks else self._plain
        ids: list[int] = chosen.encode(text, add_special_tokens=False).ids
        return ids

    def encode_pieces(self, pieces: Sequence[tuple[bytes, bool]]) -> list[Tokens]:
        texts = [text.decode(errors="replace") for text, _ in pieces]
        if self._adds_space:  # it would do so at the beginning of every piece
            texts = [t if p[1] else t.removeprefix(" ") for t, p in zip(texts, pieces, strict=True)]
        if self._words:
            return self._words.encode(texts)
        return [np.array(ids, self.dtype) for ids in self._encode_batch(texts)]

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._plain.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    @cached_property
    def _words(self) -> WordCache | None:
        if not splits_into_words(self._described):
            return None
        return WordCache(self._described, self._encode_batch, self.dtype)

    @cached_property
    def _adds_space(self) -> bool:
        """Whether a space goes before the first word of a text, as SentencePiece adds it."""
        return self.decode(self.encode("a")) == b" a"

    def copy(self) -> "SubwordTokenizer":
        return SubwordTokenizer(self._files, self._size)

    @property
    def dtype(self) -> npt.DTypeLike:
        return np.uint16 if self._size <= LARGEST_UINT16_VOCABULARY else np.uint32

    def token_lengths(self) -> Lengths:
        return np.array([len(self.token_bytes(token)) for token in range(self._size)], np.int32)

    def token_bytes(self, token: int) -> bytes:
        return self._token_bytes[token] if token < len(self._token_bytes) else b""

    def special_name(self, token: int) -> str:
        return self._plain.id_to_token(token) or super().special_name(token)

    def token_id(self, text: str) -> int | None:
        """The id of a token by its name, special tokens included."""
        token: int | None = self._plain.token_to_id(text)
        return token

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        spell = self._speller()
        texts = [b""] * self.count
        added = {t["id"]: t for t in self._described.get("added_tokens", [])}
        for name, token in self._plain.get_vocab(with_added_tokens=True).items():
            if token in added:
                texts[token] = b"" if added[token]["special"] else name.encode()
            else:
                texts[token] = spell(name)
        return texts

    def _speller(self) -> Callable[[str], bytes]:
        decoder = json.dumps(self._described.get("decoder"), ensure_ascii=False)
        if '"ByteLevel"' in decoder:
            return _byte_level
        if SPACE_MARK in decoder or '"Metaspace"' in decoder:
            return _sentence_piece
        raise DataError(
            f"{TOKENIZER_FILE}: the decoder is neither ByteLevel nor SentencePiece's, so tokens"
            " cannot be turned into bytes; use another tokenizer"
        )

    @cached_property
    def _described_config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads(self._files.get("tokenizer_config.json", b"{}"))
        return config

    def _special(self, key: str, usual: Sequence[str]) -> int | None:
        named = self._described_config.get(key, "")
        if isinstance(named, dict):
            named = named.get("content", "")
        if named is None:  # null: the tokenizer has none
            return None
        names = [named] if named else usual
        return next((i for name in names if (i := self.token_id(name)) is not None), None)


def padded_size(count: int) -> int:
    """The size of a new model's vocabulary: with one id to spare, for a mask."""
    return -(-(count + 1) // PADDED_TO) * PADDED_TO


def _from_merges(folder: Path) -> bytes:
    """A tokenizer.json like GPT-2's from its two older files."""
    try:
        model = tokenizers.models.BPE.from_file(
            str(folder / "vocab.json"), str(folder / MERGES_FILE)
        )
    except Exception as error:  # the library raises nothing more specific
        raise DataError(
            f"cannot read vocab.json and {MERGES_FILE} in {folder} ({error}); copy or download them"
            " again"
        ) from None
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [name for name in EOS_NAMES if tokenizer.token_to_id(name) is not None]
    )
    return tokenizer.to_str().encode()


def stored_tokenizer(files: dict[str, bytes], vocabulary: Vocabulary) -> Tokenizer:
    """A run's own tokenizer, from the files it stores."""
    if not vocabulary.sha256:
        return ByteTokenizer()
    tokenizer = SubwordTokenizer(files, vocabulary.size)
    if tokenizer.digest != vocabulary.sha256:
        raise DataError(
            "the run's tokenizer was altered: its hash differs from vocab.sha256; restore its files"
        )
    return tokenizer


def _byte_level(name: str) -> bytes:
    """Decode GPT-2's spelling of a token: one printable character per byte."""
    return bytes(BYTE_OF_CHARACTER[character] for character in name)


def _sentence_piece(name: str) -> bytes:
    if len(name) == len("<0x00>") and name.startswith("<0x"):
        return bytes([int(name[3:5], 16)])
    return name.replace(SPACE_MARK, " ").encode()


def _characters_of_bytes() -> dict[str, int]:
    """GPT-2's table: printable bytes are their own characters; the others get 256 and up."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


BYTE_OF_CHARACTER = _characters_of_bytes()
