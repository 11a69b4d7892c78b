import threading
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from blocktrain.config import Config
from blocktrain.data.corpus import Corpus
from blocktrain.errors import DeviceError, DivergedError, ProtocolError
from blocktrain.protocol.messages import Blob, Lease, LeaseProgress, Predecessor
from blocktrain.storage import tensor_file
from blocktrain.storage.tensor_file import Tensors
from blocktrain.training.device import resolve
from blocktrain.training.trainer import BlockTrainer
from blocktrain.worker.lease_trainer import LeaseTrainer, load_moments

CPU = resolve("cpu", "fp32")
BLOB = Blob(name="0" * 64, size=1)
ODD_CUTS = (3, 1, 6, 2)  # 12 steps


def lease(block: int, first: int, steps: int, **changes: object) -> Lease:
    fields = {"schedule_start": first, "schedule_stride": 1, "predecessors": (), **changes}
    return Lease(
        lease="lease000", fence=1, block=block, base_version=0, base=BLOB,
        first_batch=first, steps=steps, seconds_left=60.0, **fields,
    )  # fmt: skip


def leases(block: int, **changes: object) -> list[Lease]:
    firsts = np.cumsum((0, *ODD_CUTS[:-1])).tolist()
    pairs = zip(firsts, ODD_CUTS, strict=True)
    return [lease(block, first, steps, **changes) for first, steps in pairs]


def none_before(predecessor: Predecessor) -> Tensors:
    raise AssertionError("this block reads no other")


def never() -> bool:
    return False


def quiet(report: LeaseProgress) -> None:
    pass


def copied(weights: Tensors) -> Tensors:
    return {name: array.copy() for name, array in weights.items()}


def assert_equal(a: Tensors, b: Tensors) -> None:
    assert a.keys() == b.keys()
    for name, array in a.items():
        assert np.array_equal(array, b[name]), name


def initial(config: Config, block: int, corpus: Corpus, published: object = None) -> Tensors:
    return copied(BlockTrainer(config, block, corpus, CPU, None, published).weights())


@pytest.mark.parametrize("kind", ["denoise", "end_to_end"])
@pytest.mark.parametrize("held", [True, False])
def test_leases_in_order_are_the_block_trained_in_one_go(
    config: Config, corpus: Corpus, tmp_path: Path, kind: str, held: bool
):
    """Whether the block stays in place between leases, or comes back from the coordinator."""
    config = config.with_settings(objective__kind=kind, model__dropout=0.1)
    straight = BlockTrainer(config, 0, corpus, CPU, None)
    straight.train(lambda progress: None)

    trainer = LeaseTrainer(config, 0, corpus, CPU, tmp_path)
    base: Tensors | None = initial(config, 0, corpus)
    for given in leases(0):
        trained = trainer.run(given, base, none_before, quiet, never)
        assert trained is not None
        base = None if held else copied(trained.weights)
    assert_equal(straight.weights(), trained.weights)


