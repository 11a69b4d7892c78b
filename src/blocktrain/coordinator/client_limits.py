"""What one worker, one invite and one address may ask of a coordinator.

A limit on an invite leaves room for the holders of other invites, and one on a worker leaves room
for others with the same invite. An address counts only for requests without authorization, because
many workers may share one.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple

from blocktrain.errors import RefusedError
from blocktrain.protocol.limits import RateLimiter, Shares

# Costs per caller. A worker gets far more than it needs; a caller in a tight loop neither delays
# others nor fills the ledger.
COST_PER_SECOND, BURST_COST = 1_000.0, 10_000.0
READ_COST, WRITE_COST = 1.0, 10.0  # per request, unless its endpoint says otherwise
JOINS_PER_ADDRESS = (2.0, 200.0)  # per second in the long run, and at once
JOINS_PER_INVITE = (20.0, 1_000.0)

MEBIBYTE = 1 << 20

Holding = AbstractContextManager[Callable[[int], None]]  # yields a function that takes more


class Most(NamedTuple):
    """The most that may be in use at a time: in total, by the holders of one invite, by one worker
    or reader, and by strangers at one address."""

    total: int
    invite: int
    client: int
    address: int


REQUESTS = Most(total=8192, invite=4096, client=32, address=256)
BODY_BYTES = Most(
    total=128 * MEBIBYTE, invite=64 * MEBIBYTE, client=8 * MEBIBYTE, address=4 * MEBIBYTE
)
# Of chunks that are being received, on disk. A worker sends 4 at a time.
CHUNK_BYTES = Most(total=4096 * MEBIBYTE, invite=2048 * MEBIBYTE, client=64 * MEBIBYTE, address=0)
EVENT_STREAMS = Most(total=64, invite=32, client=4, address=0)  # each reads the ledger often
PAGE_STREAMS = Most(total=4096, invite=1024, client=32, address=64)  # all send the same bytes


class Requester(NamedTuple):
    """Who sends a request: a worker or another holder of an invite, the operator, or a stranger."""

    address: str
    name: str = ""  # of a worker, or of a reader with an invite
    invite: str = ""
    is_operator: bool = False

    def limits(self, most: Most) -> Mapping[str, int]:
        limits = {"": most.total}
        if not self.name:
            return {**limits, f"address {self.address}": most.address}
        if self.invite:  # unknown for workers that joined before invites were recorded
            limits[f"invite {self.invite}"] = most.invite
        return {**limits, f"client {self.name}": most.client}


class Limits:
    """The limits of one coordinator, for the thread of its event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests, self._bodies = Shares("requests"), Shares("unfinished request bodies")
        self._streams, self._page_streams = Shares("event streams"), Shares("viewers")
        self._chunks = Shares("unfinished chunks")
        self._rate = RateLimiter(clock, COST_PER_SECOND, BURST_COST)
        self._joins_of_address = RateLimiter(clock, *JOINS_PER_ADDRESS)
        self._joins_of_invite = RateLimiter(clock, *JOINS_PER_INVITE)

    def spend(self, caller: str, cost: float) -> None:
        self._rate.spend(caller, cost)

    def joining(self, address: str, invite: str) -> None:
        """Count an attempt to join. `invite`: the hash of its secret."""
        allowed = self._joins_of_address.allows(address) and self._joins_of_invite.allows(invite)
        if not allowed:
            reason = "too many workers join with this invite or from this address; try again later"
            raise RefusedError("slow_down", reason)

    def request(self, client: Requester) -> Holding:
        return self._requests.held(client.limits(REQUESTS), 1)

    def event_stream(self, client: Requester) -> Holding:
        return self._streams.held(client.limits(EVENT_STREAMS), 1)

    def page_stream(self, client: Requester) -> Holding:
        return self._page_streams.held(client.limits(PAGE_STREAMS), 1)

    def chunk(self, client: Requester) -> Holding:
        """Yields a function that counts the bytes of a chunk while it is being received."""
        return self._chunks.held(client.limits(CHUNK_BYTES))

    def body(self, client: Requester) -> Holding:
        """Yields a function that counts the bytes of a body while it is in memory."""
        return self._bodies.held(client.limits(BODY_BYTES))
