import gc
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.training import CPU, assert_equal, quiet, stop_after, weights_of
from torch import nn

from blocktrain.config import Config
from blocktrain.data.corpus import Corpus, evaluation_windows
from blocktrain.errors import DivergedError, RunError
from blocktrain.model.block import CausalBlock
from blocktrain.model.denoising import DenoisingBlock
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.cascade import WARM_START, PublishedRun
from blocktrain.training.checkpoints import Progress
from blocktrain.training.evaluate import evaluate
from blocktrain.training.frozen import Prefix
from blocktrain.training.objective import Batch, Loss, Objective
from blocktrain.training.run_session import open_session, training_lock
from blocktrain.training.stored_models import load_stack
from blocktrain.training.trainer import BlockTrainer


@pytest.mark.parametrize("kind", ["denoise", "end_to_end"])
def test_a_stopped_run_resumes_bit_for_bit(
    config: Config, corpus: Corpus, tmp_path: Path, kind: str
):
    config = config.with_settings(objective__kind=kind, model__dropout=0.1)
    straight = BlockTrainer(config, 0, corpus, CPU, None)
    straight.train(quiet)

    run = RunDir.create(tmp_path / "run", config)
    first = BlockTrainer(config, 0, corpus, CPU, run.block(0))
    assert not first.train(quiet, stop_after(7))
    assert run.block(0).versions()[-1].step == 7
    second = BlockTrainer(config, 0, corpus, CPU, run.block(0))
    assert second.train(quiet)
    assert_equal(weights_of(straight), weights_of(second))
    assert run.block(0).finished()


@pytest.mark.parametrize("cache", ["off", "ram", "disk"])
def test_a_stopped_block_of_a_cascade_resumes_bit_for_bit(
    cascade: Config, corpus: Corpus, tmp_path: Path, cache: str
):
    """Stopped between two looks at a finished block before it."""
    config = cascade.with_settings(
        objective__feature_cache=cache, objective__refresh_every=5, model__dropout=0.1
    )
    run, other = (RunDir.create(tmp_path / name, config) for name in ("run", "straight"))
    published = PublishedRun(run)
    BlockTrainer(config, 0, corpus, CPU, run.block(0)).train(quiet)
    straight = BlockTrainer(config, 1, corpus, CPU, other.block(1), published)
    straight.train(quiet)

    first = BlockTrainer(config, 1, corpus, CPU, run.block(1), published)
    assert not first.train(quiet, stop_after(7))
    assert run.block(1).versions()[-1].step == 7
    second = BlockTrainer(config, 1, corpus, CPU, run.block(1), published)
    assert second.train(quiet)
    assert_equal(weights_of(straight), weights_of(second))
    assert run.block(1).finished()


def test_what_is_on_disk_is_taken_over_once(config: Config, corpus: Corpus, tmp_path: Path):
    store = RunDir.create(tmp_path / "run", config).block(0)
    BlockTrainer(config, 0, corpus, CPU, store).train(quiet, stop_after(7))
    resumed = BlockTrainer(config, 0, corpus, CPU, store)
    assert resumed.step == 0
    resumed.restore()
    assert resumed.step == 7
    assert_equal(store.load_weights(), resumed.weights())
    resumed.train_step()
    further = weights_of(resumed)
    resumed.restore()
    assert resumed.step == 8
    assert_equal(further, resumed.weights())


def test_weights_to_start_from_are_taken_over_once(config: Config, corpus: Corpus, tmp_path: Path):
    old = RunDir.create(tmp_path / "old", config)
    for block in range(config.block_count):
        BlockTrainer(config, block, corpus, CPU, old.block(block)).train(quiet)
    tuned = config.with_settings(train__warm_start=str(old.path))
    trainer = BlockTrainer(tuned, 1, corpus, CPU, None)
    trainer.restore()
    assert_equal(old.block(1).load_weights(), trainer.weights())
    trainer.train_step()
    further = weights_of(trainer)
    trainer.restore()
    assert_equal(further, trainer.weights())
    name = "embed.weight"
    assert (further[name] != old.block(1).load_weights()[name]).any()


