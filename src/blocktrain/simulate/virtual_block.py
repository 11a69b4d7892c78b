"""A block's state that is changed in place, and the leases that change it.

Has what the plan reads of a block (`core.swarm.BlockView`), kept up to date change by change: a
ledger rebuilds the same from its rows at every question, which a million questions do not allow.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping
from typing import TypeVar

Counted = TypeVar("Counted", bound=Hashable)


class VirtualLease:
    """A lease, and then the update that came of it."""

    __slots__ = (
        "__weakref__", "base_version", "before", "block", "committed", "created", "deadline",
        "expected", "first_batch", "lease", "merged_into", "reported", "schedule_start",
        "schedule_stride", "state", "steps", "steps_done", "worker",
    )  # fmt: skip

    def __init__(
        self,
        number: str,
        worker: str,
        block: "VirtualBlock",
        first_batch: int,
        steps: int,
        deadline: float,
        before: "VirtualLease | None" = None,
    ) -> None:
        """`before`: the one it continues; let go once this one's update is merged."""
        self.lease, self.worker, self.block = number, worker, block
        self.before = before
        self.merged_into: int | None = None
        self.base_version = block.version
        self.first_batch, self.steps, self.deadline = first_batch, steps, deadline
        self.steps_done, self.reported = 0, 0.0  # as its worker said; last progress
        self.schedule_start, self.schedule_stride = 0, 1
        self.state = "open"
        self.created = self.committed = 0.0
        self.expected: float | None = None

    @property
    def continues(self) -> str | None:
        return self.before.lease if self.before else None

    @property
    def held(self) -> bool:
        return self.state in ("open", "sending")


class VirtualBlock:
    def __init__(self, index: int, total_batches: int) -> None:
        self.index, self.total_batches = index, total_batches
        self.version = self.merged_batches = self.next_batch = self.open_leases = 0
        self.to_hand_out, self.under_way = total_batches, 0
        self.met = self.missed = 0  # leases, in time
        self._followed = [0.0]  # by version: the shares of all differences up to it
        self.workers: defaultdict[str, int] = defaultdict(
            int
        )  # by how many leases and updates each counts
        self.finishing: defaultdict[str, int] = defaultdict(int)
        self._unmerged: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self.pending: list[VirtualLease] = []  # in the order of their arrival
        self.fresh_since: list[float] = []
        self._fresh: set[str] = set()  # whose these are
        self.gaps: dict[int, int] = {}  # ranges that came back: steps by first batch
        self._order: list[int] = []  # a heap of first batches; some are no gaps any more
        self._expected: dict[str, float] = {}  # by worker, of open leases: when its update is
        self._ends: defaultdict[float, int] = defaultdict(int)  # the same times: many end together
        self._last_ends: list[float] = []  # a heap of them, negative; some are over
        self.merging = False
        self.author: VirtualLease | None = None  # whose update this version is, to the last bit

    @property
    def senders(self) -> Collection[str]:
        """Whose updates are on their way in, late ones too."""
        return self._unmerged

    def unmerged(self, worker: str) -> Mapping[str, int]:
        return self._unmerged.get(worker, {})

    @property
    def busy_until(self) -> float:
        while self._last_ends and -self._last_ends[0] not in self._ends:
            heapq.heappop(self._last_ends)
        return -self._last_ends[0] if self._last_ends else -math.inf

    def expect(self, lease: VirtualLease, at: float | None) -> None:
        self.expect_no_more(lease)
        lease.expected = at
        if at is not None:
            self._expected[lease.worker] = at
            if at not in self._ends:
                heapq.heappush(self._last_ends, -at)
            self._ends[at] += 1

    def expect_no_more(self, lease: VirtualLease) -> None:
        at = self._expected.pop(lease.worker, None)
        if at is not None:
            count_out(self._ends, at)

    def ends_last(self, lease: VirtualLease) -> bool:
        """Whether it alone is expected as late as this."""
        at = lease.expected
        return at is not None and at == self.busy_until and self._ends[at] == 1

    @property
    def waiting_since(self) -> float:
        return self.pending[0].committed if self.pending else math.inf

    def wait(self, lease: VirtualLease) -> None:
        """An update has arrived, after all others."""
        self.pending.append(lease)
        self._count_fresh(lease)

    def follow(self, pending: list[VirtualLease], share: float) -> None:
        """Another version, for which these have waited; `share`: the size of its difference from
        the one before, as a share of its own."""
        self.version += 1
        self._followed.append(self._followed[-1] + share)
        self.pending, self.fresh_since, self._fresh = pending, [], set()
        for lease in pending:
            self._count_fresh(lease)

    def share_after(self, held: int, version: int) -> float:
        """What has to be fetched by who holds an older version, as a share of all: differences,
        where they are shorter."""
        return min(self._followed[version] - self._followed[held], 1.0)

    def _count_fresh(self, lease: VirtualLease) -> None:
        if lease.base_version == self.version and lease.worker not in self._fresh:
            self._fresh.add(lease.worker)
            self.fresh_since.append(lease.committed)

    def trained(self, lease: VirtualLease) -> None:
        """No version holds it yet."""
        self._unmerged[lease.worker][lease.lease] = lease.steps

    def settled(self, lease: VirtualLease) -> None:
        """A version holds it, or none ever will."""
        own = self._unmerged[lease.worker]
        own.pop(lease.lease, None)
        if not own:
            del self._unmerged[lease.worker]

    def take(self, most: int) -> tuple[int, int]:
        """(first batch, steps): what came back first, then what was never handed out."""
        while self._order and self._order[0] not in self.gaps:
            heapq.heappop(self._order)
        if self._order:
            first_batch = heapq.heappop(self._order)
            whole = self.gaps.pop(first_batch)
            steps = min(most, whole)
            if whole > steps:
                self._open_gap(first_batch + steps, whole - steps)
        else:
            first_batch = self.next_batch
            steps = min(most, self.total_batches - first_batch)
            self.next_batch += steps
        self._hand_out(steps)
        return first_batch, steps

    def give_back(self, first_batch: int, steps: int) -> None:
        self._open_gap(first_batch, steps)
        self._hand_out(-steps)

    def reclaim(self, first_batch: int, steps: int) -> bool:
        """Take back exactly this range, if nobody else has had it since."""
        if self.gaps.get(first_batch) != steps:
            return False
        del self.gaps[first_batch]
        self._hand_out(steps)
        return True

    def _open_gap(self, first_batch: int, steps: int) -> None:
        self.gaps[first_batch] = steps
        heapq.heappush(self._order, first_batch)

    def _hand_out(self, steps: int) -> None:
        self.to_hand_out -= steps
        self.under_way += steps


def count_out(counted: dict[Counted, int], what: Counted) -> None:
    """One less; what counts nothing is not there."""
    counted[what] -= 1
    if not counted[what]:
        del counted[what]
