from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.errors import RefusedError
from blocktrain.protocol.limits import RateLimiter, Shares, network_of

PER_SECOND, BURST = 1_000.0, 10_000.0

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
    limiter = RateLimiter(clock, PER_SECOND, BURST)
    assert all(is_allowed(limiter, "loop", 10.0) for _ in range(int(BURST / 10)))
    assert not is_allowed(limiter, "loop", 10.0)
    assert is_allowed(limiter, "another", 10.0)
    clock.now += 1.0
    assert all(is_allowed(limiter, "loop", 10.0) for _ in range(int(PER_SECOND / 10)))
    assert not is_allowed(limiter, "loop", 10.0)


def test_a_refused_request_costs_nothing():
    clock = Clock()
    limiter = RateLimiter(clock, PER_SECOND, BURST)
    limiter.spend("loop", BURST)
    for _ in range(100):
        with pytest.raises(RefusedError):
            limiter.spend("loop", 10.0)
    clock.now += 0.011
    assert is_allowed(limiter, "loop", 10.0)


@given(REQUESTS)
def test_no_caller_gets_more_than_the_burst_and_the_rate(requests: list[tuple[float, float]]):
    clock = Clock()
    limiter = RateLimiter(clock, PER_SECOND, BURST)
    allowed = []
    for pause, cost in requests:
        clock.now += pause
        if is_allowed(limiter, "worker", cost):
            allowed.append((clock.now, cost))
    for start in range(len(allowed)):
        later = allowed[start:]
        passed = later[-1][0] - later[0][0]
        assert sum(cost for _, cost in later) <= BURST + passed * PER_SECOND + 1e-3
    assert all(one[0] <= other[0] for one, other in pairwise(allowed))


def test_what_is_held_is_limited_for_every_key_and_given_back():
    shares = Shares("requests")
    with shares.held({"": 10, "invite a": 6, "worker b": 4}) as take:
        take(4)
        with pytest.raises(RefusedError, match="too many requests at the same time"):
            take(1)
        with shares.held({"": 10, "invite a": 6, "worker c": 4}) as other:
            other(2)
            with pytest.raises(RefusedError):
                other(1)  # of the invite
        with shares.held({"": 10, "invite d": 6}) as other:
            other(6)
            with pytest.raises(RefusedError):
                other(1)  # in total
    with shares.held({"": 10, "invite a": 6, "worker b": 4}) as take:
        take(4)


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("a-socket", "a-socket"),
    ],
)
def test_addresses_of_one_machine_are_one_network(host: str, network: str):
    assert network_of(host) == network
