"""A new kind of objective that combines known flags needs a row in the table and nothing else."""

import dataclasses

import numpy as np
import pytest
from tests.support.published import Shelf
from tests.support.training import CPU, quiet

from blocktrain.config import Config, ObjectiveConfig
from blocktrain.config.settings import KINDS, Kind
from blocktrain.data.corpus import Corpus, evaluation_windows
from blocktrain.model.stack import assemble
from blocktrain.training.estimation import estimate
from blocktrain.training.evaluate import evaluate
from blocktrain.training.trainer import BlockTrainer


def test_a_cascade_without_tails_is_one_more_row(
    config: Config, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(KINDS, "bare", Kind("bare", reads_predecessors=True))
    kind = next(item for item in dataclasses.fields(ObjectiveConfig) if item.name == "kind")
    monkeypatch.setattr(kind, "metadata", {**kind.metadata, "choices": tuple(KINDS)})
    bare = config.with_settings(objective__kind="bare", train__steps=3)
    assert (bare.depths, bare.tail_layers(0), bare.state_width) == ((1, 1), 0, 32)
    assert estimate(bare).parameters > 0
    shelf, blocks = Shelf(), []
    for block in range(bare.block_count):
        trainer = BlockTrainer(bare, block, corpus, CPU, None, shelf)
        trainer.train(quiet)
        shelf.put(block, trainer.step, trainer.module)
        blocks.append(trainer.module)
    assert shelf.taken == [(0, 3)]
    windows = evaluation_windows(corpus.split("valid"), config.model.window, 4)
    assert evaluate(assemble(bare, blocks), windows).default.ce < np.log(256) + 0.1
