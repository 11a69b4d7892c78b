"""The step as a CUDA graph; needs a CUDA device, and says so where there is none."""

import time

import pytest
import torch

from blocktrain.config import Config
from blocktrain.data.corpus import Corpus
from blocktrain.train.checkpoints import Progress
from blocktrain.train.device import resolve
from blocktrain.train.trainer import BlockTrainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def losses(config: Config, corpus: Corpus, steps: int = 12) -> list[float]:
    trainer = BlockTrainer(config, 0, corpus, resolve("cuda", "bf16"), None)
    trainer.module.train()
    found = []
    for _ in range(steps):
        trainer.train_step()
        found.append(float(trainer.last_loss))
    return found


@pytest.mark.parametrize("kind", ["denoise", "end_to_end"])
def test_a_replayed_step_is_the_step(config: Config, corpus: Corpus, kind: str):
    """Same noise, same dropout, same rate at every step, replayed or not."""
    config = config.with_settings(objective__kind=kind, model__dropout=0.1)
    replayed = losses(config, corpus)
    eager = losses(config.with_settings(train__cuda_graph=False), corpus)
    assert replayed == pytest.approx(eager, rel=1e-3)


def test_many_models_are_captured_in_one_process(config: Config, corpus: Corpus):
    for seed in range(8):
        found = losses(config.with_settings(train__seed=seed), corpus, steps=6)
        assert found[-1] < found[0]


def test_recomputed_layers_train_too(config: Config, corpus: Corpus):
    config = config.with_settings(train__checkpoint_layers=True)
    assert losses(config, corpus)[-1] < losses(config, corpus)[0]


def test_the_reported_rate_counts_the_device_s_time(config: Config, corpus: Corpus):
    """Steps are queued in no time; what counts is when the device is done with them."""
    config = config.with_settings(
        model__width=512, model__heads=8, model__window=256, train__batch=64, train__steps=60
    )
    trainer = BlockTrainer(config, 0, corpus, resolve("cuda", "bf16"), None)
    reports: list[Progress] = []
    started = time.perf_counter()
    trainer.train(reports.append)
    took = time.perf_counter() - started
    reported = sum(10 * 64 * 256 / report.bytes_per_s for report in reports)
    assert reported == pytest.approx(took, rel=0.1)
