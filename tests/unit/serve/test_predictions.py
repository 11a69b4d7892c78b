"""Tokens picked from distributions over few tokens and over many."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.serving import pick
from torch import Tensor

from blocktrain.numerics.sampling import CANDIDATES, Sampling, noise, truncate
from blocktrain.serve.ring.activations import Choice, Row
from blocktrain.serve.ring.batch import picks, predictions

LARGE = 5000
SIZES = st.sampled_from([256, LARGE])
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.integers(0, 300),
    top_p=st.floats(0.01, 1.0),
    seed=st.integers(0, 2**63 - 1),
)
DRAWS = 4000


def distributions(rows: int, seed: int, tokens: int = 256) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return (3.0 * torch.randn(rows, tokens, generator=draws)).log_softmax(dim=1)


def test_samples_follow_the_distribution():
    log_probs = np.full(256, -np.inf, np.float32)
    log_probs[[3, 77, 200]] = np.log([0.7, 0.2, 0.1])
    sampling = Sampling(1.0, seed=5)
    found = [pick(log_probs, sampling, position) for position in range(3000)]
    for byte, share in ((3, 0.7), (77, 0.2), (200, 0.1)):
        assert abs(found.count(byte) / 3000 - share) < 0.03


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (2.0, 0, 1.0), (1.0, 1000, 1.0), (2.0, 0, 0.9), (0.7, 50, 0.9)],
)
def test_samples_of_many_tokens_follow_the_distribution(
    temperature: float, top_k: int, top_p: float
):
    """A third of the probability, or more, lies behind the candidates; cut off there or before."""
    log_probs = (torch.randn(LARGE, generator=torch.Generator().manual_seed(1))).log_softmax(0)
    expected = (log_probs.double() / temperature).softmax(0)
    order = expected.argsort(descending=True)
    if top_k:
        expected[order[top_k:]] = 0.0
        expected /= expected.sum()
    before = expected[order].cumsum(0) - expected[order]
    expected[order[before > top_p]] = 0.0
    expected /= expected.sum()
    sampling = Sampling(temperature, top_k, top_p, seed=2)
    tokens = picks(log_probs.expand(DRAWS, -1), [sampling] * DRAWS, range(DRAWS))
    assert (expected[tokens] > 0).all()
    # In ten groups of about equal probability, by how likely the tokens are.
    groups = torch.zeros(LARGE, dtype=torch.long)
    groups[order] = (10 * (expected[order].cumsum(0) - expected[order])).long().clamp(max=9)
    shares = torch.bincount(groups, expected, minlength=10)
    counts = torch.bincount(groups[tokens], minlength=10)
    assert ((counts / DRAWS - shares).abs() < 4 * (shares * (1 - shares) / DRAWS).sqrt()).all()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(SAMPLINGS, st.integers(0, 10**6)), min_size=1, max_size=8),
    st.integers(0, 99),
    SIZES,
)
def test_rows_are_picked_as_each_would_be_alone(
    rules: list[tuple[Sampling, int]], seed: int, size: int
):
    log_probs = distributions(len(rules), seed, size)
    samplings, positions = zip(*rules, strict=True)
    alone = [pick(each.numpy(), *rule) for each, rule in zip(log_probs, rules, strict=True)]
    assert picks(log_probs, samplings, positions).tolist() == alone


def test_a_draft_agrees_with_its_check_where_the_distributions_do():
    """Distributions that differ by a hundredth: nearly all picks are the same. As in a language
    model, few tokens hold nearly all of the probability."""
    ours = (3.0 * distributions(500, 3, LARGE)).log_softmax(dim=1)
    theirs = (ours + 0.01 * distributions(500, 4, LARGE)).log_softmax(dim=1)
    samplings = [Sampling(1.0, seed=1)] * 500
    same = picks(ours, samplings, range(500)) == picks(theirs, samplings, range(500))
    assert same.mean() > 0.95


def test_the_noise_of_bytes_stays_what_it_was():
    """Sampled texts of byte models are the same in every release."""
    found = noise(7, 3, np.array([0, 1, 255]), 256)
    expected = [0.3765217838716622, 0.25206874261062934, -0.9114229965909219]
    np.testing.assert_allclose(found, expected)


@settings(max_examples=50, deadline=None)
@given(SAMPLINGS, st.integers(0, 99))
def test_what_is_left_out_is_never_picked_and_greedy_is_the_likeliest(
    sampling: Sampling, seed: int
):
    log_probs = distributions(1, seed)[0].numpy()
    byte = pick(log_probs, sampling, 0)
    if sampling.temperature == 0.0:
        assert byte == log_probs.argmax()
    else:
        order = np.argsort(-log_probs)
        count, _ = truncate(log_probs[order].astype(np.float64) / sampling.temperature, sampling)
        assert byte in order[:count]


@given(st.integers(1, 255), st.integers(0, 99))
def test_top_k_leaves_the_k_likeliest(count: int, seed: int):
    assert truncate(ranked(seed), Sampling(1.0, top_k=count)) == (count, -np.inf)


@given(st.floats(0.01, 0.99), st.integers(0, 99))
def test_top_p_leaves_the_fewest_likeliest_that_hold_the_share(share: float, seed: int):
    count, _ = truncate(ranked(seed), Sampling(1.0, top_p=share))
    sums = np.exp(ranked(seed)).cumsum()
    assert sums[count - 1] >= share - 1e-6
    assert count == 1 or sums[count - 2] <= share + 1e-6


@given(st.floats(0.01, 1.0), st.integers(0, 99))
def test_min_p_leaves_tokens_with_that_share_of_the_likeliest_ones_probability(
    share: float, seed: int
):
    count, _ = truncate(ranked(seed), Sampling(1.0, min_p=share))
    ratios = np.exp(ranked(seed) - ranked(seed)[0])
    assert ratios[count - 1] >= share - 1e-9
    assert count == 256 or ratios[count] <= share + 1e-9


def test_penalties_count_the_answer_and_the_guesses_before_each_position():
    """The answer is 5 5 6; the row ends it and guesses 7, then 5, then a mask."""
    log_probs = torch.zeros(4, 256)
    sampling = Sampling(frequency_penalty=1.0, presence_penalty=0.5, bias={9: 2.0, 5: 4.2})
    text, known = np.array([9, 9, 5, 5, 6, 7, 5, 257]), 4
    row = Row(1, known, text[known:], 4, Choice(sampling, answer_from=2))
    told = predictions(log_probs, [row], 0, [text])
    # 5 has 4.2 - 2.5 and 9 has 2.0; later 5 has a unit less.
    assert told.tokens_R.tolist() == [9, 9, 9, 9]
    more = Row(1, known, text[known:], 4, Choice(replace(sampling, bias={5: 4.6}), answer_from=2))
    assert predictions(log_probs, [more], 0, [text]).tokens_R.tolist() == [5, 5, 5, 5]
    less = Row(1, known, text[known:], 4, Choice(replace(sampling, bias={5: 3.0}), answer_from=2))
    picked = predictions(log_probs, [less], 0, [text]).tokens_R.tolist()
    assert picked[:2] == [5, 5] and 5 not in picked[2:]
    assert (told.log_probs_R == 0).all()  # the model's own


def ranked(seed: int) -> np.ndarray:
    return distributions(1, seed)[0].sort(descending=True).values.double().numpy()


def test_of_equals_none_is_left_out_alone():
    flat = np.zeros(256)
    assert truncate(flat, Sampling(1.0, top_k=3)) == (256, -np.inf)
    assert truncate(flat, Sampling(1.0, top_p=1e-9)) == (256, -np.inf)


def test_what_depends_on_tokens_behind_the_candidates_is_not_decided_without_them():
    scaled, half = ranked(0)[:CANDIDATES], np.log(0.5)
    assert truncate(scaled, Sampling(1.0, top_p=0.9), half) is None
    assert truncate(scaled, Sampling(1.0, top_k=CANDIDATES + 1), half) is None
    assert truncate(scaled, Sampling(1.0), half) == (CANDIDATES, half)
    assert truncate(scaled, Sampling(1.0, min_p=1e-9), half) is None
    assert truncate(scaled, Sampling(1.0, min_p=0.9), half)[1] == -np.inf


@given(SAMPLINGS, st.sampled_from([torch.nan, torch.inf, -torch.inf]), st.booleans(), SIZES)
def test_what_is_no_distribution_gives_some_token_and_changes_no_other(
    sampling: Sampling, bad: float, everywhere: bool, size: int
):
    sound = distributions(2, 1, size)
    broken = sound.clone()
    broken[0, slice(None) if everywhere else 7] = bad
    found = picks(broken, [sampling] * 2, [3, 4])
    assert 0 <= found[0] < size
    assert found[1] == pick(sound[1].numpy(), sampling, 4)


def test_predictions_tell_of_the_tokens_picked_of_those_that_follow_and_of_the_likeliest():
    log_probs = distributions(4, 0, LARGE)
    mask = LARGE + 1  # of which a model predicts nothing
    rows = [Row(1, 0, np.array([9, 5, 8, mask]), 3), Row(2, 0, np.array([4]), 1),
            Row(3, 0, np.array([4]), 0, Choice(top=2))]  # fmt: skip
    told = predictions(log_probs, rows, 2)
    best = log_probs.argmax(dim=1)
    assert told.tokens_R.tolist() == best.tolist()
    assert told.log_probs_R.tolist() == log_probs.max(dim=1).values.tolist()
    following = [8, best[1], best[2], best[3]]
    assert told.next_log_probs_R.tolist() == log_probs[range(4), following].tolist()
    top = log_probs.topk(2)
    assert told.top_tokens_RK.tolist() == top.indices.tolist()
    assert told.top_log_probs_RK.tolist() == top.values.tolist()
