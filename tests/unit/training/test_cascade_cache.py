"""Features kept for the steps to come: exact in bf16, as large as announced, gone afterwards."""

from pathlib import Path

import pytest
import torch
from tests.support.models import awake_block
from tests.support.published import Shelf
from tests.support.training import CPU, assert_equal, quiet, stop_after, weights_of
from torch import Tensor, nn

from blocktrain.config import Config
from blocktrain.data.corpus import Corpus
from blocktrain.errors import ConfigError, DivergedError
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.cascade import FILE, FeatureCache, new_cache
from blocktrain.training.estimation import cache_bytes
from blocktrain.training.trainer import BlockTrainer


@pytest.fixture
def on_disk(cascade: Config) -> Config:
    return cascade.with_settings(objective__feature_cache="disk", objective__refresh_every=5)


def features(config: Config, step: int) -> Tensor:
    torch.manual_seed(step)
    return torch.randn(config.train.batch, config.model.window, config.model.width)


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_what_is_kept_comes_back_in_bf16(on_disk: Config, tmp_path: Path, where: str):
    cache = FeatureCache(on_disk, tmp_path / "f.bin" if where == "disk" else None)
    cache.fill(range(5, 10), lambda step: features(on_disk, step))
    for step in (9, 5, 7):
        assert torch.equal(cache[step], features(on_disk, step).to(torch.bfloat16))


def test_steps_before_and_after_are_not_there(on_disk: Config):
    cache = FeatureCache(on_disk, None)
    cache.fill(range(0, 5), lambda step: features(on_disk, step))
    cache.fill(range(5, 8), lambda step: features(on_disk, step))  # the last range may be shorter
    for step in (4, 8):
        with pytest.raises(ValueError, match="not in range"):
            cache[step]
    assert torch.equal(cache[7], features(on_disk, 7).to(torch.bfloat16))


@pytest.mark.parametrize("refresh_every", [5, 12, 50])
def test_the_file_is_as_large_as_announced(on_disk: Config, tmp_path: Path, refresh_every: int):
    config = on_disk.with_settings(objective__refresh_every=refresh_every)
    cache = new_cache(config, tmp_path / "block")
    assert cache
    assert not (tmp_path / "block").exists()  # only from the first fill on
    cache.fill(range(2), lambda step: features(config, step))
    assert (tmp_path / "block" / FILE).stat().st_size == cache_bytes(config)
    assert cache_bytes(config) == min(refresh_every, 12) * 4 * 32 * 32 * 2
    cache.close()
    assert list((tmp_path / "block").iterdir()) == []


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_a_closed_cache_can_be_filled_again(on_disk: Config, tmp_path: Path, where: str):
    cache = new_cache(on_disk.with_settings(objective__feature_cache=where), tmp_path)
    assert cache
    cache.close()  # before the first fill: nothing to give back
    cache.fill(range(0, 5), lambda step: features(on_disk, step))
    cache.close()
    assert not (tmp_path / FILE).exists()
    cache.fill(range(3, 6), lambda step: features(on_disk, step))
    assert (tmp_path / FILE).exists() is (where == "disk")
    assert torch.equal(cache[4], features(on_disk, 4).to(torch.bfloat16))
    with pytest.raises(ValueError, match="not in range"):
        cache[2]


def test_a_file_needs_a_run_directory_to_lie_in(on_disk: Config, corpus: Corpus):
    with pytest.raises(ConfigError, match=r"objective\.feature_cache = disk"):
        new_cache(on_disk, None)
    with pytest.raises(ConfigError, match=r"objective\.feature_cache = disk"):
        BlockTrainer(on_disk, 1, corpus, CPU, None, Shelf())
    BlockTrainer(on_disk, 0, corpus, CPU, None, Shelf())  # reads no others, keeps nothing


def test_ram_takes_as_much_as_disk_and_no_file(on_disk: Config, tmp_path: Path):
    in_ram = on_disk.with_settings(objective__feature_cache="ram")
    assert cache_bytes(in_ram) == cache_bytes(on_disk) > 0
    cache = new_cache(in_ram, tmp_path / "block")
    assert cache
    cache.fill(range(2), lambda step: features(in_ram, step))
    assert not (tmp_path / "block").exists()
    assert new_cache(in_ram, None)


def test_nothing_is_kept_or_announced_where_nothing_is_asked_for(on_disk: Config, tmp_path: Path):
    off = on_disk.with_settings(objective__feature_cache="off")
    assert new_cache(off, tmp_path) is None
    assert cache_bytes(off) == 0
    assert cache_bytes(on_disk.with_settings(objective__kind="denoise")) == 0
    assert cache_bytes(on_disk.with_settings(model__blocks=1)) == 0  # nobody reads anybody


@pytest.mark.parametrize("stops", [False, True])
def test_the_file_is_there_while_training_and_gone_after(
    on_disk: Config, corpus: Corpus, tmp_path: Path, stops: bool
):
    shelf = Shelf()
    shelf.put(0, 12, awake_block(on_disk, 0))
    store = RunDir.create(tmp_path / "run", on_disk).block(1)
    trainer = BlockTrainer(on_disk, 1, corpus, CPU, store, shelf)
    stop = stop_after(7) if stops else stop_after(100)
    sizes: list[int] = []

    def measure() -> bool:
        sizes.append((store.path / FILE).stat().st_size)
        return stop()

    assert trainer.train(quiet, measure) is not stops
    assert sizes == [cache_bytes(on_disk)] * (7 if stops else 12)
    assert not (store.path / FILE).exists()
    assert store.versions()


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, SystemExit])
def test_the_file_is_gone_after_an_error(
    on_disk: Config, corpus: Corpus, tmp_path: Path, error: type[BaseException]
):
    store = RunDir.create(tmp_path / "run", on_disk).block(1)
    trainer = BlockTrainer(on_disk, 1, corpus, CPU, store, Shelf())

    def fail() -> bool:
        assert (store.path / FILE).exists()
        if trainer.step == 3:
            raise error
        return False

    with pytest.raises(error):
        trainer.train(quiet, fail)
    assert trainer.step == 3
    assert not (store.path / FILE).exists()


def test_the_file_is_gone_after_training_diverged(on_disk: Config, corpus: Corpus, tmp_path: Path):
    config = on_disk.with_settings(train__max_skipped=2)
    store = RunDir.create(tmp_path / "run", config).block(1)
    trainer = BlockTrainer(config, 1, corpus, CPU, store, Shelf())
    assert isinstance(trainer.module.head, nn.Module)
    trainer.module.head.weight.data.fill_(float("nan"))
    with pytest.raises(DivergedError, match="in a row"):
        trainer.train(quiet)
    assert not (store.path / FILE).exists()


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_a_stopped_trainer_can_train_on(
    on_disk: Config, corpus: Corpus, tmp_path: Path, where: str
):
    config = on_disk.with_settings(objective__feature_cache=where, model__dropout=0.1)
    shelf = Shelf()
    shelf.put(0, 12, awake_block(config, 0))
    straight, stopped = (
        BlockTrainer(config, 1, corpus, CPU, RunDir.create(tmp_path / name, config).block(1), shelf)
        for name in ("straight", "stopped")
    )
    straight.train(quiet)
    assert not stopped.train(quiet, stop_after(4))
    assert stopped.train(quiet)
    assert stopped.step == 12
    assert_equal(weights_of(straight), weights_of(stopped))
