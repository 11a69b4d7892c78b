import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from blocktrain.config import SwarmConfig
from blocktrain.errors import ConfigError, DivergedError
from blocktrain.numerics.merge import Contribution, MergeRule, WeightedSum, finite_floats
from blocktrain.swarm import merging_rules

Floats = npt.NDArray[np.float32]

FEW = settings(max_examples=40)
PLAIN = MergeRule(1.0, 0.0)
DILOCO = MergeRule(0.7, 0.9)
SHAPE = (3, 4)

values = st.floats(-(2.0**100), 2.0**100, width=32)
tensors = arrays.arrays(np.float32, SHAPE, elements=values)
weights = st.floats(1e-3, 1e12)
rules = st.builds(MergeRule, st.floats(0.01, 2.0) | st.just(1.0), st.floats(0, 0.99) | st.just(0.0))


def tensor(seed: int, shape: tuple[int, ...] = SHAPE) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def merge_tensor(
    current: Floats, updates: list[Contribution], velocity: Floats | None, rule: MergeRule
) -> tuple[Floats, Floats | None]:
    target, next_velocity = rule.combine(current, updates, velocity)
    return finite_floats(target), next_velocity


def same_bits(a: Floats | None, b: Floats | None) -> bool:
    assert a is not None and b is not None
    return a.dtype == b.dtype == np.float32 and a.shape == b.shape and a.tobytes() == b.tobytes()


@FEW
@given(tensors, tensors, weights)
def test_one_update_is_the_next_version_bit_for_bit(current: Floats, end: Floats, weight: float):
    new, velocity = merge_tensor(current, [Contribution("a", end, weight)], None, PLAIN)
    assert same_bits(new, end)
    assert velocity is None


@FEW
@given(tensors, tensors, st.lists(weights, min_size=1, max_size=6))
def test_equal_updates_are_the_next_version_bit_for_bit(
    current: Floats, end: Floats, shares: list[float]
):
    updates = [Contribution(str(i), end, weight) for i, weight in enumerate(shares)]
    assert same_bits(merge_tensor(current, updates, None, PLAIN)[0], end)


def test_the_sign_of_a_zero_stays():
    zeros = np.array([0.0, -0.0], np.float32)
    updates = [Contribution(str(i), zeros, 3.0) for i in range(3)]
    assert same_bits(merge_tensor(np.ones(2, np.float32), updates, None, PLAIN)[0], zeros)


@FEW
@given(st.permutations(range(5)), rules)
def test_the_order_of_updates_does_not_matter(order: list[int], rule: MergeRule):
    current, velocity = tensor(100), tensor(101)
    updates = [
        Contribution(f"u{i}", tensor(i), 10.0 ** (i - 2), tensor(i + 50) if i % 2 else None)
        for i in range(5)
    ]
    expected = merge_tensor(current, updates, velocity, rule)
    found = merge_tensor(current, [updates[i] for i in order], velocity, rule)
    assert same_bits(found[0], expected[0])
    assert (found[1] is None and expected[1] is None) or same_bits(found[1], expected[1])


@FEW
@given(st.lists(st.tuples(tensors, weights), min_size=1, max_size=5))
def test_weights_count(members: list[tuple[Floats, float]]):
    updates = [Contribution(str(i), end, weight) for i, (end, weight) in enumerate(members)]
    new, _ = merge_tensor(np.zeros(SHAPE, np.float32), updates, None, PLAIN)
    total = math.fsum(weight for _, weight in members)
    for place in np.ndindex(SHAPE):
        exact = math.fsum(float(end[place]) * (weight / total) for end, weight in members)
        size = max(abs(float(end[place])) for end, _ in members)
        assert abs(float(new[place]) - exact) <= 2**-23 * abs(exact) + 2**-48 * size + 1e-44


def test_a_weight_of_two_is_two_updates_of_one():
    ends = [tensor(i) for i in range(2)]
    two = [Contribution("a", ends[0], 2.0), Contribution("b", ends[1], 1.0)]
    three = [*(Contribution(name, ends[0], 1.0) for name in "ab"), Contribution("c", ends[1], 1.0)]
    assert same_bits(
        merge_tensor(ends[0], two, None, PLAIN)[0], merge_tensor(ends[0], three, None, PLAIN)[0]
    )


def test_the_outer_step_is_torchs_nesterov():
    rule = MergeRule(0.7, 0.9)
    current, velocity = tensor(0), None
    parameter = torch.nn.Parameter(torch.tensor(current, dtype=torch.float64))
    reference = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for step in range(1, 6):
        ends = [tensor(10 * step), tensor(10 * step + 1)]
        mean = torch.tensor(ends[0] * 0.25 + ends[1] * 0.75, dtype=torch.float64)
        parameter.grad = parameter.detach() - mean
        reference.step()
        updates = [Contribution("a", ends[0], 1.0), Contribution("b", ends[1], 3.0)]
        current, velocity = merge_tensor(current, updates, velocity, rule)
        np.testing.assert_allclose(current, parameter.detach().numpy(), rtol=1e-5, atol=1e-5)


