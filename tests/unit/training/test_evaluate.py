import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.models import awake_block, awake_stack
from tests.support.serving import of_kind

from blocktrain.config import Config, Vocabulary
from blocktrain.data.corpus import shifted
from blocktrain.model.stack import Stack, assemble, new_block, product
from blocktrain.numerics.sampling import Sampling, mixed_seed
from blocktrain.serve.router.first_block import generate
from blocktrain.training.evaluate import (
    Evaluation,
    ModelScore,
    evaluate,
    fit_product_weights,
    solo_ce,
)

WINDOWS = np.random.default_rng(0).integers(97, 123, (6, 32)).astype(np.uint8)


def found(evaluation: Evaluation, start: str, name: str, draws: int = 1) -> ModelScore:
    wanted = (start, name, draws)
    return next(s for s in evaluation.scores if (s.start, s.readout, s.draws) == wanted)


def test_scores_are_the_mean_negative_log_likelihood(config: Config):
    stack = awake_stack(config)
    evaluation = evaluate(stack, WINDOWS, draws=3, seed=4)
    ids, targets = torch.tensor(shifted(WINDOWS)).long(), torch.tensor(WINDOWS).long()[..., None]

    def ce(log_probs: torch.Tensor) -> float:
        return float(-log_probs.gather(-1, targets).mean())

    mean = stack.log_probs(ids)
    assert found(evaluation, "mean", "product").ce == pytest.approx(ce(product(mean)), rel=1e-5)
    assert found(evaluation, "mean", "block 0").ce == pytest.approx(ce(mean[0]), rel=1e-5)
    assert found(evaluation, "mean", "final").ce == pytest.approx(ce(mean[-1]), rel=1e-5)
    seeds = [mixed_seed(4, draw, 0) for draw in range(3)]
    draws = [product(stack.log_probs(ids, "noise", seed)) for seed in seeds]
    assert found(evaluation, "noise", "product").ce == pytest.approx(ce(draws[0]), rel=1e-5)
    mixture = ce(torch.stack([draw.exp() for draw in draws]).mean(dim=0).log())
    assert found(evaluation, "noise", "product", 3).ce == pytest.approx(mixture, rel=1e-5)
    assert mixture <= sum(map(ce, draws)) / 3


def test_whoever_waits_is_told_of_every_window(config: Config):
    scored: list[int] = []
    evaluate(awake_stack(config), WINDOWS, draws=0, on_scored=scored.append)
    assert sum(scored) == len(WINDOWS)


def test_units_agree(config: Config):
    score = evaluate(awake_stack(config), WINDOWS, draws=1).default
    assert (score.start, score.readout) == ("mean", "product")
    assert score.perplexity == pytest.approx(math.exp(score.ce))
    assert score.bits_per_byte == pytest.approx(score.ce / math.log(2))


def test_a_diverged_model_has_an_infinite_perplexity():
    assert ModelScore("mean", "final", ce=710.0).perplexity == math.inf


def test_the_digest_names_the_bytes_scored(config: Config):
    stack = awake_stack(config)
    digest = evaluate(stack, WINDOWS, draws=1).digest
    assert digest == evaluate(stack, WINDOWS.copy(), draws=1).digest
    assert digest != evaluate(stack, WINDOWS[:5], draws=1).digest
    assert digest != evaluate(stack, WINDOWS.reshape(12, 16), draws=1).digest


def test_batching_changes_no_score(config: Config, monkeypatch: pytest.MonkeyPatch):
    stack = awake_stack(config)
    whole = found(evaluate(stack, WINDOWS, draws=1), "mean", "product").ce
    monkeypatch.setattr("blocktrain.training.evaluate.POSITIONS_PER_BATCH", 64)
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