def test_two_at_once_do_not_disturb_each_other(config: Config, corpus: Corpus, tmp_path: Path):
    """They share torch's generator, from which the noise of a step is drawn."""
    ended: dict[int, Tensors] = {}
    first = [initial(config, block, corpus) for block in (0, 1)]

    def train(block: int) -> None:
        trainer = LeaseTrainer(config, block, corpus, CPU, tmp_path)
        trained = trainer.run(lease(block, 0, 12), first[block], none_before, quiet, never)
        assert trained is not None
        ended[block] = trained.weights

    threads = [threading.Thread(target=train, args=(block,)) for block in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for block in (0, 1):
        straight = BlockTrainer(config, block, corpus, CPU, None)
        straight.train(lambda progress: None)
        assert_equal(straight.weights(), ended[block])


class Fixed:
    """Weights of the block before that never change, as a local run and as a lease sees them."""

    def __init__(self, config: Config, corpus: Corpus) -> None:
        before = BlockTrainer(config.with_settings(train__seed=7), 0, corpus, CPU, None)
        before.train(lambda progress: None)
        self.arrays = copied(before.weights())
        self.tensors = {name: p.detach() for name, p in before.module.named_parameters()}

    def version(self, block: int) -> int:
        return 1

    def weights(self, block: int) -> dict[str, Tensor]:
        return self.tensors


@pytest.mark.parametrize("cache", ["off", "ram", "disk"])
def test_a_cascades_block_is_the_same_over_its_leases(
    config: Config, corpus: Corpus, tmp_path: Path, cache: str
):
    config = config.with_settings(
        objective__kind="cascade", objective__tail=1, objective__refresh_every=5,
        objective__feature_cache=cache,
    )  # fmt: skip
    fixed = Fixed(config, corpus)
    straight = BlockTrainer(config, 1, corpus, CPU, None, fixed, tmp_path)
    base: Tensors | None = copied(straight.weights())
    straight.train(lambda progress: None)

    asked: list[int] = []

    def weights_of(predecessor: Predecessor) -> Tensors:
        asked.append(predecessor.version)
        return fixed.arrays

    trainer = LeaseTrainer(config, 1, corpus, CPU, tmp_path)
    named = (Predecessor(block=0, version=0, weights=BLOB),)
    for given in leases(1, predecessors=named):
        trained = trainer.run(given, base, weights_of, quiet, never)
        assert trained is not None
        base = None
    assert_equal(straight.weights(), trained.weights)
    assert set(asked) == {0}
    assert not list(tmp_path.iterdir())


def test_predecessors_are_those_of_each_lease(config: Config, corpus: Corpus, tmp_path: Path):
    """A later lease that goes back to earlier batches, with newer blocks before."""
    config = config.with_settings(objective__kind="cascade", objective__tail=1)
    fixed = Fixed(config, corpus)
    asked: list[int] = []

    def weights_of(predecessor: Predecessor) -> Tensors:
        asked.append(predecessor.version)
        return fixed.arrays

    trainer = LeaseTrainer(config, 1, corpus, CPU, tmp_path)
    base = initial(config, 1, corpus, fixed)
    for version, first in ((4, 6), (5, 0)):
        named = (Predecessor(block=0, version=version, weights=BLOB),)
        trainer.run(lease(1, first, 2, predecessors=named), base, weights_of, quiet, never)
    assert asked == [4, 5]
    with pytest.raises(ProtocolError, match="names no version of block 0"):
        trainer.run(lease(1, 0, 2), base, weights_of, quiet, never)


def test_moments_stay_when_the_weights_are_replaced(config: Config, corpus: Corpus, tmp_path: Path):
    trainer = LeaseTrainer(config, 0, corpus, CPU, tmp_path)
    start = initial(config, 0, corpus)
    trainer.run(lease(0, 0, 4), start, none_before, quiet, never)
    warm = trainer.run(lease(0, 4, 1), start, none_before, quiet, never)
    fresh = LeaseTrainer(config, 0, corpus, CPU, tmp_path)
    cold = fresh.run(lease(0, 4, 1), start, none_before, quiet, never)
    assert warm is not None and cold is not None
    assert warm.loss == cold.loss  # the same weights on the same batch
    assert not np.array_equal(warm.weights["embed.weight"], cold.weights["embed.weight"])


def test_the_learning_rate_follows_the_schedule_not_the_batch(
    config: Config, corpus: Corpus, tmp_path: Path
):
    by_hand = BlockTrainer(config, 0, corpus, CPU, None)
    by_hand.step = 9
    for position in (2, 6, 10):
        by_hand.train_step(position)
        rate = float(by_hand.optimizer.param_groups[0]["lr"])
        assert rate == pytest.approx(config.train.learning_rate(position), rel=1e-6)

    trainer = LeaseTrainer(config, 0, corpus, CPU, tmp_path)
    given = lease(0, 9, 3, schedule_start=2, schedule_stride=4)
    trained = trainer.run(given, initial(config, 0, corpus), none_before, quiet, never)
    assert trained is not None
    assert_equal(by_hand.weights(), trained.weights)


def test_reports_count_steps_and_average_the_loss(config: Config, corpus: Corpus, tmp_path: Path):
    trainer = LeaseTrainer(config, 0, corpus, CPU, tmp_path)
    reports: list[LeaseProgress] = []
    trained = trainer.run(
        lease(0, 0, 4), initial(config, 0, corpus), none_before, reports.append, never
    )
    assert trained is not None
    assert [report.steps_done for report in reports] == [1, 2, 3, 4]
    assert reports[-1].loss == trained.loss
    assert 4.0 < trained.loss < 7.0


def test_a_stopped_lease_has_no_result(config: Config, corpus: Corpus, tmp_path: Path):
    trainer = LeaseTrainer(config, 0, corpus, CPU, tmp_path)
    stops = chain([False, False], repeat(True))
    reports: list[LeaseProgress] = []
    assert not trainer.run(
        lease(0, 0, 9), initial(config, 0, corpus), none_before, reports.append, stops.__next__
    )
    assert len(reports) == 2


def test_training_that_is_not_finite_is_refused(config: Config, corpus: Corpus, tmp_path: Path):
    """A lease shorter than max_skipped, of which no step landed."""
    trainer = LeaseTrainer(config, 0, corpus, CPU, tmp_path)
    base = initial(config, 0, corpus)
    base["embed.weight"] = np.full_like(base["embed.weight"], np.nan)
    with pytest.raises(DivergedError, match="every step from 4 to 6"):
        trainer.run(lease(0, 4, 3), base, none_before, quiet, never)
    with pytest.raises(DivergedError, match="20 steps in a row"):
        trainer.run(lease(0, 0, 30), base, none_before, quiet, never)


def test_a_worker_that_comes_back_to_a_block_has_its_moments(
    config: Config, corpus: Corpus, tmp_path: Path
):
    """Put away after a lease and taken up by a new trainer: bit for bit as if it had stayed."""
    straight = BlockTrainer(config, 0, corpus, CPU, None)
    straight.train(lambda progress: None)
    base = initial(config, 0, corpus)
    for given in leases(0):
        trainer = LeaseTrainer(config, 0, corpus, CPU, tmp_path)
        trained = trainer.run(given, base, none_before, quiet, never)
        assert trained is not None
        base = copied(trained.weights)
        trainer.put_away()
    assert_equal(straight.weights(), base)


def test_moments_of_another_shape_or_in_a_broken_file_are_ignored(tmp_path: Path):
    path = tmp_path / "moments.safetensors"
    shapes = {"w.momentum": (2, 3), "b.step": (), "b.exp_avg": (3,), "b.exp_avg_sq": (3,)}
    assert load_moments(path, shapes) is None
    moments = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    path.write_bytes(b"".join(tensor_file.encode(moments)))
    assert load_moments(path, shapes) is not None
    assert load_moments(path, {**shapes, "w.momentum": (3, 3)}) is None
    assert load_moments(path, {**shapes, "v.momentum": (2, 3)}) is None
    assert load_moments(path, {name: shapes[name] for name in list(shapes)[1:]}) is None
    path.write_bytes(b"half a fi")
    assert load_moments(path, shapes) is None


def test_moments_are_forgotten_for_good(config: Config, corpus: Corpus, tmp_path: Path):
    trainer = LeaseTrainer(config, 0, corpus, CPU, tmp_path)
    trainer.run(lease(0, 0, 2), initial(config, 0, corpus), none_before, quiet, never)
    trainer.put_away()
    assert list(tmp_path.iterdir())
    trainer.forget()
    assert not list(tmp_path.iterdir())


def test_a_failed_allocation_says_what_to_do(config: Config, corpus: Corpus, tmp_path: Path):
    trainer = LeaseTrainer(config, 0, corpus, CPU, tmp_path)

    def allocate(report: LeaseProgress) -> None:
        torch.empty(1 << 50)

    base = initial(config, 0, corpus)
    with pytest.raises(DeviceError, match="cpu has too little memory for block 0; set --memory"):
        trainer.run(lease(0, 0, 2), base, none_before, allocate, never)
