from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from blocktrain.coordinator.client_limits import (
    BODY_BYTES,
    EVENT_STREAMS,
    JOINS_PER_ADDRESS,
    JOINS_PER_INVITE,
    Limits,
    Requester,
)
from blocktrain.coordinator.executor import BoundedCache
from blocktrain.errors import RefusedError


def test_one_worker_does_not_take_all_event_streams_and_one_invite_neither():
    limits = Limits()
    with ExitStack() as held:
        for worker in range(8):
            client = Requester("192.0.2.1", f"worker-{worker}", "bad")
            for _ in range(EVENT_STREAMS.client):
                held.enter_context(limits.event_stream(client))
            with pytest.raises(RefusedError, match="too many event streams"):
                held.enter_context(limits.event_stream(client))
        with pytest.raises(RefusedError):  # another worker of the same invite
            held.enter_context(limits.event_stream(Requester("192.0.2.1", "worker-8", "bad")))
        held.enter_context(limits.event_stream(Requester("192.0.2.1", "honest", "good")))


def test_one_invite_leaves_memory_for_the_bodies_of_others():
    limits = Limits()
    with ExitStack() as held:
        for worker in range(BODY_BYTES.invite // BODY_BYTES.client):
            client = Requester("192.0.2.1", f"worker-{worker}", "bad")
            held.enter_context(limits.body(client))(BODY_BYTES.client)
        with pytest.raises(RefusedError):
            held.enter_context(limits.body(Requester("192.0.2.1", "one more", "bad")))(1)
        held.enter_context(limits.body(Requester("192.0.2.1", "honest", "good")))(1 << 20)
        held.enter_context(limits.body(Requester("192.0.2.2")))(1 << 16)  # joins


def test_joins_are_limited_per_address_and_per_invite():
    now = [0.0]
    limits = Limits(lambda: now[0])

    def count(address: str, invites: int = 1, addresses: int = 1) -> int:
        for number in range(10_000):
            where = f"{address}.{number % addresses}"
            try:
                limits.joining(where, f"invite-{address}-{number % invites}")
            except RefusedError:
                return number
        return 10_000

    assert count("one", invites=100) == JOINS_PER_ADDRESS[1]
    assert count("many", addresses=1000) == JOINS_PER_INVITE[1]
    assert count("another") == JOINS_PER_ADDRESS[1]
    now[0] += 10.0
    assert count("one", invites=100) == 10 * JOINS_PER_ADDRESS[0]


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
