import numpy as np
import pytest
import torch

from blocktrain.config import BYTE_VOCABULARY, Config
from blocktrain.data.corpus import shifted
from blocktrain.model.stack import new_block
from blocktrain.training.objective import Denoise, NextToken, hide_context

TARGETS = np.random.default_rng(0).integers(0, 256, (64, 32)).astype(np.uint8)
CPU = torch.device("cpu")


def test_prepared_inputs_are_fixed_by_the_seed(config: Config):
    objective = Denoise(config, 0, CPU)
    first, again = objective.prepare(TARGETS, 5), objective.prepare(TARGETS, 5)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    other = objective.prepare(TARGETS, 6)
    assert not torch.equal(first.levels_BC, other.levels_BC)
    assert torch.equal(first.targets_BT, other.targets_BT)


@pytest.mark.parametrize("block", [0, 1])
def test_sigmas_come_from_the_blocks_training_range(config: Config, block: int):
    objective = Denoise(config, block, CPU)
    sigmas = objective.prepare(TARGETS, 1).levels_BC[:, -1]
    low, high = config.partition().train_range(block)
    assert low - 1e-5 <= sigmas.min()
    assert sigmas.max() <= high + 1e-5
    assert sigmas.max() - sigmas.min() > 0.3 * (high - low) * (block == 1)


def test_the_weighted_loss_is_near_the_ce_it_weights(config: Config):
    """Weights average to 1 over the range, so an untrained block's two numbers are close."""
    objective = Denoise(config, 1, CPU)
    torch.manual_seed(0)
    loss = objective.loss(new_block(config, 0), objective.prepare(TARGETS, 1))
    value = float(loss.value.detach())
    assert value == pytest.approx(float(loss.ce), rel=0.05)
    assert value != float(loss.ce)


def test_an_untrained_end_to_end_model_is_uniform(config: Config):
    objective = NextToken(config)
    module = new_block(config.with_settings(objective__kind="end_to_end"), 0)
    loss = objective.loss(module, objective.prepare(TARGETS, 1))
    assert float(loss.ce) == pytest.approx(np.log(256), abs=1e-4)


def test_hidden_context_starts_at_a_cut_and_spares_the_rest():
    clean = shifted(TARGETS)
    draws = np.random.Generator(np.random.Philox(0))
    hidden = hide_context(clean, draws, 0.5, BYTE_VOCABULARY)
    changed = hidden != clean
    touched = changed.any(axis=1)
    assert 0.3 < touched.mean() < 0.7
    assert (hidden[:, 0] == BYTE_VOCABULARY.bos).all()
    masked = (hidden == BYTE_VOCABULARY.mask).any(axis=1)
    assert 0 < masked.sum() < touched.sum()
    for row in hidden[masked]:
        first = int(np.argmax(row == BYTE_VOCABULARY.mask))
        assert (row[first:] == BYTE_VOCABULARY.mask).all()
        assert (row[:first] != BYTE_VOCABULARY.mask).all()
    wrong = hidden[touched & ~masked]
    assert ((wrong >= 0) & (wrong <= BYTE_VOCABULARY.bos)).all()


def test_no_share_hides_nothing():
    clean = shifted(TARGETS)
    assert hide_context(clean, np.random.default_rng(0), 0.0, BYTE_VOCABULARY) is clean