def test_a_rate_under_one_goes_part_of_the_way():
    current, end = tensor(0), tensor(1)
    new, _ = merge_tensor(current, [Contribution("a", end, 1.0)], None, MergeRule(0.25, 0.0))
    np.testing.assert_allclose(new, current + 0.25 * (end - current), rtol=1e-6, atol=1e-6)


@FEW
@given(tensors, tensors, tensors, rules)
def test_a_late_update_that_started_here_is_a_fresh_one(
    current: Floats, end: Floats, velocity: Floats, rule: MergeRule
):
    late = merge_tensor(current, [Contribution("a", end, 2.0, current.copy())], velocity, rule)
    fresh = merge_tensor(current, [Contribution("a", end, 2.0)], velocity, rule)
    assert same_bits(late[0], fresh[0])


def test_a_late_update_adds_what_it_learned():
    current, start, end = tensor(0), tensor(1), tensor(2)
    new, _ = merge_tensor(current, [Contribution("a", end, 1.0, start)], None, PLAIN)
    np.testing.assert_allclose(new, current + (end - start), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("rule", "where"),
    [(rule, where) for rule in (PLAIN, DILOCO) for where in ("current", "end", "start")]
    + [(DILOCO, "velocity")],
)
def test_what_is_not_finite_is_refused(rule: MergeRule, bad: float, where: str):
    parts = {name: tensor(i) for i, name in enumerate(["current", "end", "start", "velocity"])}
    parts[where][1, 2] = bad
    update = Contribution("a", parts["end"], 1.0, parts["start"])
    with pytest.raises(DivergedError):
        merge_tensor(parts["current"], [update], parts["velocity"], rule)


def test_opposite_infinities_and_overflow_are_refused():
    huge = np.full(2, np.finfo(np.float32).max, np.float32)
    late = Contribution("a", huge, 1.0, -huge)
    with pytest.raises(DivergedError):
        merge_tensor(huge, [late], None, PLAIN)
    infinite = np.full(2, np.inf, np.float32)
    both = [Contribution("a", infinite, 1.0), Contribution("b", -infinite, 1.0)]
    with pytest.raises(DivergedError):
        merge_tensor(huge, both, None, PLAIN)


def test_a_single_number_is_a_tensor_too():
    one, two = np.array(1.0, np.float32), np.array(2.0, np.float32)
    updates = [Contribution("a", one, 1.0), Contribution("b", two, 1.0)]
    new, velocity = merge_tensor(one, updates, one, DILOCO)
    assert velocity is not None and new.shape == velocity.shape == ()


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_a_weight_is_above_zero(weight: float):
    with pytest.raises(ValueError, match="above 0"):
        merge_tensor(tensor(0), [Contribution("a", tensor(0), weight)], None, PLAIN)


def test_a_mean_needs_members():
    with pytest.raises(ValueError, match="no updates to merge"):
        merge_tensor(tensor(0), [], None, PLAIN)


def test_a_delta_is_added_to_the_newest_weights():
    current, change = tensor(0), tensor(1)
    for share in (1.0, 0.5):
        update = Contribution("a", change, 2.0, share=share, is_delta=True)
        merged, _ = merge_tensor(current, [update], None, PLAIN)
        assert same_bits(merged, (current + share * change.astype(np.float64)).astype(np.float32))


def test_a_sum_of_some_updates_goes_on_with_others():
    current = tensor(0)
    updates = [Contribution(str(i), tensor(i), 1.0 + i) for i in range(6)]
    together = DILOCO.total(current, updates)
    in_parts = DILOCO.total(current, updates[4:], DILOCO.total(current, updates[:4]))
    assert in_parts.numbers.tobytes() == together.numbers.tobytes()
    assert in_parts.weight == together.weight


class Clipped(MergeRule):
    def total(
        self, current: Floats, updates: Iterable[Contribution], before: WeightedSum | None = None
    ) -> WeightedSum:
        clipped = [replace(each, values=np.clip(each.values, -1, 1)) for each in updates]
        return super().total(current, clipped, before)


def test_another_mean_is_one_method():
    """The outer step is the same."""
    current, ends = tensor(0), [tensor(1), tensor(2) * 1000]
    updates = [Contribution(str(i), end, 1.0) for i, end in enumerate(ends)]
    merged, _ = merge_tensor(current, updates, None, Clipped(0.5))
    mean = np.mean([np.clip(end, -1, 1) for end in ends], axis=0)
    np.testing.assert_allclose(merged, (current + mean) / 2, rtol=1e-5, atol=1e-6)


def test_the_rule_of_a_run():
    assert merging_rules.merge_rule(SwarmConfig(outer_rate=0.7, outer_momentum=0.9)) == DILOCO


@pytest.mark.parametrize(
    ("rate", "momentum"), [(-1, 0), (math.inf, 0), (math.nan, 0), (1, 1), (1, -0.1), (1, math.nan)]
)
def test_an_impossible_outer_step_is_refused(rate: float, momentum: float):
    with pytest.raises(ConfigError):
        MergeRule(rate, momentum)


def test_a_discounted_late_update_counts_for_less_even_alone():
    start, current, end = (np.full(3, value, np.float32) for value in (0.0, 10.0, 4.0))
    late = Contribution("a", end, weight=7.0, start=start, share=0.25)
    merged, _ = merge_tensor(current, [late], None, MergeRule())
    assert merged.tolist() == [11.0] * 3
