"""Training that starts from an imported model, whatever blocks either is cut into."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.checkpoints import random_model, saved
from tests.support.training import CPU, quiet

from blocktrain.config import Config, TrainConfig
from blocktrain.errors import ConfigError
from blocktrain.interop.checkpoint import open_checkpoint
from blocktrain.interop.importing import Import
from blocktrain.model.stack import assemble, initial_block
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.stored_models import load_stack, load_warm_start
from blocktrain.training.trainer import BlockTrainer

from .conftest import token_corpus

IDS = torch.arange(24)[None]


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def imported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    folder = tmp_path_factory.mktemp("model")
    checkpoint = saved(random_model(request.param), folder / "checkpoint")
    return Import(open_checkpoint(str(checkpoint)), 2, window=32).write(folder / "run")


def warm(imported: RunDir, **settings: object) -> Config:
    changes = {"objective__kind": "end_to_end", **settings}
    train = TrainConfig(
        warm_start=str(imported.path), steps=2, batch=2, warmup=0, device="cpu", precision="fp32"
    )
    return replace(imported.config, train=train).with_settings(**changes)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {
            "objective__kind": "cascade",
            "objective__tail": 1,
            "model__blocks": 3,
            "model__depths": (1, 1, 1),
            "model__tied_embeddings": False,
        },
        {"objective__kind": "cascade", "objective__tail": 1, "model__tied_embeddings": False},
    ],
    ids=["end to end", "cascade of three", "cascade of two"],
)
def test_a_run_begins_with_what_the_model_computes(imported: RunDir, settings: dict[str, object]):
    config = warm(imported, **settings)
    blocks = [initial_block(config, index) for index in range(config.block_count)]
    for index, block in enumerate(blocks):
        load_warm_start(block, config, index)
    expected = load_stack(imported, CPU).log_probs(IDS)[-1]
    assert torch.equal(assemble(config, blocks).log_probs(IDS)[-1], expected)


def test_it_is_trained_from_there(imported: RunDir, tmp_path: Path):
    config = warm(imported, train__lr=1e-3)
    run = RunDir.create(tmp_path / "tuned", config)
    BlockTrainer(config, 0, token_corpus(), CPU, run.block(0)).train(quiet)
    before, after = (
        load_stack(each, CPU).log_probs(IDS)[-1] for each in (imported, RunDir.open(run.path))
    )
    assert 0 < (after - before).abs().mean() < 1.0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"model__rope_theta": 5.0}, "model.rope_theta"),
        ({"model__logit_gain": 8.0}, "model.logit_gain"),
        ({"vocab__sha256": "another"}, "data.tokenizer"),
    ],
)
def test_other_settings_are_refused_by_name(
    imported: RunDir, settings: dict[str, object], named: str
):
    config = warm(imported, **settings)
    with pytest.raises(ConfigError, match=named) as caught:
        load_warm_start(initial_block(config, 0), config, 0)
    assert "config.toml" in str(caught.value)


def test_denoising_blocks_are_refused(imported: RunDir):
    settings = {
        "objective__kind": "denoise",
        "model__depths": (2, 1),
        "model__tied_embeddings": False,
    }
    config = warm(imported, **settings)
    with pytest.raises(ConfigError, match=r"objective\.kind"):
        load_warm_start(initial_block(config, 0), config, 0)
