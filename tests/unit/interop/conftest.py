"""Models with tokens that were trained here for a few steps."""

from pathlib import Path

import numpy as np
import pytest
from tests.support.small_tokenizer import TEXT, small_tokenizer
from tests.support.training import CPU, quiet

from blocktrain.config import Config
from blocktrain.data.corpus import Corpus
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.cascade import PublishedRun
from blocktrain.training.trainer import BlockTrainer


def token_corpus() -> Corpus:
    """A short text as tokens."""
    ids = np.array(small_tokenizer().encode(TEXT.read_text()), np.uint16)
    return Corpus("made", {"train": ids[:-1000], "valid": ids[-1000:], "test": ids[-1000:]}, {})


def token_config(config: Config, **settings: object) -> Config:
    tokens = {
        name: getattr(small_tokenizer().vocabulary, name)
        for name in ("sha256", "size", "bos", "eos", "mask")
    }
    changes = {
        "model__layer": "llama",
        "model__taps": 0,
        "model__kv_heads": 2,
        "objective__kind": "cascade",
        "objective__tail": 1,
        "train__eval_every": 6,
        "train__eval_windows": 8,
        **{f"vocab__{name}": value for name, value in tokens.items()},
        **settings,
    }
    return config.with_settings(**changes)


def trained_run(folder: Path, config: Config) -> RunDir:
    run = RunDir.create(folder, config)
    run.store_tokenizer(small_tokenizer().files)
    corpus = token_corpus()
    for block in range(config.block_count):
        store = run.block(block)
        BlockTrainer(config, block, corpus, CPU, store, PublishedRun(run)).train(quiet)
    return run


@pytest.fixture
def cascade_run(tmp_path: Path, config: Config) -> RunDir:
    return trained_run(tmp_path / "cascade", token_config(config))
