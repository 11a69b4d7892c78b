"""Who is there to train, how fast and on what: by this workers spread over the blocks, and the last
text of a run is shared out.

The ledger knows who holds a lease, not who is about to ask for one. Kept in memory: of several
coordinators each knows those who asked it, and shares out less evenly than it might.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

from blocktrain.config import SwarmConfig
from blocktrain.swarm.plan import FILLING, MILLIONTH

ABSENT_LEASES = 2.0  # of a lease's time after which a worker that has not asked is not there


class _Present(NamedTuple):
    block: int | None
    last: int | None  # block that it was given
    speed: int  # in millionths


class Attendance:
    def __init__(self, swarm: SwarmConfig) -> None:
        self._seconds = ABSENT_LEASES * swarm.lease_seconds
        # Nobody counts for more, whatever it says: no lease is longer, and none is cut shorter.
        self._fastest = swarm.most_steps / (FILLING * swarm.lease_seconds)
        self._there: dict[str, _Present] = {}
        # In the order of their asking; a plain dict is slow to find its first after many have gone.
        self._asked: OrderedDict[str, float] = OrderedDict()
        self._looked_at: float | None = None  # for who is absent; once for every question
        # Kept up, as many may be there.
        self._speeds: Counter[int | None] = Counter()  # by block
        self._heads: Counter[int | None] = Counter()  # by the last block

    def note(
        self, worker: str, block: int | None, steps_per_second: float | None, now: float
    ) -> None:
        """It asks, and gets a lease of this block, or none. While nobody knows how fast it is, it
        does nothing in a second."""
        self._drop_absent(now)
        before = self._drop(worker)
        last = before.last if before and block is None else block
        speed = round(min(steps_per_second or 0.0, self._fastest) / MILLIONTH)
        self._there[worker] = _Present(block, last, speed)
        self._asked[worker] = now
        self._speeds[block] += speed
        self._heads[last] += 1

    def keep(self, worker: str) -> None:
        """It asks again and again, though nobody will note it: it is there until it is noted, or
        was `seen_last`."""
        self._asked.pop(worker, None)

    def seen_last(self, worker: str, now: float) -> None:
        """It asks no more."""
        if worker in self._there and worker not in self._asked:
            self._asked[worker] = now

    def others(self, worker: str, now: float) -> Mapping[int | None, int]:
        """How many but this one are there, by the block they train or trained last: who waits does
        so for what its update becomes, and goes on with it."""
        self._drop_absent(now)
        heads = dict(self._heads)
        if own := self._there.get(worker):
            heads[own.last] -= 1
        return heads

    def speeds(self, worker: str) -> Mapping[int | None, int]:
        """Millionths of a step a second of all but this one together, by the block they train;
        None: those who wait."""
        speeds = dict(self._speeds)
        if own := self._there.get(worker):
            speeds[own.block] -= own.speed
        return speeds

    def _drop_absent(self, now: float) -> None:
        if now == self._looked_at:
            return
        self._looked_at = now
        while self._asked and now - next(iter(self._asked.values())) > self._seconds:
            self._drop(next(iter(self._asked)))

    def _drop(self, worker: str) -> _Present | None:
        self._asked.pop(worker, None)
        if present := self._there.pop(worker, None):
            self._speeds[present.block] -= present.speed
            self._heads[present.last] -= 1
        return present
