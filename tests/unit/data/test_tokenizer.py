"""Tokenizers: text becomes the library's ids and the same bytes again, whole or in pieces."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.small_tokenizer import TEXT, small_tokenizer

from blocktrain.data.documents import PIECE, pieces_of
from blocktrain.data.tokenizer import (
    ByteTokenizer,
    SubwordTokenizer,
    Tokenizer,
    padded_size,
    stored_tokenizer,
)
from blocktrain.errors import DataError

MIXED = "Été \u65e5\u672c\n\n  1234 isn't\t\U0001f388 x\u0000y \u00a0"


def sentence_piece() -> SubwordTokenizer:
    """A tokenizer like Llama 2's: a space before the first word, bytes for unknown characters."""
    words = ["\u2581the", "\u2581cat", "\u2581", "s", "a", "t", "\n"]
    specials = ["<unk>", "<s>", "</s>"]
    spelled = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {name: number for number, name in enumerate([*specials, *spelled, *words])}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocabulary,
            [],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [
            tokenizers.normalizers.Prepend("\u2581"),
            tokenizers.normalizers.Replace(" ", "\u2581"),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("\u2581", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(specials)
    return SubwordTokenizer({"tokenizer.json": tokenizer.to_str().encode()})


def in_pieces(tokenizer: Tokenizer, text: bytes) -> list[int]:
    pieces = list(pieces_of([(text, len(text))]))
    arrays = tokenizer.encode_pieces([(piece.text, piece.begins) for piece in pieces])
    return np.concatenate(arrays).tolist()


@settings(deadline=None, max_examples=50)
@given(st.text())
def test_tokens_stand_for_the_bytes_of_the_text(text: str):
    for tokenizer in (ByteTokenizer(), small_tokenizer()):
        tokens, data = tokenizer.encode(text), text.encode()
        assert tokenizer.decode(tokens) == data
        assert int(tokenizer.token_lengths()[tokens].sum()) == len(data)


def test_a_tokenizer_like_llama_2s_puts_a_space_before_a_text():
    tokenizer = sentence_piece()
    assert (
        tokenizer.decode(tokenizer.encode("the cat sat\n\u65e5")) == " the cat sat\n\u65e5".encode()
    )


@pytest.mark.parametrize("tokenizer", [small_tokenizer(), sentence_piece()], ids=["gpt2", "llama2"])
def test_pieces_of_a_document_have_its_tokens(tokenizer: SubwordTokenizer):
    text = (TEXT.read_text() + MIXED) * 8
    assert len(text) > 4 * PIECE
    whole = tokenizer.encode(text)
    assert in_pieces(tokenizer, text.encode()) == whole


def test_the_ids_are_those_of_the_library():
    files = small_tokenizer().files
    library = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
    text = TEXT.read_text() + MIXED
    assert SubwordTokenizer(files).encode(text) == library.encode(text).ids


def test_gpt2s_older_files_give_the_same_tokenizer(tmp_path: Path):
    model = json.loads(small_tokenizer().files["tokenizer.json"])["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(merge) for merge in model["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges))
    tokenizer = SubwordTokenizer.open(tmp_path)
    text = TEXT.read_text() + MIXED
    assert tokenizer.encode(text) == small_tokenizer().encode(text)
    assert tokenizer.vocabulary.eos == small_tokenizer().vocabulary.eos == (0,)


def test_a_special_token_in_plain_text_is_text():
    tokenizer = small_tokenizer()
    end = "<|endoftext|>"
    assert tokenizer.encode(f"a{end}", marks=True)[-1] == tokenizer.end == 0
    plain = tokenizer.encode(f"a{end}")
    assert 0 not in plain
    assert tokenizer.decode(plain) == f"a{end}".encode()
    assert (tokenizer.token_bytes(0), tokenizer.special_name(0)) == (b"", end)
    assert in_pieces(tokenizer, end.encode()) == tokenizer.encode(end)


def test_the_vocabulary_has_room_for_a_mask():
    tokenizer = small_tokenizer()
    vocabulary = tokenizer.vocabulary
    assert vocabulary.size == padded_size(tokenizer.count) == 384
    assert vocabulary.mask == tokenizer.count == 350
    assert tokenizer.token_bytes(vocabulary.mask) == tokenizer.token_bytes(383) == b""
    full = SubwordTokenizer(tokenizer.files, tokenizer.count).vocabulary
    assert (full.size, full.mask) == (350, full.bos)  # the model's embedding has no spare row
    with pytest.raises(DataError, match="350 tokens but the model only 349"):
        SubwordTokenizer(tokenizer.files, 349)


def test_special_tokens_are_those_of_tokenizer_config():
    files = small_tokenizer().files
    described = {"eos_token": {"content": "<|im_end|>"}, "bos_token": None}
    tokenizer = SubwordTokenizer({**files, "tokenizer_config.json": json.dumps(described).encode()})
    assert (tokenizer.bos, tokenizer.vocabulary.eos) == (None, (1,))
    assert tokenizer.vocabulary.bos == 1


def test_a_run_with_other_files_is_refused():
    tokenizer = small_tokenizer()
    assert stored_tokenizer(tokenizer.files, tokenizer.vocabulary).files == tokenizer.files
    altered = {**tokenizer.files, "chat_template.jinja": b"{{ messages }}"}
    with pytest.raises(DataError, match="was altered"):
        stored_tokenizer(altered, tokenizer.vocabulary)


def test_files_that_are_no_tokenizer_are_refused(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json cannot be read"):
        SubwordTokenizer.open(tmp_path)
    with pytest.raises(DataError, match="cannot read the tokenizer"):
        SubwordTokenizer.open(tmp_path / "nothing")
    described = json.loads(small_tokenizer().files["tokenizer.json"])
    words = SubwordTokenizer(
        {"tokenizer.json": json.dumps({**described, "decoder": None}).encode()}
    )
    with pytest.raises(DataError, match="cannot be turned into bytes"):
        words.token_lengths()
