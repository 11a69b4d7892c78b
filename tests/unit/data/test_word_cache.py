"""A text encoded word by word has the ids that the tokenizers library gives it as a whole."""

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.small_tokenizer import TEXT, small_tokenizer

from blocktrain.data import word_cache
from blocktrain.data.tokenizer import SubwordTokenizer
from blocktrain.data.word_cache import KNOWN_PATTERNS, splits_into_words

Described = dict[str, Any]
SMALL: Described = json.loads(small_tokenizer().files["tokenizer.json"])
PARTS = st.sampled_from([
    " ", "  ", "\n", "\n\n", "\r\n", "\t", "\x1c", "\x85", "\xa0", "\u2028", "\u200b", "\ufffd",
    "'", "'s", "'T", "n't", ".", "(", ")", "_", "<", "<call>", "<|im_end|>", "7", "1234", "\u00b2",
    "the", "License", "e\u0301", "\u0301", "\u0338", "K", "\u212a", "\u037e", "\u4e2d\u6587",
    "\U0001f600",
])  # fmt: skip
TEXTS = st.lists(PARTS | st.text(max_size=4), max_size=30).map("".join)


def split_by(pattern: str) -> Described:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
             "invert": False}  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
             "use_regex": False}  # fmt: skip
    return {"type": "Sequence", "pretokenizers": [split, level]}


def retrained(described: Described) -> Described:
    """The same kind of tokenizer, with merges learned from words as it splits them."""
    made = tokenizers.Tokenizer.from_str(json.dumps(described))
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=420, show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    samples = [TEXT.read_text()[:20_000], " \n\n  \n \t the\n\n1234 12 );\n );\n\n don't it's" * 50]
    made.train_from_iterator(samples, trainer)
    found: Described = json.loads(made.to_str())
    return found | {"added_tokens": described["added_tokens"]}


ADDED = {"id": 400, "content": "<call>", "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": False}  # fmt: skip
KINDS: dict[str, Described] = {
    "GPT-2": {**SMALL, "added_tokens": []},
    "Llama 3": {**SMALL, "pre_tokenizer": split_by(KNOWN_PATTERNS[0]), "added_tokens": []},
    "Qwen": {**SMALL, "pre_tokenizer": split_by(KNOWN_PATTERNS[1]), "added_tokens": [ADDED],
             "normalizer": {"type": "NFC"}},
}  # fmt: skip


def opened(described: Described) -> SubwordTokenizer:
    return SubwordTokenizer({"tokenizer.json": json.dumps(described).encode()})


@pytest.mark.parametrize("kind", KINDS)
def test_words_give_the_ids_that_the_library_gives_the_text(kind: str) -> None:
    described = retrained(KINDS[kind])
    assert splits_into_words(described)
    tokenizer = opened(described)
    library = tokenizers.Tokenizer.from_str(json.dumps(described))
    library.encode_special_tokens = True

    @settings(max_examples=150, deadline=None)
    @given(st.lists(TEXTS, min_size=1, max_size=3))
    def check(texts: list[str]) -> None:
        pieces = [(text.encode(errors="replace"), True) for text in texts]
        found = [ids.tolist() for ids in tokenizer.encode_pieces(pieces)]
        whole = [text.decode() for text, _ in pieces]
        assert found == [library.encode(text, add_special_tokens=False).ids for text in whole]

    check()


def test_the_same_words_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    library = tokenizers.Tokenizer.from_str(json.dumps(SMALL))

    def encode(words: list[str]) -> list[list[int]]:
        asked.extend(words)
        return [library.encode(word).ids for word in words]

    cache = word_cache.WordCache(SMALL, encode, "uint16")
    text = "for the work, and for the work."
    first, second = cache.encode([text, ""])
    assert first.tolist() == library.encode(text).ids and second.size == 0
    assert sorted(asked) == sorted(["for", " the", " work", ",", " and", " for", "."])
    cache.encode([text])
    assert len(asked) == 7
    monkeypatch.setattr(word_cache, "LARGEST_CACHE", 100)
    assert cache.encode([text])[0].tolist() == first.tolist()
    assert len(asked) == 14  # a full cache begins anew


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": split_by(r"\s+|\S+")},
        {"normalizer": {"type": "Lowercase"}},
        {"model": {**SMALL["model"], "dropout": 0.1}},
        {"padding": {"strategy": {"Fixed": 8}}},
        {"truncation": {"max_length": 8}},
        {"normalizer": {"type": "NFC"}, "added_tokens": [{**ADDED, "normalized": True}]},
    ],
)
def test_other_tokenizers_read_texts_as_a_whole(changes: Described) -> None:
    assert not splits_into_words(SMALL | changes)
