"""Blocks taking turns in virtual time: what each sees of the others, and that it repeats."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from bench.lockstep import Board, train_in_lockstep
from tests.support.models import untrained_stack
from tests.support.training import CPU, assert_equal, quiet, weights_of
from torch import Tensor

from blocktrain.config import Config
from blocktrain.data.corpus import Corpus, evaluation_windows
from blocktrain.errors import ConfigError
from blocktrain.model.stack import assemble
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.cascade import PublishedRun
from blocktrain.training.checkpoints import Progress
from blocktrain.training.evaluate import evaluate
from blocktrain.training.stored_models import load_stack
from blocktrain.training.trainer import BlockTrainer


@pytest.fixture
def cascade(cascade: Config) -> Config:
    """All blocks at once."""
    return cascade.with_settings(objective__lead=0.0)


def test_it_repeats(cascade: Config, corpus: Corpus):
    first, again = (train_in_lockstep(cascade, corpus, CPU, stale=4) for _ in range(2))
    assert len(first) == 2
    for a, b in zip(first, again, strict=True):
        assert_equal(weights_of(a), weights_of(b))


def test_staleness_is_nothing_to_the_first_block_and_something_to_the_next(
    cascade: Config, corpus: Corpus
):
    fresh, stale = (train_in_lockstep(cascade, corpus, CPU, stale=n) for n in (1, 6))
    assert_equal(weights_of(fresh[0]), weights_of(stale[0]))
    name = "head.weight"
    assert (fresh[1].weights()[name] != stale[1].weights()[name]).any()


def test_the_first_block_is_trained_as_if_it_were_alone(cascade: Config, corpus: Corpus):
    alone = BlockTrainer(cascade, 0, corpus, CPU, None)
    alone.train(quiet)
    assert_equal(weights_of(train_in_lockstep(cascade, corpus, CPU, stale=5)[0]), weights_of(alone))


class History:
    """Block 0 as it stood at the end of the round before the step its reader is at."""

    def __init__(self, stale: int) -> None:
        self.stale = stale
        self.weights_at: dict[int, dict[str, Tensor]] = {}
        self.reader: BlockTrainer | None = None

    def version(self, block: int) -> int:
        assert self.reader
        return self.reader.step // self.stale * self.stale

    def weights(self, block: int) -> Mapping[str, Tensor]:
        return self.weights_at[self.version(block)]


def test_a_block_trains_on_what_was_published_at_the_end_of_the_round_before(
    cascade: Config, corpus: Corpus
):
    """The same by hand: block 0 first, its versions kept; then block 1, shown one per round."""
    together = train_in_lockstep(cascade, corpus, CPU, stale=4)
    history = History(stale=4)
    first = BlockTrainer(cascade, 0, corpus, CPU, None)
    for step in (0, 4, 8, 12):
        first.train(quiet, until=step)
        named = first.module.named_parameters()
        history.weights_at[step] = {name: p.detach().clone() for name, p in named}
    config = cascade.with_settings(objective__refresh_every=4)
    second = history.reader = BlockTrainer(config, 1, corpus, CPU, None, history)
    second.train(quiet)
    assert_equal(weights_of(together[1]), weights_of(second))


def test_every_round_is_built_on_the_round_before(cascade: Config, corpus: Corpus, tmp_path: Path):
    """Read from the checkpoints of block 1 while block 0 makes its next round."""
    config = cascade.with_settings(
        train__steps=40, train__batch=2, train__save_every=10, model__blocks=2
    )
    run = RunDir.create(tmp_path / "run", config)
    built_on = {}

    def read(progress: Progress) -> None:
        snapshot = run.block(1).load_snapshot()
        if progress.block == 0 and snapshot:
            built_on[snapshot.step] = snapshot.counters["built_on"]

    trainers = train_in_lockstep(config, corpus, CPU, run, stale=10, on_progress=read)
    assert built_on == {10: [0], 20: [10], 30: [20]}
    assert trainers[1].predecessors
    assert trainers[1].predecessors.versions == [30]
    assert trainers[0].predecessors is None


def test_all_blocks_before_are_equally_old(cascade: Config, corpus: Corpus):
    config = cascade.with_settings(model__layers=3, model__blocks=3, train__batch=2)
    trainers = train_in_lockstep(config, corpus, CPU, stale=5)
    assert trainers[2].predecessors
    assert trainers[2].predecessors.versions == [10, 10]  # the last round makes steps 10 and 11
    assert [trainer.step for trainer in trainers] == [12] * 3


def test_a_share_is_a_share_of_the_steps_with_the_whole_schedule(cascade: Config, corpus: Corpus):
    reports: list[Progress] = []
    trainers = train_in_lockstep(
        cascade, corpus, CPU, stale=4, shares=[1.0, 0.25], on_progress=reports.append
    )
    assert [trainer.step for trainer in trainers] == [12, 3]
    last = {report.block: report for report in reports}
    assert (last[1].step, last[1].steps) == (3, 3)
    settings = trainers[1].config.train
    assert last[1].lr == settings.learning_rate(2)
    assert trainers[1].predecessors
    assert trainers[1].predecessors.versions == [8]  # one step a round, the last after two rounds


class Watch:
    """Of a lockstep while it runs: what each block saw of the others at each of its steps, and
    where these stood when the round began."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began: dict[int, int] = {}  # block: its step at the start of the round
        self.seen: dict[tuple[int, int], list[int | None]] = {}  # (block, step): versions
        self.published: dict[tuple[int, int], list[int]] = {}
        train, train_step = BlockTrainer.train, BlockTrainer.train_step

        def watched_train(trainer: BlockTrainer, *arguments: Any, **named: Any) -> bool:
            self.began[trainer.block] = trainer.step
            return train(trainer, *arguments, **named)

        def watched_step(trainer: BlockTrainer, position: int | None = None) -> None:
            at = trainer.block, trainer.step
            train_step(trainer, position)
            if trainer.predecessors:
                self.seen[at] = list(trainer.predecessors.versions)
                self.published[at] = [self.began[block] for block in range(trainer.block)]

        monkeypatch.setattr(BlockTrainer, "train", watched_train)
        monkeypatch.setattr(BlockTrainer, "train_step", watched_step)


