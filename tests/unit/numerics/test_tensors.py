import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktrain.numerics.tensors import Pieces, scaled, sizes

FEW = settings(max_examples=60)
counts = st.lists(st.integers(0, 9), min_size=1, max_size=8)


def cut(numbers: np.ndarray, places: list[int]) -> list[np.ndarray]:
    return np.split(numbers, sorted(place % (numbers.size + 1) for place in places))


@FEW
@given(counts, st.lists(st.integers(0, 100), max_size=6), st.integers(0, 9))
def test_sizes_and_factors_are_the_tensors_own_wherever_pieces_are_cut(
    tensors: list[int], places: list[int], seed: int
):
    numbers = np.random.default_rng(seed).normal(size=sum(tensors)).astype(np.float32)
    parts = np.split(numbers, np.cumsum(tensors)[:-1])
    found = sizes(cut(numbers, places), tensors)
    for index, part in enumerate(parts):
        rms = float(np.sqrt(np.mean(np.square(part, dtype=np.float64)))) if part.size else 0.0
        assert found.rms[index] == pytest.approx(rms, rel=1e-6)
        assert found.largest[index] == np.abs(part).max(initial=0)
    factors = np.linspace(0.1, 1.0, len(tensors))
    pieces = list(scaled(cut(numbers, places), factors, Pieces(tensors)))
    expected = [np.float32(factor) * part for factor, part in zip(factors, parts, strict=True)]
    assert np.concatenate([*pieces, [0]]).tolist() == np.concatenate([*expected, [0]]).tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_the_size_of_what_is_not_finite_or_too_large_is_not_finite(bad: float):
    numbers = np.ones(4, np.float32)
    numbers[2] = bad
    assert np.isfinite(sizes([numbers], [2, 2]).rms).tolist() == [True, False]