def test_work_after_the_last_checkpoint_is_done_again(
    config: Config, corpus: Corpus, tmp_path: Path
):
    """A kill between checkpoints: the same weights, and metrics without doubles."""
    run = RunDir.create(tmp_path / "run", config)
    killed = BlockTrainer(config, 0, corpus, CPU, run.block(0))

    class KilledError(Exception):
        pass

    def kill() -> bool:
        if killed.step == 11:
            raise KilledError
        return False

    with pytest.raises(KilledError):
        killed.train(quiet, kill)
    assert run.block(0).versions()[-1].step == 10
    resumed = BlockTrainer(config, 0, corpus, CPU, run.block(0))
    resumed.train(quiet)
    straight = BlockTrainer(config, 0, corpus, CPU, None)
    straight.train(quiet)
    assert_equal(weights_of(straight), weights_of(resumed))
    steps = [json.loads(x)["step"] for x in run.block(0).metrics_path.read_text().splitlines()]
    assert steps == [10, 12]


class FaultPlan:
    """An objective whose loss is not a number at the planned calls."""

    def __init__(self, objective: Objective, faults: set[int], module: nn.Module) -> None:
        self.objective, self.faults, self.module = objective, faults, module
        self.calls = 0

    def prepare(self, targets: np.ndarray, seed: int) -> Batch:
        return self.objective.prepare(targets, seed)

    def loss(self, module: nn.Module, batch: Batch) -> Loss:
        loss = self.objective.loss(module, batch)
        self.calls += 1
        return Loss(loss.value * float("nan"), loss.ce) if self.calls in self.faults else loss


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_non_finite_step_never_reaches_weights_or_moments(
    config: Config, corpus: Corpus, optimizer: str
):
    config = config.with_settings(train__optimizer=optimizer)
    trainer = BlockTrainer(config, 0, corpus, CPU, None)
    trainer.objective = FaultPlan(trainer.objective, {3}, trainer.module)
    for _ in range(2):
        trainer.train_step()
    before = weights_of(trainer)
    moments = [
        {k: v.clone() for k, v in trainer.optimizer.state[p].items()}
        for p in trainer.module.parameters()
    ]
    trainer.train_step()
    assert_equal(before, weights_of(trainer))
    for parameter, held in zip(trainer.module.parameters(), moments, strict=True):
        for key, value in held.items():
            assert torch.equal(trainer.optimizer.state[parameter][key], value), key
    trainer.train_step()
    after = weights_of(trainer)
    assert any(not np.array_equal(before[name], after[name]) for name in before)
    assert all(np.isfinite(array).all() for array in after.values())


def test_skipped_steps_are_counted_and_reported(config: Config, corpus: Corpus, tmp_path: Path):
    run = RunDir.create(tmp_path / "run", config)
    trainer = BlockTrainer(config, 0, corpus, CPU, run.block(0))
    trainer.objective = FaultPlan(trainer.objective, {2, 5, 11, 12}, trainer.module)
    reports: list[Progress] = []
    trainer.train(reports.append)
    assert reports[-1].skipped == 4
    clean: list[Progress] = []
    BlockTrainer(config, 0, corpus, CPU, None).train(clean.append)
    assert reports[0].loss == pytest.approx(clean[0].loss, rel=0.2)  # skipped steps do not count
    assert reports[-1].loss is None
    snapshot = run.block(0).load_snapshot()
    assert snapshot is not None
    assert snapshot.counters["skipped"] == 4


def test_a_run_that_keeps_failing_stops_and_says_why(config: Config, corpus: Corpus):
    config = config.with_settings(train__steps=100, train__max_skipped=8)
    trainer = BlockTrainer(config, 0, corpus, CPU, None)
    trainer.objective = FaultPlan(trainer.objective, set(range(13, 200)), trainer.module)
    with pytest.raises(DivergedError, match=r"block 0 stopped at step 20: 8 steps in a row"):
        trainer.train(quiet)


