"""A jump of the loss on hidden text is told from the scatter of its measurements."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from blocktrain.swarm.rollback import FEWEST, Opinion, find_jump


def opinions(losses: Sequence[float], *validators: str, first: int = 1) -> list[Opinion]:
    return [
        Opinion(version, validator, loss)
        for version, loss in enumerate(losses, first)
        for validator in validators or ("one",)
    ]


def falling(count: int, seed: int = 0, scatter: float = 0.02) -> list[float]:
    draws = np.random.default_rng(seed)
    return [2 + math.exp(-n / 20) + scatter * float(draws.normal()) for n in range(count)]


def test_scatter_is_no_jump():
    found = [
        find_jump(opinions(falling(length, seed))) for seed in range(30) for length in (12, 25, 50)
    ]
    assert sum(jump is not None for jump in found) <= 1


@pytest.mark.parametrize("height", [0.3, 3.0, math.inf])
def test_a_jump_is_found_with_the_version_before_it(height: float):
    losses = falling(20)
    jump = find_jump(opinions([*losses, losses[-1] + height]))
    assert jump is not None and jump.good == 20 and jump.loss == losses[-1] + height
    assert abs(jump.usual - losses[-1]) < 0.1
    later = find_jump(opinions([*losses, losses[-1] + height, 9.0, 8.0]))
    assert later is not None and later.good == 20
    assert find_jump(opinions([*losses, losses[-1] + height, losses[-1]])) is None  # recovered


def test_few_measurements_tell_nothing():
    assert find_jump([]) is None
    assert find_jump(opinions([*falling(FEWEST), 9.0])) is None
    assert find_jump(opinions([9.0, math.inf])) is None


def test_one_dishonest_validator_of_three_makes_no_jump_and_hides_none():
    honest = opinions(falling(20), "a", "b", "c")
    assert find_jump([*honest, Opinion(21, "c", 9.0)]) is None
    assert find_jump([*honest, Opinion(21, "c", 9.0), Opinion(22, "c", 9.0)]) is None
    jumped = [Opinion(21, "a", 9.0), Opinion(21, "b", 9.1)]
    assert find_jump([*honest, *jumped]) is not None
    assert find_jump([*honest, *jumped, Opinion(21, "c", 2.0)]) is not None
    # Each of them may have measured another version.
    apart = [Opinion(21, "a", 9.0), Opinion(22, "b", 9.1)]
    assert find_jump([*honest, *apart]) is not None
