"""Pinned numbers: a refactor must reproduce them.

Bytes and seeds are compared exactly. Losses are floats that different processors round
differently, so they are compared to 1e-4. To pin anew after a deliberate change of numerics:
delete golden.json, run this test once, and say in the commit why.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blocktrain.config import Config
from blocktrain.data.corpus import Corpus
from blocktrain.data.windows import TrainingWindows
from blocktrain.model.block import target_table
from blocktrain.numerics.sampling import mixed_seed
from blocktrain.train.device import resolve
from blocktrain.train.trainer import BlockTrainer

PINNED = Path(__file__).with_name("golden.json")


def measured(config: Config, corpus: Corpus) -> dict[str, Any]:
    windows = TrainingWindows(corpus.splits["train"], 32, 4, seed=11)
    batches = b"".join(windows[index].tobytes() for index in (0, 1, 57, 1000))
    table = np.round(target_table(7, 256).numpy(), 5) + 0.0
    return {
        "seeds": [mixed_seed(0), mixed_seed(1, 2), mixed_seed(0, 1, 3, 99)],
        "batches": hashlib.sha256(batches).hexdigest(),
        "table": [float(x) for x in table[[0, 17, 255], [3, 99, 200]]],
        "bounds": list(config.partition().bounds),
        "denoise": losses(config, 1, corpus),
        "end_to_end": losses(config.with_settings(objective__kind="end_to_end"), 0, corpus),
        "adamw": losses(config.with_settings(train__optimizer="adamw", train__lr=3e-3), 1, corpus),
    }


def losses(config: Config, block: int, corpus: Corpus) -> list[float]:
    trainer = BlockTrainer(config, block, corpus, resolve("cpu", "fp32"), None)
    result = []
    for _ in range(6):
        trainer.train_step()
        result.append(float(trainer.last_loss))
    return result


def test_numbers_are_the_pinned_ones(config: Config, corpus: Corpus):
    found = measured(config, corpus)
    if not PINNED.exists():
        PINNED.write_text(json.dumps(found, indent=1) + "\n")
        pytest.fail(f"{PINNED.name} was missing and has been written: look at it and commit it")
    pinned = json.loads(PINNED.read_text())
    for exact in ("seeds", "batches"):
        assert found[exact] == pinned[exact]
    for rounded in ("table", "bounds", "denoise", "end_to_end", "adamw"):
        assert found[rounded] == pytest.approx(pinned[rounded], abs=1e-4), rounded
