import gc
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from blocktrain.config import Config
from blocktrain.data.corpus import Corpus
from blocktrain.errors import DivergedError, RunError
from blocktrain.model.block import DenoisingBlock
from blocktrain.storage.run_dir import RunDir
from blocktrain.train.device import resolve
from blocktrain.train.objective import Batch, Loss, Objective
from blocktrain.train.session import open_session, training_lock
from blocktrain.train.trainer import BlockTrainer, Progress

CPU = resolve("cpu", "fp32")


def quiet(progress: Progress) -> None:
    pass


def weights_of(trainer: BlockTrainer) -> dict[str, np.ndarray]:
    return {name: array.copy() for name, array in trainer.weights().items()}


def assert_equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name, array in a.items():
        assert np.array_equal(array, b[name]), name


@pytest.mark.parametrize("kind", ["denoise", "end_to_end"])
def test_a_stopped_run_resumes_bit_for_bit(
    config: Config, corpus: Corpus, tmp_path: Path, kind: str
):
    config = config.with_settings(objective__kind=kind, model__dropout=0.1)
    straight = BlockTrainer(config, 0, corpus, CPU, None)
    straight.train(quiet)

    run = RunDir.create(tmp_path / "run", config)
    first = BlockTrainer(config, 0, corpus, CPU, run.block(0))
    stops = iter([False] * 6 + [True])
    assert not first.train(quiet, lambda: next(stops))
    assert run.block(0).versions()[-1].step == 7
    second = BlockTrainer(config, 0, corpus, CPU, run.block(0))
    assert second.train(quiet)
    assert_equal(weights_of(straight), weights_of(second))
    assert run.block(0).finished()


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


def test_a_non_finite_step_never_reaches_weights_or_moments(config: Config, corpus: Corpus):
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
    stops = iter([False] * 3 + [True])
    BlockTrainer(config, 0, first, CPU, run.block(0)).train(quiet, lambda: next(stops))
    other = replace(corpus, digests={"train": "bb"})
    with pytest.raises(RunError, match="other text"):
        BlockTrainer(config, 0, other, CPU, run.block(0)).train(quiet)


def test_a_learned_scale_can_be_resumed(config: Config, corpus: Corpus, tmp_path: Path):
    config = config.with_settings(objective__logit_scale="learned")
    run = RunDir.create(tmp_path / "run", config)
    stops = iter([False] * 3 + [True])
    BlockTrainer(config, 0, corpus, CPU, run.block(0)).train(quiet, lambda: next(stops))
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
    for block in range(config.units):
        BlockTrainer(config, block, corpus, CPU, run.block(block)).train(quiet)
    tuned = config.with_settings(train__warm_start=str(run.path), train__steps=1, train__lr=0.0)
    trainer = BlockTrainer(tuned, 1, corpus, CPU, None)
    trainer.train(quiet)
    assert_equal(run.block(1).load_weights(), trainer.weights())
    wider = tuned.with_settings(model__width=64)
    with pytest.raises(RunError, match="does not fit this model"):
        BlockTrainer(wider, 0, corpus, CPU, None).train(quiet)


def test_one_after_another_only_one_block_is_in_memory(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_bytes(bytes(range(32, 127)) * 400)
    config = config.with_settings(data__source=f"text:{tmp_path}/text.txt")
    alive: list[int] = []

    def count(progress: Progress) -> None:
        alive.append(sum(type(o) is DenoisingBlock for o in gc.get_objects()))

    gc.collect()
    before = sum(type(o) is DenoisingBlock for o in gc.get_objects())
    session = open_session(config, tmp_path / "run")
    assert session.train_in_turn([0, 1], count, lambda: False)
    assert {n - before for n in alive} == {1}
    run = RunDir.open(tmp_path / "run")
    seen = [run.block(k).current().bytes_seen for k in (0, 1)]
    assert seen == [12 * 4 * 32] * 2  # gate 6: equal bytes for every block


def test_two_processes_cannot_train_one_block(config: Config, tmp_path: Path):
    run = RunDir.create(tmp_path / "run", config)
    with (
        training_lock(run.block(0)),
        pytest.raises(RunError, match="another process"),
        training_lock(RunDir.open(run.path).block(0)),
    ):
        pass
