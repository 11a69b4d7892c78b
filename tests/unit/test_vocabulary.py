"""The vocabulary is a value of the run: nothing that trains or scores assumes bytes."""

from dataclasses import replace

import numpy as np
import pytest
from tests.support.published import Shelf
from tests.support.training import CPU, quiet

from blocktrain.config import BYTE_VOCABULARY, Config
from blocktrain.data.corpus import Corpus, evaluation_windows, shifted
from blocktrain.model.stack import assemble
from blocktrain.training.evaluate import evaluate
from blocktrain.training.trainer import BlockTrainer

TOKENS = replace(BYTE_VOCABULARY, size=700, bos=700, mask=701, sha256="700", bytes_per_token=2.5)


def test_bytes_are_read_with_two_special_ids():
    assert (BYTE_VOCABULARY.size, BYTE_VOCABULARY.ids) == (256, 258)
    assert shifted(np.array([[255, 0]], np.uint8)).tolist() == [[256, 255]]


def test_a_context_of_many_tokens_does_not_overflow():
    many = replace(BYTE_VOCABULARY, size=151_936, bos=151_936, mask=151_937)
    assert many.ids == 151_938
    context = shifted(np.array([[151_935, 0]], np.uint32), many)
    assert context.tolist() == [[151_936, 151_935]]


@pytest.mark.parametrize("kind", ["denoise", "cascade", "end_to_end"])
def test_a_model_of_another_vocabulary_trains_and_is_scored(
    kind: str, config: Config, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Config, "vocabulary", TOKENS)
    config = config.with_settings(
        objective__kind=kind, objective__tail=1, objective__hidden_share=0.5, train__steps=3
    )
    draws = np.random.default_rng(0)
    text = {name: draws.integers(0, 700, 2000).astype(np.uint16) for name in ("train", "valid")}
    corpus = Corpus("made", text, {})
    blocks = []
    for block in range(config.block_count):
        trainer = BlockTrainer(config, block, corpus, CPU, None, Shelf())
        trainer.train(quiet)
        blocks.append(trainer.module)
    stack = assemble(config, blocks)
    valid = evaluation_windows(text["valid"], config.model.window, 4)
    assert evaluate(stack, valid, draws=1).default.ce == pytest.approx(np.log(700), abs=2.0)


def test_bytes_of_text_are_counted_by_the_bytes_of_a_token(
    config: Config, monkeypatch: pytest.MonkeyPatch
):
    assert config.bytes_per_step == 4 * 32
    monkeypatch.setattr(Config, "vocabulary", TOKENS)
    assert config.bytes_per_step == 4 * 32 * 2.5
