"""Real training in virtual time: as on one machine, and only of updates that are merged."""

from typing import Any

import numpy as np
import pytest
from tests.support.scenarios import PLAIN
from tests.support.training import CPU, assert_equal, quiet, weights_of

from blocktrain.config import Config, build
from blocktrain.data.corpus import Corpus
from blocktrain.numerics.merge import caught_up
from blocktrain.simulate.learning import SimulatedLearning, VirtualTrainer
from blocktrain.simulate.report import Report
from blocktrain.simulate.scenario import Scenario
from blocktrain.simulate.simulation import new_coordinator, simulate
from blocktrain.simulate.virtual_block import VirtualBlock, VirtualLease
from blocktrain.training.trainer import BlockTrainer

# Workers differ, many leave without notice, and updates come late.
CHURN = {
    "train__steps": 60,
    "train__lr": 5e-3,
    "swarm__first_steps": 3,
    "swarm__lease_seconds": 4.0,
    "swarm__shortest_deadline": 6.0,
    "swarm__grace_seconds": 0.5,
    "simulate__workers": 6,
    "simulate__speed_spread": 0.5,
    "simulate__availability": 0.7,
    "simulate__goodbye_share": 0.2,
    "simulate__stay_seconds": 15.0,
    "simulate__sample_seconds": 10.0,
}


def scenario(config: Config, **settings: Any) -> Scenario:
    run = build(Scenario, config.to_dict())
    return run.with_settings(**{**PLAIN, **settings})


def new_learner(scene: Config, corpus: Corpus) -> SimulatedLearning:
    return SimulatedLearning(scene, corpus, CPU, windows=8)


def play(scene: Scenario, corpus: Corpus) -> tuple[Report, SimulatedLearning]:
    learner = new_learner(scene, corpus)
    return simulate(scene, new_coordinator(scene, learner)), learner


def lease(number: int, worker: str, block: VirtualBlock, first: int, steps: int = 4):
    return VirtualLease(f"{number:012}", worker, block, first, steps, block.version, 60.0)


def started(learner: SimulatedLearning, *leases: VirtualLease) -> tuple[VirtualLease, ...]:
    for given in leases:
        learner.started(given)
    return leases


def merge(learner: SimulatedLearning, *leases: VirtualLease) -> dict[str, np.ndarray]:
    """The next version of their block."""
    block = leases[0].block
    learner.merged(block, leases)
    block.version += 1
    return learner.versions[block.index].weights


@pytest.mark.parametrize("kind", ["denoise", "end_to_end"])
def test_with_one_worker_per_block_weights_are_those_of_one_machine_bit_for_bit(
    config: Config, corpus: Corpus, kind: str
):
    config = config.with_settings(objective__kind=kind, model__dropout=0.1)
    each = {"simulate__workers": config.block_count, "swarm__quorum": 1, "swarm__first_steps": 5}
    scene = scenario(config, **each)
    report, learner = play(scene, corpus)
    assert report.finished and report.participation == 1.0
    assert min(report.versions) > 1
    for block in range(config.block_count):
        alone = BlockTrainer(config, block, corpus, CPU, None)
        alone.train(quiet)
        assert_equal(learner.versions[block].weights, weights_of(alone))


def test_a_run_with_churn_learns_and_is_the_same_every_time(config: Config, corpus: Corpus):
    scene = scenario(config, **CHURN)
    (report, learner), (again, other) = play(scene, corpus), play(scene, corpus)
    assert report.finished
    assert report.leases_missed and sum(report.staleness.values()) > report.staleness[0]
    assert report == again
    for mine, its in zip(learner.versions, other.versions, strict=True):
        assert_equal(mine.weights, its.weights)
    scores = [sample.ce for sample in report.samples]
    assert report.ce == scores[-1] == learner.score()
    assert scores[0] is not None and report.ce is not None and report.ce < scores[0] - 1.0


def test_only_merged_updates_are_trained(
    config: Config, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
):
    trained: list[int] = []
    train = VirtualTrainer.train

    def counted(trainer: VirtualTrainer, lease: VirtualLease, *rest: Any) -> Any:
        trained.append(lease.steps)
        return train(trainer, lease, *rest)

    monkeypatch.setattr(VirtualTrainer, "train", counted)
    report, _ = play(scenario(config, **CHURN), corpus)
    assert sum(trained) == sum(report.merged_batches) == 120
    assert report.steps_trained > 121.0


