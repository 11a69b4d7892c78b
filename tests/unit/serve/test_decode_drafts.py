import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.serve.router.decode import (
    MAX_DRAFTS,
    Acceptance,
    TraversalCost,
    best_length,
    ngram_drafts,
)


def bytes_per_time(rate: float, cost: float, count: int) -> float:
    """The formula of the limit, for drafts that each cost something."""
    gained = count + 1 if rate == 1.0 else (1 - rate ** (count + 1)) / (1 - rate)
    return gained / (1 + count * cost)


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.integers(0, 50))
def test_no_other_number_of_drafts_gives_more_bytes_per_time(rate: float, cost: float, most: int):
    best = best_length(rate, cost, most)
    allowed = min(most, MAX_DRAFTS)
    assert 0 <= best <= allowed
    speed = bytes_per_time(rate, cost, best)
    assert all(bytes_per_time(rate, cost, n) <= speed + 1e-6 for n in range(allowed + 1))


def test_drafts_that_cost_as_much_as_they_save_are_not_made():
    assert best_length(0.9, TraversalCost(draft=1.0, traversal=1.0).draft_cost, 8) == 0
    assert best_length(0.9, TraversalCost(draft=0.001, traversal=1.0).draft_cost, 99) == MAX_DRAFTS
    assert TraversalCost().draft_cost > 0


@pytest.mark.parametrize(("drafted", "accepted", "limit"), [(8, 8, 1.0), (8, 0, 0.0), (8, 1, 0.5)])
def test_the_rate_approaches_the_observed_one(drafted: int, accepted: int, limit: float):
    seen = Acceptance()
    for _ in range(60):
        seen.update(drafted, accepted)
    assert seen.rate == pytest.approx(limit, abs=0.01)


def test_a_traversal_without_drafts_leaves_the_rate_alone():
    seen = Acceptance()
    before = seen.rate
    seen.update(0, 0)
    assert seen.rate == pytest.approx(before)


def test_a_repeat_goes_on_as_its_latest_like_did():
    text = b"the cat sat, the cat ran, the cat"
    assert ngram_drafts(text, 5, 4) == list(b" ran,")
    assert ngram_drafts(b"aaaaaaaa", 3, 4) == list(b"a")  # overlapping itself
    assert ngram_drafts(b"nothing like it", 5, 4) == ngram_drafts(b"", 5, 4) == []
    tokens = [7, 50_000, 3, 0xD800, 7, 50_000]
    assert ngram_drafts(tokens, 2, 2) == [3, 0xD800] and ngram_drafts(tokens, 2, 3) == []
