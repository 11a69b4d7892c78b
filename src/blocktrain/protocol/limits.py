"""Limits on what one client, one invite or one address may use: requests over time, and what is in
use at a time."""

import ipaddress
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from blocktrain.errors import RefusedError

MANY_CALLERS = 10_000
IPV6_NETWORK = 64  # bits; a home or a server usually gets a whole network of this size


def network_of(host: str) -> str:
    """The address by which a client's machine or home is known: IPv4 as it is, IPv6 by its first
    64 bits."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, IPV6_NETWORK), strict=False))


class RateLimiter:
    """A token bucket per caller: `burst` at once, and `per_second` in the long run."""

    def __init__(self, clock: Callable[[], float], per_second: float, burst: float) -> None:
        self._clock, self._per_second, self._burst = clock, per_second, burst
        self._full_at: dict[str, float] = {}  # by caller: when its bucket will be full

    def allows(self, caller: str, cost: float = 1.0) -> bool:
        """Whether the caller may do this now, which then counts."""
        now = self._clock()
        full_at = max(self._full_at.get(caller, now), now) + cost / self._per_second
        if (full_at - now) * self._per_second > self._burst:
            return False
        self._full_at[caller] = full_at
        if len(self._full_at) > MANY_CALLERS:
            self._full_at = {name: at for name, at in self._full_at.items() if at > now}
        return True

    def spend(self, caller: str, cost: float = 1.0) -> None:
        if not self.allows(caller, cost):
            raise RefusedError("slow_down", "too many requests; wait a second before the next one")


class Shares:
    """What is in use at a time, by key. For one thread."""

    def __init__(self, what: str) -> None:
        """`what`: the plural, for error messages."""
        self._what = what
        self._used: dict[str, int] = {}

    @contextmanager
    def held(self, limits: Mapping[str, int], amount: int = 0) -> Iterator[Callable[[int], None]]:
        """Take this amount for as long as the `with` block lasts; yields a function that takes
        more. `limits`: the most that each of these keys may have in use."""
        taken, used = 0, self._used

        def take(amount: int) -> None:
            nonlocal taken
            for key, most in limits.items():
                if used.get(key, 0) + amount > most:
                    reason = f"too many {self._what} at the same time; try again later"
                    raise RefusedError("slow_down", reason)
            for key in limits:
                used[key] = used.get(key, 0) + amount
            taken += amount

        if amount:
            take(amount)
        try:
            yield take
        finally:
            for key in limits if taken else ():
                used[key] -= taken
                if not used[key]:
                    del used[key]
