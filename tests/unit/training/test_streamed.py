"""Frozen blocks in files give the bits of frozen blocks in memory."""

import gc
from pathlib import Path

import pytest
import torch
from tests.support.models import awake_block
from tests.support.published import Shelf
from tests.support.training import CPU, assert_equal, quiet, stop_after, weights_of

from blocktrain.config import Config
from blocktrain.data.corpus import Corpus
from blocktrain.errors import ConfigError
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.frozen import Prefix, Suffix
from blocktrain.training.streamed import StreamedPrefix, StreamedSuffix
from blocktrain.training.trainer import BlockTrainer

IDS = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(9))


@pytest.fixture
def deep(cascade: Config) -> Config:
    """Three blocks: one, two and one layers."""
    return cascade.with_settings(
        model__layers=4, model__blocks=3, model__depths=[1, 2, 1], model__width=64
    )


def put(shelf: Shelf, config: Config, block: int, version: int) -> None:
    shelf.put(block, version, awake_block(config, block))


@pytest.mark.parametrize("layer", ["local", "llama"])
@pytest.mark.parametrize("frozen", ["bf16", "int8"])
def test_features_have_the_same_bits(deep: Config, tmp_path: Path, frozen: str, layer: str):
    taps = deep.model.taps if layer == "local" else 0
    config = deep.with_settings(objective__frozen=frozen, model__layer=layer, model__taps=taps)
    resident, streamed = Prefix(config, 2, CPU), StreamedPrefix(config, 2, CPU, tmp_path)
    shelf = Shelf()
    streamed.refresh(shelf)
    assert torch.equal(resident.features(IDS), streamed.features(IDS))  # untrained
    for block, version in ((0, 3), (1, 4), (0, 5)):
        put(shelf, config, block, version)
        resident.refresh(shelf)
        streamed.refresh(shelf)
        assert streamed.versions == resident.versions
        assert torch.equal(resident.features(IDS), streamed.features(IDS))


def test_no_weights_stay_in_memory(deep: Config, tmp_path: Path):
    gc.collect()
    before = {id(each) for each in gc.get_objects()}
    streamed = StreamedPrefix(deep, 2, CPU, tmp_path)
    streamed.refresh(Shelf())
    streamed.features(IDS)
    gc.collect()
    left = [each for each in gc.get_objects() if id(each) not in before
            and isinstance(each, torch.Tensor) and not each.is_meta]  # fmt: skip
    assert not left
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2
    streamed.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("cache", ["off", "ram", "disk"])
def test_training_gives_the_same_weights_and_leaves_no_files(
    deep: Config, corpus: Corpus, tmp_path: Path, cache: str
):
    deep = deep.with_settings(
        objective__feature_cache=cache, objective__refresh_every=5, train__eval_every=6
    )
    made = {}
    for place in ("memory", "disk"):
        config, shelf = deep.with_settings(train__frozen_in=place), Shelf()
        for block in range(2):
            put(shelf, config, block, 10)
        store = RunDir.create(tmp_path / place, config).block(2)
        BlockTrainer(config, 2, corpus, CPU, store, shelf).train(quiet, stop_after(7))
        resumed = BlockTrainer(config, 2, corpus, CPU, store, shelf)
        resumed.train(quiet)
        made[place] = weights_of(resumed)
        assert not list(store.path.glob("frozen*"))
    assert_equal(made["memory"], made["disk"])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("block", [0, 1])
def test_a_turn_gives_the_same_weights(
    config: Config, corpus: Corpus, tmp_path: Path, block: int, recompute: bool
):
    turns = config.with_settings(
        objective__kind="turns", objective__turn_steps=5, model__layers=3, model__blocks=3,
        train__eval_every=4, train__checkpoint_layers=recompute,
    )  # fmt: skip
    made, scores = {}, {}
    for place in ("memory", "disk"):
        placed, shelf, scores[place] = turns.with_settings(train__frozen_in=place), Shelf(), []
        for other in range(3):
            put(shelf, placed, other, 10)
        store = RunDir.create(tmp_path / place, placed).block(block)
        trainer = BlockTrainer(placed, block, corpus, CPU, store, shelf)
        assert isinstance(trainer.suffix, StreamedSuffix if place == "disk" else Suffix)
        trainer.train(lambda p, seen=scores[place]: seen.append((p.step, p.valid_ce)))
        made[place] = weights_of(trainer)
        assert not list(store.path.glob("frozen*"))
    assert_equal(made["memory"], made["disk"])
    assert scores["memory"] == scores["disk"]


def test_without_a_folder_for_the_files_it_says_what_to_set(deep: Config, corpus: Corpus):
    config = deep.with_settings(train__frozen_in="disk")
    trainer = BlockTrainer(config, 2, corpus, CPU, None, Shelf())
    with pytest.raises(ConfigError, match=r"train\.frozen_in = disk needs a run's folder"):
        trainer.train(quiet, until=1)
