from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.coordinator.limits import BURST_COST, COST_PER_SECOND, BoundedCache, RateLimiter
from blocktrain.errors import RefusedError

REQUESTS = st.lists(st.tuples(st.floats(0.0, 30.0), st.floats(1.0, 500.0)), max_size=200)


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


def is_allowed(limiter: RateLimiter, caller: str, cost: float) -> bool:
    try:
        limiter.spend(caller, cost)
    except RefusedError as error:
        return error.code != "slow_down"
    return True


def test_a_caller_in_a_loop_is_slowed_down_and_others_are_not():
    clock = Clock()
    limiter = RateLimiter(clock)
    assert all(is_allowed(limiter, "loop", 10.0) for _ in range(int(BURST_COST / 10)))
    assert not is_allowed(limiter, "loop", 10.0)
    assert is_allowed(limiter, "another", 10.0)
    clock.now += 1.0
    assert all(is_allowed(limiter, "loop", 10.0) for _ in range(int(COST_PER_SECOND / 10)))
    assert not is_allowed(limiter, "loop", 10.0)


def test_a_refused_request_costs_nothing():
    clock = Clock()
    limiter = RateLimiter(clock)
    limiter.spend("loop", BURST_COST)
    for _ in range(100):
        with pytest.raises(RefusedError):
            limiter.spend("loop", 10.0)
    clock.now += 0.011
    assert is_allowed(limiter, "loop", 10.0)


@given(REQUESTS)
def test_no_caller_gets_more_than_the_burst_and_the_rate(requests: list[tuple[float, float]]):
    clock = Clock()
    limiter = RateLimiter(clock)
    allowed = []
    for pause, cost in requests:
        clock.now += pause
        if is_allowed(limiter, "worker", cost):
            allowed.append((clock.now, cost))
    for start in range(len(allowed)):
        later = allowed[start:]
        passed = later[-1][0] - later[0][0]
        assert sum(cost for _, cost in later) <= BURST_COST + passed * COST_PER_SECOND + 1e-3
    assert all(one[0] <= other[0] for one, other in pairwise(allowed))


def test_a_cache_returns_what_was_put_until_it_is_popped():
    cache: BoundedCache[int] = BoundedCache(2)
    cache.put("a", 1)
    assert (cache.get("a"), cache.get("b")) == (1, None)
    assert cache.pop("a") == 1
    assert cache.get("a") is None
    assert cache.pop("a") is None


def test_a_full_cache_keeps_the_newest_entries():
    cache: BoundedCache[int] = BoundedCache(2)
    for key in ("a", "b", "a", "c"):
        cache.put(key, 1)
    assert [cache.get(key) for key in ("a", "b", "c")] == [1, None, 1]


def test_threads_may_share_a_cache():
    cache: BoundedCache[int] = BoundedCache(8)

    def use(number: int) -> None:
        for turn in range(500):
            cache.put(f"{number}-{turn}", turn)
            cache.pop(f"{number}-{turn - 3}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use, range(4)))
    entries = [cache.get(f"{number}-{turn}") for number in range(4) for turn in range(500)]
    assert len([entry for entry in entries if entry is not None]) <= 8
