"""Encodes text word by word, and each word only once. Knows neither files nor runs.

A tokenizer that splits text by a regular expression encodes the parts independently, and the same
few words make up most of a text. So a text is cut where the tokenizer always splits it, and words
that were encoded before are looked up, which is several times as fast.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.integer]
EncodeWords = Callable[[Sequence[str]], Sequence[Sequence[int]]]

ENTRY_BYTES = 120  # memory of a word beside its characters
LARGEST_CACHE = 1 << 26

# The regular expressions that a tokenizer may split by: those of Llama 3 and of Qwen. GPT-2's is
# part of the pre-tokenizer ByteLevel.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KNOWN_PATTERNS = (_PATTERN % "{1,3}", _PATTERN % "")

# All of these expressions split a text at three places: before a space that something other than
# white space follows, between a letter or digit and punctuation, and after a line break between
# other characters. A word ends at such a place.
_PUNCTUATION = r"[!-/:-@\[-`{-~]"
_PLACES = rf"(?= \S)|(?<=[A-Za-z0-9])(?={_PUNCTUATION})|(?<=\S\n)(?=\S)"
WORDS = re.compile(
    rf" ?[A-Za-z0-9]++(?={_PUNCTUATION}| \S)"  # the commonest kinds of words first, for speed
    rf"| ?{_PUNCTUATION}++[A-Za-z0-9]*+(?={_PUNCTUATION}| \S)"
    rf"|.+?(?:{_PLACES}|\Z)",
    re.DOTALL,
)


def splits_into_words(described: Mapping[str, Any]) -> bool:
    """Whether a tokenizer.json is known to encode the words of a text independently."""
    normalizer = described.get("normalizer")
    return (
        _splits_at_places(described.get("pre_tokenizer") or {})
        and (normalizer is None or normalizer == {"type": "NFC"})
        and not described["model"].get("dropout")
        and not (described.get("truncation") or described.get("padding"))
        and not any(token["normalized"] for token in _found_in_text(described) if normalizer)
    )


def _splits_at_places(pre_tokenizer: Mapping[str, Any]) -> bool:
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    byte_level = {"type": "ByteLevel", "add_prefix_space": False}
    if not all(steps[-1].get(key) == value for key, value in byte_level.items()):
        return False
    if len(steps) == 1:
        return bool(steps[0].get("use_regex", True))
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    return (
        len(steps) == 2
        and all(steps[0].get(key) == value for key, value in split.items())
        and steps[0].get("pattern", {}).get("Regex") in KNOWN_PATTERNS
    )


def _found_in_text(described: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Added tokens that a tokenizer finds even in plain text, where they may span words."""
    return [token for token in described.get("added_tokens", []) if not token["special"]]


class WordCache:
    """The tokens of words that were encoded before, in bounded memory. For one thread."""

    def __init__(
        self, described: Mapping[str, Any], encode: EncodeWords, dtype: npt.DTypeLike
    ) -> None:
        """`encode`: the tokenizer itself."""
        self._encode, self._dtype = encode, np.dtype(dtype)
        self._names = [token["content"] for token in _found_in_text(described)]
        self._clear()

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """The tokens of each text."""
        words = [self._words(text) for text in texts]
        if self._bytes > LARGEST_CACHE:
            self._clear()
        count = sum(map(len, words))
        index = np.fromiter(map(self._index.__getitem__, chain.from_iterable(words)), int, count)
        self._learn(list(islice(self._index, len(self._starts), None)))
        lengths = self._lengths[index]
        ends = np.concatenate([[0], np.cumsum(lengths)])
        places = np.arange(ends[-1]) + np.repeat(self._starts[index] - ends[:-1], lengths)
        cuts = ends[np.cumsum([len(each) for each in words])]
        return np.split(self._ids[places], cuts[:-1])

    def _words(self, text: str) -> list[str]:
        return [text] if any(name in text for name in self._names) else WORDS.findall(text)

    def _clear(self) -> None:
        self._index = _Numbers()
        self._ids = np.zeros(0, self._dtype)
        self._starts = self._lengths = np.zeros(0, np.int64)
        self._bytes = 0

    def _learn(self, words: Sequence[str]) -> None:
        if not words:
            return
        encoded = self._encode(words)
        lengths = np.array([len(ids) for ids in encoded])
        starts = len(self._ids) + np.cumsum(lengths) - lengths
        flat = np.fromiter(chain.from_iterable(encoded), self._dtype, int(lengths.sum()))
        self._ids = np.concatenate([self._ids, flat])
        self._starts = np.concatenate([self._starts, starts])
        self._lengths = np.concatenate([self._lengths, lengths])
        self._bytes += sum(map(len, words)) + ENTRY_BYTES * len(words)


class _Numbers(dict[str, int]):
    """Numbers words in the order in which they first come."""

    def __missing__(self, word: str) -> int:
        self[word] = number = len(self)
        return number
