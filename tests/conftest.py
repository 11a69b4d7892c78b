"""Shared by all tests: one thread (two test processes share the machine), tiny settings."""

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from blocktrain.config import Config, load_config
from blocktrain.data.corpus import Corpus

ROOT = Path(__file__).resolve().parent.parent
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A command that runs in this process configures logging."""
    root, ours = logging.getLogger(), logging.getLogger("blocktrain")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


@pytest.fixture
def config() -> Config:
    """The tiny preset, shortened: two blocks of one layer."""
    return load_config(
        ROOT / "configs" / "tiny.toml",
        ["model.layers=2", "model.blocks=2", "model.width=32", "model.window=32",
         "train.steps=12", "train.batch=4", "train.warmup=2", "train.save_every=5",
         "train.precision=fp32", "train.device=cpu"],
    )  # fmt: skip


@pytest.fixture
def cascade(config: Config) -> Config:
    """The same as a cascade: block 0 of one layer with a tail of one, block 1 of one layer."""
    return config.with_settings(objective__kind="cascade", objective__tail=1)


@pytest.fixture
def corpus() -> Corpus:
    """Text with some structure, made from a seed."""
    draws = np.random.default_rng(0)
    words = [draws.integers(97, 123, size, np.uint8).tobytes() for size in draws.integers(2, 8, 50)]
    text = b" ".join(words[i] for i in draws.integers(0, 50, 8000))
    data = np.frombuffer(text, np.uint8)
    return Corpus(
        "made", {"train": data[:30000], "valid": data[30000:34000], "test": data[34000:]}, {}
    )
