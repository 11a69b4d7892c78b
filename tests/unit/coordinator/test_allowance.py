"""How much one caller may ask for."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.coordinator.limits import AT_ONCE, MANY_CALLERS, PER_SECOND, RateLimiter
from blocktrain.errors import RefusedError

REQUESTS = st.lists(st.tuples(st.floats(0.0, 30.0), st.floats(1.0, 500.0)), max_size=200)


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


def spent(allowance: RateLimiter, caller: str, cost: float) -> bool:
    try:
        allowance.spend(caller, cost)
    except RefusedError as refused:
        return refused.code != "slow_down"
    return True


def test_whoever_asks_in_a_loop_is_slowed_down_and_the_others_are_not():
    clock = Clock()
    allowance = RateLimiter(clock)
    assert all(spent(allowance, "loop", 10.0) for _ in range(int(AT_ONCE / 10)))
    assert not spent(allowance, "loop", 10.0)
    assert spent(allowance, "another", 10.0)
    clock.now += 1.0
    assert all(spent(allowance, "loop", 10.0) for _ in range(int(PER_SECOND / 10)))
    assert not spent(allowance, "loop", 10.0)


def test_what_was_refused_costs_nothing():
    clock = Clock()
    allowance = RateLimiter(clock)
    allowance.spend("loop", AT_ONCE)
    for _ in range(100):
        with pytest.raises(RefusedError):
            allowance.spend("loop", 10.0)
    clock.now += 0.011
    assert spent(allowance, "loop", 10.0)


@given(REQUESTS)
def test_never_more_than_what_there_was_and_what_came_since(requests: list[tuple[float, float]]):
    clock = Clock()
    allowance = RateLimiter(clock)
    granted = []
    for pause, cost in requests:
        clock.now += pause
        if spent(allowance, "worker", cost):
            granted.append((clock.now, cost))
    for start in range(len(granted)):
        of_these = granted[start:]
        passed = of_these[-1][0] - of_these[0][0]
        assert sum(cost for _, cost in of_these) <= AT_ONCE + passed * PER_SECOND + 1e-3
    assert all(one[0] <= other[0] for one, other in pairwise(granted))


def test_callers_who_are_gone_are_forgotten():
    clock = Clock()
    allowance = RateLimiter(clock)
    for number in range(MANY_CALLERS):
        allowance.spend(str(number), 1.0)
    clock.now += 10.0
    allowance.spend("last", 1.0)
    assert len(allowance._paid_until) == 1
