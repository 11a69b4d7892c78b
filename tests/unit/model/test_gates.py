"""The gates an honest cross entropy must pass. They hold for every start, readout and kind."""

import math

import numpy as np
import pytest
import torch
from bench.lockstep import train_in_lockstep
from tests.support.models import awake_stack, leak, untrained_stack
from tests.support.serving import stepped

from blocktrain.config import Config
from blocktrain.data.corpus import Corpus, evaluation_windows, shifted
from blocktrain.model.stack import Stack, assemble, product
from blocktrain.training.device import resolve
from blocktrain.training.evaluate import evaluate
from blocktrain.training.trainer import BlockTrainer

UNIFORM = math.log(256)
KINDS = ["denoise", "cascade", "end_to_end"]
STARTS = ["mean", "noise"]


def of_kind(config: Config, kind: str) -> Config:
    return config.with_settings(objective__kind=kind, objective__tail=1)


def random_bytes() -> Corpus:
    random = np.random.default_rng(1).integers(0, 256, 60000).astype(np.uint8)
    return Corpus("random", {"train": random[:40000], "valid": random[40000:], "test": random}, {})


def changed_before(stack: Stack, start: str, position: int) -> bool:
    """Change the byte at `position`; did any prediction of it or of an earlier byte move?"""
    draws = np.random.default_rng(3)
    length = stack.config.model.window
    text = draws.integers(0, 256, (2, length)).astype(np.uint8)
    other = text.copy()
    other[:, position] ^= 0x55
    before = stack.log_probs(torch.tensor(shifted(text)).long(), start, seed=7)
    after = stack.log_probs(torch.tensor(shifted(other)).long(), start, seed=7)
    readings = [(product(before), product(after)), *zip(before, after, strict=True)]
    # The prediction of byte i stands at position i and may read bytes before i.
    return any(not torch.equal(a[:, : position + 1], b[:, : position + 1]) for a, b in readings)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("kind", KINDS)
def test_gate_1_no_prediction_reads_the_byte_it_predicts(config: Config, kind: str, start: str):
    stack = awake_stack(of_kind(config, kind))
    for position in (1, 5, 16, 30):
        assert not changed_before(stack, start, position)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("kind", KINDS)
def test_gate_1_catches_a_leaky_mask(config: Config, kind: str, start: str):
    assert changed_before(leak(awake_stack(of_kind(config, kind))), start, 16)


def test_later_predictions_do_read_the_byte(config: Config):
    stack = awake_stack(config)
    text = np.random.default_rng(3).integers(0, 256, (1, 32)).astype(np.uint8)
    other = text.copy()
    other[:, 5] ^= 0x55
    before = stack.log_probs(torch.tensor(shifted(text)).long())
    after = stack.log_probs(torch.tensor(shifted(other)).long())
    for a, b in zip(before, after, strict=True):
        assert not torch.equal(a[:, 6:], b[:, 6:])


@pytest.mark.parametrize("sigma_min", [1.0, 0.3])
def test_gate_2_random_bytes_cannot_be_predicted(config: Config, sigma_min: float):
    """Whatever the training loss says: with a leaking sigma_min it falls far below ln 256."""
    corpus = random_bytes()
    config = config.with_settings(
        objective__sigma_min=sigma_min, train__steps=40, train__batch=16, train__lr=5e-3
    )
    blocks, local = [], []
    for block in range(config.block_count):
        trainer = BlockTrainer(config, block, corpus, resolve("cpu", "fp32"), None)
        trainer.train(lambda progress: local.append(progress.ce))
        blocks.append(trainer.module)
    stack = assemble(config, blocks)
    evaluation = evaluate(stack, evaluation_windows(corpus.splits["valid"], 32), draws=2)
    assert {s.start for s in evaluation.scores} == set(STARTS)
    for score in evaluation.scores:
        assert score.ce >= UNIFORM - 0.01, score
    if sigma_min < 1:
        assert local[-1] < UNIFORM - 1.0


def test_gate_2_random_bytes_cannot_be_predicted_by_a_cascade(config: Config):
    """By no head of it, whatever the blocks before have memorised."""
    corpus = random_bytes()
    config = of_kind(config, "cascade").with_settings(
        train__steps=40, train__batch=16, train__lr=5e-3
    )
    trainers = train_in_lockstep(config, corpus, resolve("cpu", "fp32"), stale=10)
    stack = assemble(config, [trainer.module for trainer in trainers])
    evaluation = evaluate(stack, evaluation_windows(corpus.splits["valid"], 32))
    assert {s.readout for s in evaluation.scores} == {"block 0", "block 1", "final", "product"}
    for score in evaluation.scores:
        assert score.ce >= UNIFORM - 0.01, score


@pytest.mark.parametrize("kind", KINDS)
def test_gate_3_untrained_is_uniform(config: Config, kind: str):
    windows = np.random.default_rng(2).integers(32, 127, (8, 32)).astype(np.uint8)
    evaluation = evaluate(untrained_stack(of_kind(config, kind)), windows, draws=1)
    means = [s for s in evaluation.scores if s.start in ("mean", "none")]
    assert means
    for score in means:
        assert score.ce == pytest.approx(UNIFORM, abs=0.1)


@pytest.mark.parametrize("taps", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_gate_4_cached_steps_agree_with_whole_windows(config: Config, kind: str, taps: int):
    """A prompt of 9, a chunk of 4 on top of a filled cache, then single bytes; by every block."""
    stack = awake_stack(of_kind(config, kind).with_settings(model__taps=taps))
    windows = np.random.default_rng(4).integers(0, 256, (2, 24)).astype(np.uint8)
    ids = torch.tensor(shifted(windows)).long()
    for block, expected in enumerate(stack.log_probs(ids)):
        found = stepped(stack.first(block + 1), ids, [9, 4, *[1] * 11])
        assert np.abs(found - expected.numpy()).max() <= 1e-5


def test_training_pass_agrees_with_context_then_denoise(config: Config):
    """The fused two-stream pass and the two passes of inference are one function."""
    from blocktrain.model.denoising import NoiseLevel
    from blocktrain.numerics.noise import precondition

    stack = awake_stack(config)
    torch.manual_seed(5)
    ids = torch.randint(0, 256, (3, 20))
    z = torch.randn(3, 20, config.objective.target_dim)
    level = NoiseLevel.of(torch.tensor([precondition(s, 0.5) for s in (1.0, 3.0, 9.0)]))
    for block in stack.blocks:
        fused = block(ids, z, level, stack.table_VE)
        context, modulations = block.read_context(ids), block.modulations(level)
        answer = block.denoise(context, z, level, stack.table_VE, modulations)
        apart = block.logits(answer, level, stack.table_VE)
        assert (fused - apart).abs().max() <= 1e-4