def test_with_a_lead_a_block_begins_later_and_ends_on_finished_ones(
    cascade: Config, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
):
    watch = Watch(monkeypatch)
    config = cascade.with_settings(objective__lead=0.5)
    trainers = train_in_lockstep(config, corpus, CPU, stale=4)
    versions = [watch.seen[1, step] for step in range(12)]
    assert versions == [[4]] * 2 + [[8]] * 4 + [[12]] * 6
    assert [trainer.step for trainer in trainers] == [12, 12]


def test_a_block_that_begins_last_is_trained_as_if_in_turn(cascade: Config, corpus: Corpus):
    config = cascade.with_settings(objective__lead=1.0)
    together = train_in_lockstep(config, corpus, CPU, stale=4)
    board = Board()
    for block in range(2):
        trainer = BlockTrainer(config, block, corpus, CPU, None, board)
        trainer.train(quiet)
        board.publish(trainer)
        assert_equal(weights_of(together[block]), weights_of(trainer))


def test_a_round_of_a_slow_block_ends_with_the_others_round(
    cascade: Config, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
):
    """A quarter of 10 steps is 2.5: rounds of 2, 3 and 3 steps."""
    config = cascade.with_settings(train__steps=30, train__batch=2)
    watch = Watch(monkeypatch)
    train_in_lockstep(config, corpus, CPU, stale=10, shares=[1.0, 0.25])
    wanted = [0, 0, 10, 10, 10, 20, 20, 20]
    assert watch.seen == {(1, step): [version] for step, version in enumerate(wanted)}


@pytest.mark.parametrize("cache", ["off", "ram"])
@pytest.mark.parametrize("stale", [1, 3, 7, 50])
@pytest.mark.parametrize(
    "shares", [(1.0, 1.0, 1.0), (1.0, 0.25, 0.6), (0.1, 1.0, 0.35), (0.5, 0.75, 0.15)]
)
def test_no_block_is_ever_seen_more_than_a_round_late(
    cascade: Config, corpus: Corpus, monkeypatch: pytest.MonkeyPatch,
    cache: str, stale: int, shares: Sequence[float],
):  # fmt: skip
    config = cascade.with_settings(
        model__layers=3, model__blocks=3, model__width=8, model__heads=1, model__window=8,
        train__steps=20, train__batch=1, objective__feature_cache=cache,
    )  # fmt: skip
    watch = Watch(monkeypatch)
    trainers = train_in_lockstep(config, corpus, CPU, stale=stale, shares=shares)
    assert len(watch.seen) == trainers[1].step + trainers[2].step
    assert watch.seen == watch.published


def test_a_slow_blocks_learning_rate_falls_as_far_as_the_others(cascade: Config, corpus: Corpus):
    config = cascade.with_settings(train__steps=80, train__batch=2, model__window=8)
    rates: dict[int, list[float]] = {0: [], 1: []}
    train_in_lockstep(
        config, corpus, CPU, stale=8, shares=[1.0, 0.25],
        on_progress=lambda progress: rates[progress.block].append(progress.lr),
    )  # fmt: skip
    floor = config.train.lr * config.train.lr_floor
    assert rates[0][-1] == pytest.approx(floor, rel=0.1)
    assert rates[1][-1] == pytest.approx(floor, rel=0.2)  # 20 steps end less finely than 80


def test_a_slow_block_still_publishes_in_the_first_round(cascade: Config, corpus: Corpus):
    """A share of a round that is less than a step: one is made, and the next block sees it."""
    trainers = train_in_lockstep(cascade, corpus, CPU, stale=2, shares=[0.1, 1.0])
    assert [trainer.step for trainer in trainers] == [1, 12]
    assert trainers[1].predecessors
    assert trainers[1].predecessors.versions == [1]