def test_a_long_streak_between_two_reports_stops_the_run(config: Config, corpus: Corpus):
    config = config.with_settings(train__steps=40, train__max_skipped=3)
    trainer = BlockTrainer(config, 0, corpus, CPU, None)
    trainer.objective = FaultPlan(trainer.objective, set(range(12, 18)), trainer.module)
    with pytest.raises(DivergedError, match="6 steps in a row"):
        trainer.train(quiet)


def test_other_text_is_refused_on_resume(config: Config, corpus: Corpus, tmp_path: Path):
    run = RunDir.create(tmp_path / "run", config)
    first = replace(corpus, digests={"train": "aa"})
    BlockTrainer(config, 0, first, CPU, run.block(0)).train(quiet, stop_after(4))
    other = replace(corpus, digests={"train": "bb"})
    with pytest.raises(RunError, match="has changed since"):
        BlockTrainer(config, 0, other, CPU, run.block(0)).train(quiet)


def test_a_learned_scale_can_be_resumed(config: Config, corpus: Corpus, tmp_path: Path):
    config = config.with_settings(objective__logit_scale="learned")
    run = RunDir.create(tmp_path / "run", config)
    BlockTrainer(config, 0, corpus, CPU, run.block(0)).train(quiet, stop_after(4))
    assert BlockTrainer(config, 0, corpus, CPU, run.block(0)).train(quiet)


def test_a_torn_line_before_the_first_checkpoint_is_forgotten(
    config: Config, corpus: Corpus, tmp_path: Path
):
    run = RunDir.create(tmp_path / "run", config)
    store = run.block(0)
    store.append_metrics({"step": 10})
    with store.metrics_path.open("a") as out:
        out.write('{"step": 1')
    BlockTrainer(config, 0, corpus, CPU, store).train(quiet)
    steps = [json.loads(x)["step"] for x in store.metrics_path.read_text().splitlines()]
    assert steps == [10, 12]


def test_accumulation_is_the_same_step_in_less_memory(config: Config, corpus: Corpus):
    whole = config.with_settings(objective__kind="end_to_end")
    parts = whole.with_settings(train__accumulate=4)
    trainers = [BlockTrainer(c, 0, corpus, CPU, None) for c in (whole, parts)]
    for trainer in trainers:
        for _ in range(3):
            trainer.train_step()
    for a, b in zip(*(weights_of(t).values() for t in trainers), strict=True):
        assert np.allclose(a, b, atol=2e-4)


def test_blocks_differ_in_weights_and_data_and_repeat_by_seed(config: Config, corpus: Corpus):
    zero, one, again = (BlockTrainer(config, k, corpus, CPU, None) for k in (0, 1, 0))
    assert not np.array_equal(zero.windows[0], one.windows[0])
    assert not np.array_equal(zero.weights()["embed.weight"], one.weights()["embed.weight"])
    assert np.array_equal(zero.windows[3], again.windows[3])
    assert_equal(zero.weights(), again.weights())


def test_the_loss_falls(config: Config, corpus: Corpus):
    config = config.with_settings(train__steps=120, train__batch=8, train__lr=5e-3)
    reports: list[Progress] = []
    BlockTrainer(config, 0, corpus, CPU, None).train(reports.append)
    assert reports[-1].ce < reports[0].ce - 1.5


def test_keep_best_ends_at_the_best_score(config: Config, corpus: Corpus, tmp_path: Path):
    """A learning rate that ruins the model late: the kept version is from before."""
    config = config.with_settings(
        train__steps=30, train__eval_every=5, train__keep="best", train__lr=0.5,
        train__lr_floor=1.0, train__warmup=30, train__clip=0.0,
    )  # fmt: skip
    run = RunDir.create(tmp_path / "run", config)
    scores: dict[int, float] = {}
    trainer = BlockTrainer(config, 0, corpus, CPU, run.block(0))
    trainer.train(lambda p: scores.update({p.step: p.valid_ce}) if p.valid_ce else None)
    best = min(scores, key=lambda step: scores[step])
    assert best < 30
    assert run.block(0).current().step == best
    assert run.block(0).current().valid_ce == pytest.approx(scores[best])


