import math

import numpy as np
import pytest
import torch
from tests.support.models import awake_stack

from blocktrain.config import Config
from blocktrain.core import readout
from blocktrain.core.seeds import mixed_seed
from blocktrain.data.windows import shifted
from blocktrain.train.evaluate import Evaluation, Score, evaluate, fit_product_weights, solo_ce

WINDOWS = np.random.default_rng(0).integers(97, 123, (6, 32)).astype(np.uint8)


def found(evaluation: Evaluation, start: str, name: str, draws: int = 1) -> Score:
    wanted = (start, name, draws)
    return next(s for s in evaluation.scores if (s.start, s.readout, s.draws) == wanted)


def test_scores_are_the_mean_negative_log_likelihood(config: Config):
    stack = awake_stack(config)
    evaluation = evaluate(stack, WINDOWS, draws=3, seed=4)
    ids, targets = torch.tensor(shifted(WINDOWS)).long(), torch.tensor(WINDOWS).long()[..., None]

    def ce(log_probs: torch.Tensor) -> float:
        return float(-log_probs.gather(-1, targets).mean())

    mean = stack.log_probs(ids)
    assert found(evaluation, "mean", "product").ce == pytest.approx(
        ce(readout.product(mean)), rel=1e-5
    )
    assert found(evaluation, "mean", "block 0").ce == pytest.approx(ce(mean[0]), rel=1e-5)
    assert found(evaluation, "mean", "final").ce == pytest.approx(ce(mean[-1]), rel=1e-5)
    seeds = [mixed_seed(4, draw, 0) for draw in range(3)]
    draws = [readout.product(stack.log_probs(ids, "noise", seed)) for seed in seeds]
    assert found(evaluation, "noise", "product").ce == pytest.approx(ce(draws[0]), rel=1e-5)
    mixture = ce(torch.stack([draw.exp() for draw in draws]).mean(dim=0).log())
    assert found(evaluation, "noise", "product", 3).ce == pytest.approx(mixture, rel=1e-5)
    assert mixture <= sum(map(ce, draws)) / 3


def test_units_agree(config: Config):
    score = evaluate(awake_stack(config), WINDOWS, draws=1).default
    assert (score.start, score.readout) == ("mean", "product")
    assert score.perplexity == pytest.approx(math.exp(score.ce))
    assert score.bits_per_byte == pytest.approx(score.ce / math.log(2))


def test_the_digest_names_the_bytes_scored(config: Config):
    stack = awake_stack(config)
    digest = evaluate(stack, WINDOWS, draws=1).digest
    assert digest == evaluate(stack, WINDOWS.copy(), draws=1).digest
    assert digest != evaluate(stack, WINDOWS[:5], draws=1).digest
    assert digest != evaluate(stack, WINDOWS.reshape(12, 16), draws=1).digest


def test_batching_changes_no_score(config: Config, monkeypatch: pytest.MonkeyPatch):
    stack = awake_stack(config)
    whole = found(evaluate(stack, WINDOWS, draws=1), "mean", "product").ce
    monkeypatch.setattr("blocktrain.train.evaluate.POSITIONS_PER_BATCH", 64)
    assert found(evaluate(stack, WINDOWS, draws=1), "mean", "product").ce == pytest.approx(
        whole, rel=1e-5
    )


def test_solo_ce_is_block_0s_mean_reading(config: Config):
    stack = awake_stack(config)
    solo = solo_ce(config, 0, stack.blocks[0], WINDOWS)
    block_0 = found(evaluate(stack, WINDOWS, draws=1), "mean", "block 0").ce
    assert solo == pytest.approx(block_0, rel=1e-5)


def test_fitted_weights_are_at_least_as_good_where_they_were_fitted(config: Config):
    stack = awake_stack(config)
    weights = fit_product_weights(stack, WINDOWS.reshape(-1))
    evaluation = evaluate(stack, WINDOWS, draws=1, product_weights=weights)
    fitted = found(evaluation, "mean", "product fitted").ce
    assert fitted <= found(evaluation, "mean", "product").ce + 1e-6
