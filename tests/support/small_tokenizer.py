"""A small tokenizer like GPT-2's."""

from functools import cache
from pathlib import Path

import tokenizers

from blocktrain.data.tokenizer import SubwordTokenizer

TEXT = Path(__file__).resolve().parents[2] / "LICENSE"


@cache
def small_tokenizer() -> SubwordTokenizer:
    """A BPE of bytes like GPT-2's, trained on a short text."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=350,
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT.read_text()], trainer)
    return SubwordTokenizer({"tokenizer.json": tokenizer.to_str().encode()})