def test_warm_start_takes_the_other_runs_weights(config: Config, corpus: Corpus, tmp_path: Path):
    run = RunDir.create(tmp_path / "old", config)
    for block in range(config.block_count):
        BlockTrainer(config, block, corpus, CPU, run.block(block)).train(quiet)
    tuned = config.with_settings(train__warm_start=str(run.path), train__steps=1, train__lr=0.0)
    trainer = BlockTrainer(tuned, 1, corpus, CPU, None)
    trainer.train(quiet)
    assert_equal(run.block(1).load_weights(), trainer.weights())
    wider = tuned.with_settings(model__width=64)
    with pytest.raises(RunError, match="does not fit this model"):
        BlockTrainer(wider, 0, corpus, CPU, None).train(quiet)


def train_in_turn(
    run: RunDir, corpus: Corpus, on_progress: Callable[[Progress], None] = quiet
) -> None:
    for block in range(run.config.block_count):
        store = run.block(block)
        BlockTrainer(run.config, block, corpus, CPU, store, PublishedRun(run)).train(on_progress)


def test_warm_start_takes_the_blocks_before_from_the_other_run_too(
    cascade: Config, corpus: Corpus, tmp_path: Path
):
    old = RunDir.create(tmp_path / "old", cascade)
    train_in_turn(old, corpus)
    tuned = cascade.with_settings(train__warm_start=str(old.path), train__steps=1, train__lr=0.0)
    run = RunDir.create(tmp_path / "new", tuned)
    published = PublishedRun(run)
    assert published.version(0) == WARM_START == -1
    trainer = BlockTrainer(tuned, 1, corpus, CPU, None, published)
    trainer.train(quiet)
    assert_equal(old.block(1).load_weights(), trainer.weights())
    assert trainer.predecessors
    assert trainer.predecessors.versions == [-1]
    ids = torch.randint(0, 256, (2, 32))
    expected = Prefix(cascade, 1, CPU)
    untrained = expected.features(ids)
    expected.refresh(PublishedRun(old))
    assert torch.equal(trainer.predecessors.prefix().features(ids), expected.features(ids))
    assert not torch.equal(untrained, expected.features(ids))

    BlockTrainer(tuned, 0, corpus, CPU, run.block(0), published).train(quiet)
    assert published.version(0) == 1  # from its first version on, the run's own


def test_a_block_of_a_cascade_is_scored_as_it_is_in_the_assembled_model(
    cascade: Config, corpus: Corpus, tmp_path: Path
):
    """Through the blocks before it; these are held in bf16 here, hence the tolerance."""
    config = cascade.with_settings(train__eval_every=6, train__eval_windows=16, train__lr=1e-2)
    run = RunDir.create(tmp_path / "run", config)
    reports: list[Progress] = []
    train_in_turn(run, corpus, reports.append)
    scored = {(r.block, r.step): r.valid_ce for r in reports if r.valid_ce is not None}
    assert set(scored) == {(0, 6), (0, 12), (1, 6), (1, 12)}
    windows = evaluation_windows(corpus.splits["valid"], 32, 16)
    readings = {s.readout: s.ce for s in evaluate(load_stack(run, CPU), windows).scores}
    assert scored[0, 12] == pytest.approx(readings["block 0"], rel=1e-5)
    assert scored[1, 12] == pytest.approx(readings["block 1"], abs=2e-3)
    assert scored[1, 12] < scored[1, 6] - 0.1
    assert run.block(1).current().valid_ce == scored[1, 12]


