"""A block's state and its leases, in memory and updated in place.

`VirtualBlock` is a `BlockView` (swarm/state.py), like the `BlockState` that a ledger builds from
its rows for every request. Building one for each of a million requests would take too long here.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Counted = TypeVar("Counted", bound=Hashable)


@dataclass(slots=True, eq=False, weakref_slot=True)
class VirtualLease:
    """A lease, and later the update that was trained in it."""

    lease: str
    worker: str
    block: "VirtualBlock"
    first_batch: int
    steps: int
    base_version: int
    deadline: float
    created: float = 0.0
    continued: "VirtualLease | None" = None  # the lease whose end it starts from; None once merged
    schedule_start: int = 0
    schedule_stride: int = 1
    expected: float | None = None
    steps_done: int = 0  # by the last heartbeat with progress
    reported_at: float = 0.0
    state: str = "open"
    committed: float = 0.0
    merged_into: int | None = None

    @property
    def continues(self) -> str | None:
        return self.continued.lease if self.continued else None

    @property
    def is_active(self) -> bool:
        return self.state in ("open", "sending")


class VirtualBlock:
    def __init__(self, index: int, total_batches: int) -> None:
        self.index, self.total_batches = index, total_batches
        self.version = self.merged_batches = self.next_batch = self.open_leases = 0
        self.to_hand_out, self.under_way = total_batches, 0
        self.leases_met = self.leases_missed = 0
        self.gaps: dict[int, int] = {}  # returned ranges: steps by first batch
        self._gap_starts: list[int] = []  # a heap; starts of closed gaps are removed later
        # Numbers of leases and pending updates, by worker: of all, and of those from the current
        # version whose training is complete.
        self.workers: defaultdict[str, int] = defaultdict(int)
        self.finishing: defaultdict[str, int] = defaultdict(int)
        self._unmerged: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self.pending: list[VirtualLease] = []  # in the order of their arrival
        self.fresh_since: list[float] = []
        self._fresh_workers: set[str] = set()
        self._expected: dict[str, float] = {}  # arrival of the open lease's update, by worker
        self._arrivals: defaultdict[float, int] = defaultdict(int)  # number of leases, by arrival
        self._last_arrivals: list[float] = []  # a heap of arrivals, negated; some are outdated
        self.merging = False
        self.made_from: VirtualLease | None = None  # an update with exactly this version's weights
        self._delta_sums = [0.0]  # by version: size of all deltas up to it, as a share of a block

    # Batches

    def take(self, most: int) -> tuple[int, int]:
        """Take (first batch, steps) for a lease: returned batches first, then new ones."""
        while self._gap_starts and self._gap_starts[0] not in self.gaps:
            heapq.heappop(self._gap_starts)
        if self._gap_starts:
            first_batch = heapq.heappop(self._gap_starts)
            length = self.gaps.pop(first_batch)
            steps = min(most, length)
            if length > steps:
                self._open_gap(first_batch + steps, length - steps)
        else:
            first_batch = self.next_batch
            steps = min(most, self.total_batches - first_batch)
            self.next_batch += steps
        self._count_handed_out(steps)
        return first_batch, steps

    def give_back(self, first_batch: int, steps: int) -> None:
        self._open_gap(first_batch, steps)
        self._count_handed_out(-steps)

    def reclaim(self, first_batch: int, steps: int) -> bool:
        """Take exactly this range from the returned ones. Returns False if it was leased again."""
        if self.gaps.get(first_batch) != steps:
            return False
        del self.gaps[first_batch]
        self._count_handed_out(steps)
        return True

    def _open_gap(self, first_batch: int, steps: int) -> None:
        self.gaps[first_batch] = steps
        heapq.heappush(self._gap_starts, first_batch)

    def _count_handed_out(self, steps: int) -> None:
        self.to_hand_out -= steps
        self.under_way += steps

    # Expected arrival of the updates that are being trained

    @property
    def busy_until(self) -> float:
        while self._last_arrivals and -self._last_arrivals[0] not in self._arrivals:
            heapq.heappop(self._last_arrivals)
        return -self._last_arrivals[0] if self._last_arrivals else -math.inf

    def expect(self, lease: VirtualLease, arrival: float | None) -> None:
        self.expect_no_more(lease)
        lease.expected = arrival
        if arrival is not None:
            self._expected[lease.worker] = arrival
            if arrival not in self._arrivals:
                heapq.heappush(self._last_arrivals, -arrival)
            self._arrivals[arrival] += 1

    def expect_no_more(self, lease: VirtualLease) -> None:
        arrival = self._expected.pop(lease.worker, None)
        if arrival is not None:
            count_down(self._arrivals, arrival)

    def arrives_last(self, lease: VirtualLease) -> bool:
        """Whether no other update is expected as late as this lease's."""
        arrival = lease.expected
        return arrival is not None and arrival == self.busy_until and self._arrivals[arrival] == 1

    # Updates and versions

    @property
    def senders(self) -> Collection[str]:
        """The workers with trained leases that are in no version yet."""
        return self._unmerged

    def unmerged(self, worker: str) -> Mapping[str, int]:
        return self._unmerged.get(worker, {})

    @property
    def waiting_since(self) -> float:
        return self.pending[0].committed if self.pending else math.inf

    def add_unmerged(self, lease: VirtualLease) -> None:
        """Record a trained lease."""
        self._unmerged[lease.worker][lease.lease] = lease.steps

    def remove_unmerged(self, lease: VirtualLease) -> None:
        """Remove a lease whose update was merged, or never will be."""
        unmerged = self._unmerged[lease.worker]
        unmerged.pop(lease.lease, None)
        if not unmerged:
            del self._unmerged[lease.worker]

    def add_pending(self, lease: VirtualLease) -> None:
        """Add an update that arrived after all other pending ones."""
        self.pending.append(lease)
        self._count_fresh(lease)

    def publish(self, pending: list[VirtualLease], delta_share: float) -> None:
        """Make the next version current. `pending`: the updates for the version after it.
        `delta_share`: the size of the version's delta as a share of the block's size."""
        self.version += 1
        self._delta_sums.append(self._delta_sums[-1] + delta_share)
        self.pending, self.fresh_since, self._fresh_workers = pending, [], set()
        for lease in pending:
            self._count_fresh(lease)

    def share_to_fetch(self, cached_version: int, version: int) -> float:
        """The download of a worker with an older version, as a share of the block's size: all
        deltas since then, or the whole block if that is smaller."""
        return min(self._delta_sums[version] - self._delta_sums[cached_version], 1.0)

    def _count_fresh(self, lease: VirtualLease) -> None:
        if lease.base_version == self.version and lease.worker not in self._fresh_workers:
            self._fresh_workers.add(lease.worker)
            self.fresh_since.append(lease.committed)


def count_down(counts: dict[Counted, int], key: Counted) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
