"""Which workers are present and how fast they are: workers are spread over the blocks, and a run's
last text is shared out, by this.

The ledger knows which workers hold a lease, not which ones are about to ask for one. This is kept
in memory: with several coordinators, each knows only the workers that asked it.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

from blocktrain.config import SwarmConfig
from blocktrain.swarm.lease_terms import MICROSTEP, SHORTEST_SHARE, trusted_speed

ABSENT_LEASES = 2.0  # lease times after its last request that a worker counts as absent
SHORTEST_MEASURED = 1e-3  # seconds, in case the clock has not moved


class _Worker(NamedTuple):
    block: int | None  # of its lease; None: it waits
    last_block: int | None  # of its lease or, while it waits, of the one before
    microsteps: int  # per second


class Attendance:
    def __init__(self, swarm: SwarmConfig) -> None:
        self._absent_after = ABSENT_LEASES * swarm.lease_seconds
        # A faster claim would change nothing: no lease has more steps, and none is cut shorter.
        self._fastest = swarm.most_steps / (SHORTEST_SHARE * swarm.lease_seconds)
        self._present: dict[str, _Worker] = {}
        # Oldest first. Not a dict, which finds its first key slowly after many deletions.
        self._last_requests: OrderedDict[str, float] = OrderedDict()
        self._cleaned_at: float | None = None
        # Sums, because there may be many workers.
        self._microsteps: Counter[int | None] = Counter()  # by block
        self._workers: Counter[int | None] = Counter()  # by last block

    def record(
        self, worker: str, block: int | None, steps_per_second: float | None, now: float
    ) -> None:
        """A worker has asked for a lease, and got one of this block or has to wait (None). A worker
        of unknown speed adds nothing to the speeds."""
        self._forget_absent(now)
        before = self._forget(worker)
        last_block = before.last_block if before and block is None else block
        microsteps = round(min(steps_per_second or 0.0, self._fastest) / MICROSTEP)
        self._present[worker] = _Worker(block, last_block, microsteps)
        self._last_requests[worker] = now
        self._microsteps[block] += microsteps
        self._workers[last_block] += 1

    def stays(self, worker: str) -> None:
        """A worker asks again and again, though its requests are not recorded one by one: it is
        present until the next `record` or `left`."""
        self._last_requests.pop(worker, None)

    def left(self, worker: str, now: float) -> None:
        """A worker of which `stays` was said has stopped asking."""
        if worker in self._present and worker not in self._last_requests:
            self._last_requests[worker] = now

    def others(self, worker: str, now: float) -> Mapping[int | None, int]:
        """How many other workers are present, by the block they train or trained last: a worker
        that waits for its update to be merged will go on with the same block."""
        self._forget_absent(now)
        workers = dict(self._workers)
        if own := self._present.get(worker):
            workers[own.last_block] -= 1
        return workers

    def other_speeds(self, worker: str) -> Mapping[int | None, int]:
        """Microsteps per second of all other workers together, by the block they train; None:
        those that wait."""
        microsteps = dict(self._microsteps)
        if own := self._present.get(worker):
            microsteps[own.block] -= own.microsteps
        return microsteps

    def _forget_absent(self, now: float) -> None:
        if now == self._cleaned_at:
            return
        self._cleaned_at = now
        while (
            self._last_requests
            and now - next(iter(self._last_requests.values())) > self._absent_after
        ):
            self._forget(next(iter(self._last_requests)))

    def _forget(self, worker: str) -> _Worker | None:
        self._last_requests.pop(worker, None)
        if before := self._present.pop(worker, None):
            self._microsteps[before.block] -= before.microsteps
            self._workers[before.last_block] -= 1
        return before


class Speeds:
    """How fast workers are by the coordinator's own clock: a bound on the speed they claim. A
    coordinator that was just started knows none of them, and begins with first leases."""

    def __init__(self, swarm: SwarmConfig) -> None:
        self._swarm = swarm
        self._measured: dict[str, float] = {}  # by worker, steps per second of its fastest lease

    def completed(self, worker: str, steps: int, seconds: float) -> None:
        """A worker's update of this many steps counts. It arrived `seconds` after the lease."""
        speed = steps / max(SHORTEST_MEASURED, seconds)
        self._measured[worker] = max(speed, self._measured.get(worker, 0.0))

    def trusted(self, worker: str, claimed: float | None) -> float | None:
        return trusted_speed(self._swarm, claimed, self._measured.get(worker))