def test_a_cascade_is_read_at_every_head_from_no_start(cascade: Config):
    stack = awake_stack(cascade.with_settings(model__layers=3, model__blocks=3))
    evaluation = evaluate(stack, WINDOWS, draws=3)
    assert [(s.start, s.readout, s.draws) for s in evaluation.scores] == [
        ("none", name, 1) for name in ("block 0", "block 1", "block 2", "final", "product")
    ]
    assert found(evaluation, "none", "final").ce == found(evaluation, "none", "block 2").ce
    assert evaluation.default is found(evaluation, "none", "product")
    ids, targets = torch.tensor(shifted(WINDOWS)).long(), torch.tensor(WINDOWS).long()[..., None]
    log_probs = stack.log_probs(ids)
    for name, reading in [*zip(("block 0", "block 1", "block 2"), log_probs, strict=True),
                          ("product", product(log_probs))]:  # fmt: skip
        ce = float(-reading.gather(-1, targets).mean())
        assert found(evaluation, "none", name).ce == pytest.approx(ce, rel=1e-5)


def test_a_cascade_of_one_block_has_one_reading(cascade: Config):
    evaluation = evaluate(awake_stack(cascade.with_settings(model__blocks=1)), WINDOWS)
    assert [(s.start, s.readout) for s in evaluation.scores] == [("none", "final")]
    assert evaluation.default is evaluation.scores[0]


@pytest.mark.parametrize("kind", ["cascade", "denoise"])
def test_a_model_of_tokens_has_the_score_that_is_served_and_exported(config: Config, kind: str):
    vocab = Vocabulary("a" * 64, 256, bos=255, eos=(255,), mask=255)
    changed = of_kind(config, kind)
    stack = awake_stack(replace(changed, vocab=vocab))
    evaluation = evaluate(stack, WINDOWS, draws=1)
    start = "mean" if kind == "denoise" else "none"
    assert evaluation.default is found(evaluation, start, "final")
    ids = torch.tensor(shifted(WINDOWS, vocab)).long()[0, :8].tolist()
    made = {readout: list(generate(stack, ids, 20, Sampling(1.0, seed=3), readout=readout))
            for readout in (None, "final", "product")}  # fmt: skip
    assert made[None] == made["final"] != made["product"]


def test_a_cascades_product_can_be_fitted(cascade: Config):
    stack = awake_stack(cascade)
    weights = fit_product_weights(stack, WINDOWS.reshape(-1))
    evaluation = evaluate(stack, WINDOWS, product_weights=weights)
    fitted = found(evaluation, "none", "product fitted").ce
    assert fitted <= found(evaluation, "none", "product").ce + 1e-6


def with_heads(config: Config, difference: float) -> Stack:
    """A cascade whose second block hands features through unchanged: its untrained layers add
    nothing. Its head is block 0's, but for so much noise."""
    config = config.with_settings(objective__tail=0)
    first, second = awake_block(config, 0), new_block(config, 1)
    with torch.no_grad():
        second.head.weight.copy_(first.head.weight)
        second.head.weight.add_(difference * torch.randn_like(second.head.weight))
    return assemble(config, [first, second])


def test_a_draft_by_the_same_function_always_agrees(cascade: Config):
    stack = with_heads(cascade, difference=0.0)
    assert evaluate(stack, WINDOWS).draft_agreement == 1.0


def test_draft_agreement_is_the_share_of_equal_likeliest_bytes(cascade: Config):
    stack = with_heads(cascade, difference=0.02)
    first, final = stack.log_probs(torch.tensor(shifted(WINDOWS)).long())
    pairs = zip(first.flatten(0, 1).tolist(), final.flatten(0, 1).tolist(), strict=True)
    equal = [a.index(max(a)) == b.index(max(b)) for a, b in pairs]
    agreement = evaluate(stack, WINDOWS).draft_agreement
    assert agreement == sum(equal) / WINDOWS.size
    assert 0.1 < agreement < 0.9


def test_draft_agreement_is_the_same_in_small_batches(
    cascade: Config, monkeypatch: pytest.MonkeyPatch
):
    stack = with_heads(cascade, difference=0.02)
    whole = evaluate(stack, WINDOWS).draft_agreement
    monkeypatch.setattr("blocktrain.training.evaluate.POSITIONS_PER_BATCH", 64)
    assert evaluate(stack, WINDOWS).draft_agreement == whole


@pytest.mark.parametrize("kind", ["cascade", "denoise", "end_to_end"])
def test_one_block_drafts_for_nobody(cascade: Config, kind: str):
    stack = awake_stack(cascade.with_settings(objective__kind=kind, model__blocks=1))
    assert evaluate(stack, WINDOWS, draws=1).draft_agreement is None
