"""What a block reads at each step: when it looks for newer blocks, and what it holds meanwhile."""

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.models import awake_block
from tests.support.published import Shelf
from tests.support.training import CPU, assert_equal, quiet, stop_after, weights_of

from blocktrain.config import Config
from blocktrain.data.corpus import Corpus, TrainingWindows, shifted
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.cascade import Predecessors
from blocktrain.training.checkpoints import Progress
from blocktrain.training.device import resolve
from blocktrain.training.frozen import Prefix
from blocktrain.training.trainer import BlockTrainer

CACHES = ["off", "ram", "disk"]


@pytest.fixture
def every_5(cascade: Config) -> Config:
    return cascade.with_settings(objective__refresh_every=5)


def shelf_of(config: Config) -> Shelf:
    shelf = Shelf()
    shelf.put(0, 12, awake_block(config, 0))
    return shelf


def trained(
    config: Config, corpus: Corpus, folder: Path, precision: str = "fp32"
) -> dict[str, np.ndarray]:
    """Block 1 behind an awake block 0, trained in a directory of its own."""
    run = RunDir.create(folder / f"{config.objective.feature_cache}-{precision}", config)
    compute = resolve("cpu", precision)
    trainer = BlockTrainer(config, 1, corpus, compute, run.block(1), shelf_of(config))
    trainer.train(quiet)
    return weights_of(trainer)


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(((a[name] - b[name]) ** 2).sum() for name in a)))


def steps_of_looks(trainer: BlockTrainer, shelf: Shelf) -> list[int]:
    """Filled while the trainer trains: its step at each look, a look counted once."""
    steps: list[int] = []
    shelf.on_look = lambda block: steps.append(trainer.step) if trainer.step not in steps else None
    return steps


@pytest.mark.parametrize("cache", CACHES)
def test_it_looks_exactly_every_so_many_steps(
    every_5: Config, corpus: Corpus, tmp_path: Path, cache: str
):
    config, shelf = every_5.with_settings(objective__feature_cache=cache), shelf_of(every_5)
    store = RunDir.create(tmp_path / "run", config).block(1)
    trainer = BlockTrainer(config, 1, corpus, CPU, store, shelf)
    steps = steps_of_looks(trainer, shelf)
    trainer.train(quiet)
    assert steps == [0, 5, 10]


@pytest.mark.parametrize("cache", CACHES)
def test_a_resumed_block_looks_at_once_and_then_every_so_many_steps_after(
    every_5: Config, corpus: Corpus, tmp_path: Path, cache: str
):
    config = every_5.with_settings(objective__feature_cache=cache, train__steps=20)
    shelf = shelf_of(config)
    store = RunDir.create(tmp_path / "run", config).block(1)
    BlockTrainer(config, 1, corpus, CPU, store, shelf).train(quiet, stop_after(7))
    resumed = BlockTrainer(config, 1, corpus, CPU, store, shelf)
    steps = steps_of_looks(resumed, shelf)
    resumed.train(quiet)
    assert steps == [7, 12, 17]


@pytest.mark.parametrize("cache", CACHES)
def test_a_look_can_be_asked_for_and_the_next_is_counted_from_it(
    every_5: Config, corpus: Corpus, tmp_path: Path, cache: str
):
    config, shelf = every_5.with_settings(objective__feature_cache=cache), Shelf()
    store = RunDir.create(tmp_path / "run", config).block(1)
    trainer = BlockTrainer(config, 1, corpus, CPU, store, shelf)
    steps = steps_of_looks(trainer, shelf)
    assert trainer.predecessors
    trainer.train(quiet, until=2)
    shelf.put(0, 30, awake_block(config, 0))
    trainer.predecessors.close()
    assert trainer.predecessors.versions == [None]  # only with the next step
    trainer.train(quiet, until=3)
    assert trainer.predecessors.versions == [30]
    trainer.train(quiet)
    assert steps == [0, 2, 7]


@pytest.mark.parametrize("cache", CACHES)
def test_a_newer_version_counts_from_the_next_look_on(
    every_5: Config, corpus: Corpus, tmp_path: Path, cache: str
):
    config, shelf = every_5.with_settings(objective__feature_cache=cache), Shelf()
    store = RunDir.create(tmp_path / "run", config).block(1)
    trainer = BlockTrainer(config, 1, corpus, CPU, store, shelf)
    seen = []
    for step in range(12):
        if step == 3:
            shelf.put(0, 30, awake_block(config, 0))
        trainer.train(quiet, until=step + 1)
        assert trainer.predecessors
        seen.append(list(trainer.predecessors.versions))
    assert seen == [[None]] * 5 + [[30]] * 7
    assert shelf.taken[0] == (0, 30)


