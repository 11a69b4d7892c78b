"""Leases this coordinator handed out a moment ago: whose they are and what they start from.

What a worker sends for one of them is checked before a byte is kept, without a look into the
ledger. Knows nothing of what became of a lease since: that is decided in the ledger, by whoever
counts the update.
"""

from typing import NamedTuple

from blocktrain.storage.ledger import Version

MOST = 4096


class HeldLease(NamedTuple):
    worker: str
    public_key: str
    base: Version


class RecentLeases:
    """May be used from several threads at once."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._held: dict[str, HeldLease] = {}

    def remember(self, lease: str, held: HeldLease) -> None:
        self._held[lease] = held
        while len(self._held) > self._most:
            self._held.pop(next(iter(self._held)), None)

    def of(self, worker: str, lease: str) -> HeldLease | None:
        held = self._held.get(lease)
        return held if held and held.worker == worker else None

    def forget(self, lease: str) -> None:
        self._held.pop(lease, None)
