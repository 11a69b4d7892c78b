"""Blocks that train one after another, and start as the tail of the block before."""

from pathlib import Path

import pytest
import torch
from tests.support.blobs import whole
from tests.support.coordinator import SetClock, join, running
from tests.support.published import Shelf
from tests.support.training import CPU, assert_equal, quiet, stop_after, weights_of

from blocktrain.config import Config
from blocktrain.data.corpus import Corpus
from blocktrain.errors import ConfigError
from blocktrain.model.block import CausalBlock
from blocktrain.storage.inheritance import inherited
from blocktrain.storage.run_dir import RunDir
from blocktrain.storage.tensor_file import decode, encode
from blocktrain.training.run_session import LocalRun
from blocktrain.training.trainer import BlockTrainer


@pytest.fixture
def relay(config: Config) -> Config:
    """Blocks of one, two and three layers, the first two with a tail of two."""
    return config.with_settings(
        objective__kind="cascade", objective__tail=2, objective__order="relay",
        model__layers=6, model__blocks=3, model__depths=[1, 2, 3], train__save_every=4,
    )  # fmt: skip


@pytest.mark.parametrize("layer", ["local", "llama"])
def test_an_heir_predicts_what_the_block_before_predicted(
    relay: Config, corpus: Corpus, layer: str
):
    """As many layers as the tail before take its place, and the rest changes nothing."""
    config, shelf = relay.with_settings(model__layer=layer), Shelf()
    ids = torch.randint(0, 256, (2, config.model.window))
    inputs: torch.Tensor = ids
    before: CausalBlock | None = None
    for index in range(3):
        trainer = BlockTrainer(config, index, corpus, CPU, None, shelf)
        trainer.restore()
        module = trainer.module
        assert isinstance(module, CausalBlock)
        if before is not None:
            expected = before.predict(before.private(inputs))
            assert float(expected.detach().abs().max()) > 0.01
            torch.testing.assert_close(module(inputs), expected)
        trainer.run(0, 6)
        shelf.put(index, trainer.step, module)
        before, inputs = module, module.features(inputs)


def test_one_schedule_spans_the_whole_relay(relay: Config):
    steps = relay.train.steps
    rates = [relay.learning_rate(block, step) for block in range(3) for step in range(steps)]
    whole_run = relay.with_settings(train__steps=3 * steps).train
    assert rates == [whole_run.learning_rate(step) for step in range(3 * steps)]


def test_a_relay_resumes_bit_for_bit_wherever_it_stops(
    relay: Config, corpus: Corpus, tmp_path: Path
):
    def session(name: str) -> LocalRun:
        return LocalRun(RunDir.create(tmp_path / name, relay), corpus, CPU)

    assert session("whole").train_in_turn([0, 1, 2], quiet, lambda: False)
    for steps in (5, 9, 13):  # within block 0, at a block's end, within the next block
        session("parts").train_in_turn([0, 1, 2], quiet, stop_after(steps))
    assert session("parts").train_in_turn([0, 1, 2], quiet, lambda: False)
    for block in range(3):
        whole_run, parts = (session(name).run.block(block) for name in ("whole", "parts"))
        assert_equal(whole_run.load_weights(), parts.load_weights())


def test_a_coordinator_opens_a_block_with_the_weights_a_trainer_would_inherit(
    relay: Config, corpus: Corpus, tmp_path: Path
):
    first = [weights_of(BlockTrainer(relay, b, corpus, CPU, None, Shelf())) for b in range(3)]
    settings = {
        "model__layers": 6, "model__blocks": 3, "model__depths": [1, 2, 3],
        "objective__kind": "cascade", "objective__tail": 2, "objective__order": "relay",
    }  # fmt: skip
    with running(tmp_path, SetClock(), weights=first, **settings) as service:
        worker = join(service)
        for _ in range(4):
            lease = worker.lease()
            assert lease.block == 0
            worker.send(worker.make(lease, by=0.25))
            service.merger.merge_due()
        lease = worker.lease()
        assert (lease.block, lease.base_version) == (1, 1)
        (before,) = lease.predecessors
        given = decode(whole(service.run.blobs, lease.base))
        expected = inherited(relay, 1, first[1], decode(whole(service.run.blobs, before.weights)))
        assert_equal(given, expected)
        assert b"".join(encode(expected)) == whole(service.run.blobs, lease.base)


def test_a_warm_start_and_an_inheritance_exclude_each_other(relay: Config):
    assert not relay.with_settings(train__warm_start="runs/other").inherits
    with pytest.raises(ConfigError, match=r"inherit = yes does not work with train\.warm_start"):
        relay.with_settings(train__warm_start="runs/other", objective__inherit="yes")
    with pytest.raises(ConfigError, match=r"relay needs objective\.kind = cascade"):
        relay.with_settings(objective__kind="denoise")
