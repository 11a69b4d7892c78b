import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.numerics.noise import (
    LogNormal,
    Partition,
    euler_step,
    fitted_partition,
    lognormal_partition,
    mean_weight,
    precondition,
)

partitions = st.builds(
    lognormal_partition,
    blocks=st.integers(1, 16),
    sigma_min=st.floats(0.05, 2.0),
    sigma_max=st.floats(3.0, 80.0),
    overlap=st.floats(0.0, 1.0),
)


def test_four_blocks_have_the_papers_bounds():
    bounds = lognormal_partition(4, 1.0, 10.0).bounds
    assert bounds == pytest.approx((1, 1.238, 1.623, 2.429, 10), abs=1e-3)


@given(partitions)
def test_intervals_are_equally_probable(partition: Partition):
    shares = [
        partition.prior.cdf(high) - partition.prior.cdf(low)
        for low, high in zip(partition.bounds[:-1], partition.bounds[1:], strict=True)
    ]
    assert shares == pytest.approx([sum(shares) / len(shares)] * len(shares), rel=1e-5)


@given(partitions, st.floats(0.0, 1.0))
def test_every_sigma_has_one_owner_that_trains_on_it(partition: Partition, place: float):
    sigma = partition.sigma_min * (partition.sigma_max / partition.sigma_min) ** place
    sigma = min(max(sigma, partition.sigma_min), partition.sigma_max)
    block = partition.block_of(sigma)
    owned_low, owned_high = partition.owned_range(block)
    assert owned_low <= sigma <= owned_high
    train_low, train_high = partition.train_range(block)
    assert train_low <= sigma <= train_high
    owners = [k for k in range(partition.blocks) if partition.owned_range(k)[0] < sigma]
    assert block == min(owners, default=partition.blocks - 1)


def test_block_0_owns_the_highest_noise():
    partition = lognormal_partition(4, 1.0, 10.0)
    assert partition.owned_range(0) == (partition.bounds[3], 10.0)
    assert partition.block_of(10.0) == 0
    assert partition.block_of(1.0) == 3


def test_sigma_outside_the_range_is_refused():
    with pytest.raises(ValueError, match="outside"):
        lognormal_partition(4, 1.0, 10.0).block_of(0.9)


@given(partitions)
def test_training_ranges_stay_inside_and_overlap_by_gamma(partition: Partition):
    for block in range(partition.blocks):
        low, high = partition.owned_range(block)
        train_low, train_high = partition.train_range(block)
        reach = (high / low) ** partition.overlap
        assert train_low == pytest.approx(max(low / reach, partition.sigma_min))
        assert train_high == pytest.approx(min(high * reach, partition.sigma_max))


@given(partitions, st.lists(st.floats(0.0, 1.0, exclude_max=True), min_size=1, max_size=20))
def test_samples_lie_in_the_training_range(partition: Partition, uniforms: list[float]):
    for block in range(partition.blocks):
        low, high = partition.train_range(block)
        assert all(low <= sigma <= high for sigma in partition.sample(block, uniforms))


def test_samples_follow_the_truncated_lognormal():
    partition = lognormal_partition(1, 1.0, 10.0)
    prior = LogNormal()
    quarters = partition.sample(0, [0.25, 0.5, 0.75])
    q_low, q_high = prior.cdf(1.0), prior.cdf(10.0)
    found = [(prior.cdf(s) - q_low) / (q_high - q_low) for s in quarters]
    assert found == pytest.approx([0.25, 0.5, 0.75], abs=1e-6)


def test_inference_walks_down_from_sigma_max_to_sigma_min():
    steps = lognormal_partition(4, 1.0, 10.0).inference_sigmas()
    assert steps[0][0] == 10.0
    assert steps[-1][1] == 1.0
    assert [end for _, end in steps[:-1]] == [start for start, _ in steps[1:]]


@given(st.floats(0.1, 100.0), st.floats(0.05, 5.0))
def test_preconditioning_keeps_unit_variance(sigma: float, sd: float):
    """EDM's defining properties: unit input, unit target, and weight = 1 / c_out^2."""
    c = precondition(sigma, sd)
    assert c.c_in**2 * (sigma**2 + sd**2) == pytest.approx(1.0)
    # Variance of the effective target (clean - c_skip * noisy) / c_out is 1.
    assert ((1 - c.c_skip) ** 2 * sd**2 + c.c_skip**2 * sigma**2) / c.c_out**2 == pytest.approx(1.0)
    assert c.weight == pytest.approx(1 / c.c_out**2)
    assert c.c_noise == pytest.approx(math.log(sigma) / 4)


@given(st.floats(1.0, 10.0))
def test_weight_makes_the_skip_path_exact_evidence(sigma: float):
    c = precondition(sigma, 0.5)
    assert c.c_skip * c.weight == pytest.approx(1 / sigma**2)


def test_mean_weight_normalises_the_loss():
    partition = lognormal_partition(4, 1.0, 10.0, 0.1)
    draws = partition.sample(2, [i / 999 for i in range(999)])
    mean = sum(precondition(s, 0.5).weight for s in draws) / len(draws)
    assert mean_weight(partition, 2, 0.5) == pytest.approx(mean, rel=1e-3)


def test_euler_from_the_mean_moves_towards_the_guess():
    assert euler_step(0.0, 1.0, 10.0, 2.5) == pytest.approx(0.75)
    assert euler_step(3.0, 3.0, 10.0, 2.5) == pytest.approx(3.0)


@given(st.floats(-5, 5), st.floats(-5, 5), st.floats(1.1, 10.0))
def test_euler_all_the_way_down_lands_on_the_guess(z: float, guess: float, sigma: float):
    assert euler_step(z, guess, sigma, 0.0) == pytest.approx(guess, abs=1e-9)


@given(
    st.integers(1, 12),
    st.lists(st.floats(0.1, 6.0), min_size=13, max_size=13),
)
def test_fitted_cuts_ascend_and_keep_the_ends(blocks: int, losses: list[float]):
    sigmas = [10 ** (i / 12) for i in range(13)]
    bounds = fitted_partition(blocks, sigmas, losses).bounds
    assert (bounds[0], bounds[-1]) == (sigmas[0], sigmas[-1])
    assert list(bounds) == sorted(set(bounds))


def test_fitted_cuts_crowd_where_the_loss_changes():
    sigmas = [10 ** (i / 12) for i in range(13)]
    steep_at_the_bottom = [1.0 + min(i, 3) / 3 for i in range(13)]
    bounds = fitted_partition(4, sigmas, steep_at_the_bottom).bounds
    even = fitted_partition(4, sigmas, [1.0] * 13).bounds
    assert bounds[1] < even[1]
    assert bounds[2] < even[2]