def test_training_does_not_change_the_course_of_a_simulation(config: Config, corpus: Corpus):
    scene = scenario(config, **CHURN)
    played, (trained, _) = simulate(scene), play(scene, corpus)
    assert played.ce is None
    assert (played.events, played.staleness) == (trained.events, trained.staleness)


def test_blocks_of_a_cascade_build_on_those_before_as_they_stood(cascade: Config, corpus: Corpus):
    """A lease of block 1 that was claimed before a new version of block 0, and one after it."""

    def trained(*, before: bool) -> dict[str, np.ndarray]:
        learner = new_learner(cascade, corpus)
        first, second = VirtualBlock(0, 12), VirtualBlock(1, 12)
        moved = started(learner, lease(1, "a", first, 0))
        given = lease(2, "b", second, 0)
        if before:
            learner.started(given)
        merge(learner, *moved)
        if not before:
            learner.started(given)
        return merge(learner, given)

    untouched = new_learner(cascade, corpus)
    alone = merge(untouched, *started(untouched, lease(2, "b", VirtualBlock(1, 12), 0)))
    assert_equal(trained(before=True), alone)
    assert any(
        not np.array_equal(array, alone[name]) for name, array in trained(before=False).items()
    )


def test_a_late_update_counts_as_a_discounted_change_from_its_base(config: Config, corpus: Corpus):
    learner, block = new_learner(config, corpus), VirtualBlock(0, 12)
    start = learner.versions[0].weights
    early, late = started(learner, lease(1, "a", block, 0), lease(2, "b", block, 4))
    current = merge(learner, early)
    merged = merge(learner, late)
    other = new_learner(config, corpus)
    end = merge(other, *started(other, lease(2, "b", VirtualBlock(0, 12), 4)))
    share = config.swarm.late_discount
    for name, weights in merged.items():
        expected = caught_up(end[name], start[name], current[name], share)
        assert np.array_equal(weights, expected.astype(np.float32))


def test_updates_are_weighted_by_their_text_in_any_order(config: Config, corpus: Corpus):
    ends = []
    for first, steps in ((0, 3), (3, 1)):
        alone = new_learner(config, corpus)
        ends.append(merge(alone, *started(alone, lease(1, "a", VirtualBlock(0, 12), first, steps))))
    for backwards in (False, True):
        learner, block = new_learner(config, corpus), VirtualBlock(0, 12)
        pair = started(learner, lease(1, "a", block, 0, 3), lease(2, "b", block, 3, 1))
        merged = merge(learner, *(pair[::-1] if backwards else pair))
        for name, weights in merged.items():
            mean = (3.0 * ends[0][name].astype(float) + ends[1][name]) / 4.0
            assert np.array_equal(weights, mean.astype(np.float32))


def test_a_worker_that_left_starts_again_with_a_cold_optimizer(config: Config, corpus: Corpus):
    """Only for the block it had in memory: moments of other blocks are on disk."""

    def second_version(*, leaves: int | None, second: str) -> dict[str, np.ndarray]:
        learner, block = new_learner(config, corpus), VirtualBlock(0, 12)
        merge(learner, *started(learner, lease(1, "a", block, 0)))
        if leaves is not None:
            learner.lost_memory("a", leaves)
        return merge(learner, *started(learner, lease(2, second, block, 4)))

    warm = second_version(leaves=None, second="a")
    cold = second_version(leaves=0, second="a")
    assert_equal(cold, second_version(leaves=None, second="b"))
    assert_equal(warm, second_version(leaves=1, second="a"))
    assert any(not np.array_equal(array, cold[name]) for name, array in warm.items())


@pytest.mark.parametrize("codec", ["bf16", "sparse"])
def test_encoded_updates_are_merged_as_they_arrive(config: Config, corpus: Corpus, codec: str):
    settings = {**CHURN, "train__steps": 90, "simulate__availability": 1.0}
    whole, _ = play(scenario(config, **settings), corpus)
    packed, _ = play(scenario(config, **settings, swarm__codec=codec), corpus)
    assert (
        packed.virtual_seconds < whole.virtual_seconds
    )  # no worker waits for the version with its update
    assert packed.ce is not None and whole.ce is not None
    assert packed.ce != whole.ce
    first = packed.samples[0].ce
    assert first is not None and packed.ce < first - 0.1
    if codec == "bf16":
        assert packed.ce == pytest.approx(whole.ce, abs=0.05)