@pytest.mark.parametrize("shares", [[1.0], [1.0, 1.0, 1.0], [1.0, 0.0], [1.0, -0.5], [1.5, 1.0]])
def test_wrong_shares_are_refused(cascade: Config, corpus: Corpus, shares: Sequence[float]):
    with pytest.raises(ConfigError, match="shares must be 2 numbers"):
        train_in_lockstep(cascade, corpus, CPU, stale=4, shares=shares)


def test_a_board_keeps_copies(cascade: Config, corpus: Corpus):
    board = Board()
    trainer = BlockTrainer(cascade, 0, corpus, CPU, None)
    trainer.train(quiet, until=3)
    assert board.version(0) is None
    board.publish(trainer)
    held = weights_of(trainer)
    trainer.train(quiet, until=6)
    assert board.version(0) == 3
    assert_equal({name: weight.numpy() for name, weight in board.weights(0).items()}, held)
    assert (trainer.weights()["head.weight"] != held["head.weight"]).any()


def test_a_run_directory_holds_what_was_trained(cascade: Config, corpus: Corpus, tmp_path: Path):
    run = RunDir.create(tmp_path / "run", cascade)
    trainers = train_in_lockstep(cascade, corpus, CPU, run, stale=4, shares=[1.0, 0.5])
    assert [run.block(block).current().step for block in range(2)] == [12, 6]
    windows = evaluation_windows(corpus.splits["valid"], 32, 8)
    loaded = evaluate(load_stack(RunDir.open(run.path), CPU), windows)
    held = evaluate(assemble(cascade, [trainer.module for trainer in trainers]), windows)
    assert loaded == held


class KilledError(Exception):
    pass


def test_an_interrupted_lockstep_starts_over(cascade: Config, corpus: Corpus, tmp_path: Path):
    """Killed in the second round, when block 1 has not saved as far as block 0."""
    config = cascade.with_settings(train__steps=20)
    straight = train_in_lockstep(config, corpus, CPU, stale=8)
    run = RunDir.create(tmp_path / "run", config)

    def kill(progress: Progress) -> None:
        if (progress.block, progress.step) == (1, 10):
            raise KilledError

    with pytest.raises(KilledError):
        train_in_lockstep(config, corpus, CPU, run, stale=8, on_progress=kill)
    assert [run.block(block).current().step for block in range(2)] == [15, 5]
    for _ in range(2):  # a finished one too
        again = train_in_lockstep(config, corpus, CPU, run, stale=8)
        for block in range(2):
            assert_equal(weights_of(straight[block]), weights_of(again[block]))
            assert_equal(run.block(block).load_weights(), weights_of(again[block]))
            lines = run.block(block).metrics_path.read_text().splitlines()
            assert [json.loads(line)["step"] for line in lines] == [10, 20]


def test_a_warm_start_is_seen_in_the_first_round(cascade: Config, corpus: Corpus, tmp_path: Path):
    """One round alone: block 1 trains on the other run's block 0, as a worker apart does."""
    old = RunDir.create(tmp_path / "old", cascade)
    for block in range(2):
        BlockTrainer(cascade, block, corpus, CPU, old.block(block), PublishedRun(old)).train(quiet)
    tuned = cascade.with_settings(train__warm_start=str(old.path), train__steps=3)
    warm = PublishedRun(RunDir.create(tmp_path / "new", tuned))
    on_warm, on_seed = (BlockTrainer(tuned, 1, corpus, CPU, None, p) for p in (warm, Board()))
    on_warm.train(quiet)
    on_seed.train(quiet)
    together = train_in_lockstep(tuned, corpus, CPU, stale=3)[1]
    assert_equal(weights_of(together), weights_of(on_warm))
    assert (together.weights()["head.weight"] != on_seed.weights()["head.weight"]).any()
    assert together.predecessors
    assert together.predecessors.versions == [0]


def test_every_head_of_a_cascade_learns(cascade: Config, corpus: Corpus):
    config = cascade.with_settings(
        model__layers=3, model__blocks=3, train__steps=80, train__batch=8, train__lr=5e-3
    )
    windows = evaluation_windows(corpus.splits["valid"], 32, 32)
    before = {s.readout: s.ce for s in evaluate(untrained_stack(config), windows).scores}
    trainers = train_in_lockstep(config, corpus, CPU, stale=10)
    after = evaluate(assemble(config, [trainer.module for trainer in trainers]), windows)
    assert {s.readout for s in after.scores} == set(before)
    for score in after.scores:
        assert before[score.readout] == pytest.approx(math.log(256), abs=1e-3)
        assert score.ce < before[score.readout] - 2.0, score


@pytest.mark.parametrize("kind", ["denoise", "end_to_end"])
def test_blocks_that_read_no_others_are_trained_as_they_are_alone(
    config: Config, corpus: Corpus, kind: str
):
    config = config.with_settings(objective__kind=kind)
    for trainer in train_in_lockstep(config, corpus, CPU, stale=5):
        alone = BlockTrainer(config, trainer.block, corpus, CPU, None)
        alone.train(quiet)
        assert_equal(weights_of(trainer), weights_of(alone))