def test_features_are_of_the_bytes_of_the_step(every_5: Config, corpus: Corpus):
    shelf = shelf_of(every_5)
    windows = TrainingWindows(corpus.splits["train"], 32, 4, seed=3)
    alone = Predecessors(every_5, 1, CPU, shelf, windows, None, 10)
    trainer = BlockTrainer(every_5, 1, corpus, CPU, None, shelf)
    assert trainer.predecessors
    prefix = Prefix(every_5, 1, CPU)
    prefix.refresh(shelf)
    for step in range(3):
        for predecessors, read in ((alone, windows), (trainer.predecessors, trainer.windows)):
            ids = torch.tensor(shifted(read[step]))
            assert torch.equal(predecessors.features(step, ids), prefix.features(ids))


def test_the_blocks_before_matter(every_5: Config, corpus: Corpus, tmp_path: Path):
    """The positive control of what follows: other features train other weights."""
    on_nothing = BlockTrainer(every_5, 1, corpus, CPU, None, Shelf())
    on_nothing.train(quiet)
    assert distance(trained(every_5, corpus, tmp_path), weights_of(on_nothing)) > 1.0


@pytest.mark.parametrize("cache", ["ram", "disk"])
def test_a_cache_of_bf16_features_changes_nothing_when_computing_in_bf16(
    every_5: Config, corpus: Corpus, tmp_path: Path, cache: str
):
    """Features are bf16 there anyway, so that keeping them loses nothing."""
    cached = every_5.with_settings(objective__feature_cache=cache)
    assert_equal(
        trained(cached, corpus, tmp_path, "bf16"), trained(every_5, corpus, tmp_path, "bf16")
    )


def test_ram_and_disk_give_the_same_weights(every_5: Config, corpus: Corpus, tmp_path: Path):
    ram, disk = (every_5.with_settings(objective__feature_cache=c) for c in ("ram", "disk"))
    assert_equal(trained(ram, corpus, tmp_path), trained(disk, corpus, tmp_path))


def test_a_cache_changes_weights_by_its_rounding_alone(
    every_5: Config, corpus: Corpus, tmp_path: Path
):
    """Of what training moved the weights by, rounding its features may turn a few percent."""
    start = weights_of(BlockTrainer(every_5, 1, corpus, CPU, None, Shelf()))
    cached = every_5.with_settings(objective__feature_cache="ram")
    exact, rounded = trained(every_5, corpus, tmp_path), trained(cached, corpus, tmp_path)
    assert 0 < distance(rounded, exact) < 0.05 * distance(exact, start)


def prefixes_alive() -> int:
    return sum(type(o) is Prefix for o in gc.get_objects())


@pytest.mark.parametrize(("cache", "held"), [("off", 1), ("ram", 0), ("disk", 0)])
def test_with_a_cache_the_blocks_before_leave_memory_between_looks(
    every_5: Config, corpus: Corpus, tmp_path: Path, cache: str, held: int
):
    config = every_5.with_settings(objective__feature_cache=cache)
    store = RunDir.create(tmp_path / "run", config).block(1)
    gc.collect()
    before = prefixes_alive()
    trainer = BlockTrainer(config, 1, corpus, CPU, store, shelf_of(config))
    alive = []
    for steps in (1, 3, 6):
        trainer.train(quiet, until=steps)
        alive.append(prefixes_alive() - before)
    assert alive == [held] * 3


def test_a_score_on_valid_is_the_same_where_the_blocks_before_left_memory(
    every_5: Config, corpus: Corpus, tmp_path: Path
):
    """They are fetched for it; in bf16 the weights scored are the same too."""
    scored = []
    for cache in CACHES:
        config = every_5.with_settings(objective__feature_cache=cache, train__eval_every=6)
        store = RunDir.create(tmp_path / cache, config).block(1)
        reports: list[Progress] = []
        compute = resolve("cpu", "bf16")
        BlockTrainer(config, 1, corpus, compute, store, shelf_of(config)).train(reports.append)
        scored.append({r.step: r.valid_ce for r in reports if r.valid_ce is not None})
    assert list(scored[0]) == [6, 12]
    assert scored[0][12] < scored[0][6] < np.log(256)
    assert scored[0] == scored[1] == scored[2]


def test_the_windows_of_a_step_are_drawn_once(
    every_5: Config, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
):
    drawn: list[int] = []
    draw = TrainingWindows.__getitem__

    def counted(windows: TrainingWindows, index: int) -> np.ndarray:
        drawn.append(index)
        return draw(windows, index)

    monkeypatch.setattr(TrainingWindows, "__getitem__", counted)
    BlockTrainer(every_5, 1, corpus, CPU, None, Shelf()).train(quiet, until=3)
    assert drawn == [0, 1, 2]