def open_text(config: Config, corpus: Corpus, folder: Path) -> Config:
    """The settings with the corpus as a text file, for what opens its corpus itself."""
    (folder / "text.txt").write_bytes(corpus.splits["train"].tobytes())
    return config.with_settings(data__source=f"text:{folder}/text.txt")


@pytest.mark.parametrize("cache", ["off", "disk"])
def test_a_cascade_trained_in_turn_builds_on_finished_blocks(
    cascade: Config, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str
):
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(tmp_path / "cache"))
    config = cascade.with_settings(
        model__layers=3, model__blocks=3, train__steps=6, objective__feature_cache=cache
    )
    session = open_session(open_text(config, corpus, tmp_path), tmp_path / "run")
    order: list[int] = []
    assert session.train_in_turn([0, 1, 2], lambda p: order.append(p.block), lambda: False)
    assert order == sorted(order)
    assert set(order) == {0, 1, 2}
    snapshots = [session.run.block(block).load_snapshot() for block in range(3)]
    assert all(snapshot and snapshot.finished for snapshot in snapshots)
    assert [s.counters.get("built_on") for s in snapshots if s] == [None, [6], [6, 6]]

    config, published = session.run.config, PublishedRun(session.run)
    store = RunDir.create(tmp_path / "again", config).block(2)
    again = BlockTrainer(config, 2, session.corpus, CPU, store, published)
    again.train(quiet)
    assert_equal(session.run.block(2).load_weights(), weights_of(again))


@pytest.mark.parametrize(
    ("kind", "cache"), [("denoise", "off"), ("cascade", "off"), ("cascade", "ram")]
)
def test_one_after_another_only_one_block_is_in_memory(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, cache: str
):
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_bytes(bytes(range(32, 127)) * 400)
    config = config.with_settings(
        data__source=f"text:{tmp_path}/text.txt", objective__kind=kind, objective__tail=1,
        objective__feature_cache=cache, model__layers=4, model__blocks=4,
    )  # fmt: skip
    alive: list[int] = []

    def blocks() -> int:
        return sum(type(o) in (DenoisingBlock, CausalBlock) for o in gc.get_objects())

    session = open_session(config, tmp_path / "run")
    gc.collect()
    before = blocks()
    gc.disable()  # what is only garbage is still in memory
    try:
        assert session.train_in_turn(range(4), lambda p: alive.append(blocks()), lambda: False)
    finally:
        gc.enable()
    assert len(alive) >= 4
    assert {n - before for n in alive} == {1}
    run = RunDir.open(tmp_path / "run")
    seen = [run.block(k).current().bytes_seen for k in range(4)]
    assert seen == [12 * 4 * 32] * 4  # gate 6: equal bytes for every block


def test_a_cache_is_announced_to_whoever_trains_a_block_that_needs_one(
    cascade: Config, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(tmp_path / "cache"))
    cached = open_text(cascade, corpus, tmp_path).with_settings(
        objective__feature_cache="disk", objective__refresh_every=5, train__batch=64
    )
    session = open_session(cached, tmp_path / "cached")
    announced = f"feature cache: {5 * 64 * 32 * 32 * 2 / 1e6:.0f} MB per block, disk"
    assert session.notes([0]) == []
    assert session.notes([0, 1]) == [announced]
    alone = session.notes([1])
    assert alone[0] == announced
    assert "no version yet: 0" in alone[1]
    one = open_session(cached.with_settings(model__blocks=1), tmp_path / "one")
    off = open_session(cached.with_settings(objective__feature_cache="off"), tmp_path / "off")
    assert one.notes([0]) == off.notes([0, 1]) == []


def test_two_processes_cannot_train_one_block(config: Config, tmp_path: Path):
    run = RunDir.create(tmp_path / "run", config)
    with (
        training_lock(run.block(0)),
        pytest.raises(RunError, match="another process"),
        training_lock(RunDir.open(run.path).block(0)),
    ):
        pass
