"""The state of a run's blocks that decisions are based on.

A ledger reads a new `BlockState` for every decision; a simulation updates one object in place. The
rules accept both, because they take a `BlockView`.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar


class LeaseView(Protocol):
    """What the rules read of an open lease."""

    @property
    def worker(self) -> str: ...
    @property
    def steps(self) -> int: ...
    @property
    def created(self) -> float: ...
    @property
    def deadline(self) -> float: ...
    @property
    def expected(self) -> float | None: ...


class UpdateView(Protocol):
    """What the rules read of a pending update."""

    @property
    def lease(self) -> str: ...
    @property
    def continues(self) -> str | None: ...
    @property
    def worker(self) -> str: ...
    @property
    def base_version(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def committed(self) -> float: ...


Update_co = TypeVar("Update_co", bound=UpdateView, covariant=True)


class BlockView(Protocol[Update_co]):
    """What the rules read of a block; `BlockState` explains the fields."""

    @property
    def index(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def total_batches(self) -> int: ...
    @property
    def merged_batches(self) -> int: ...
    @property
    def to_hand_out(self) -> int: ...
    @property
    def under_way(self) -> int: ...
    @property
    def open_leases(self) -> int: ...
    @property
    def busy_until(self) -> float: ...
    @property
    def workers(self) -> Collection[str]: ...
    @property
    def finishing(self) -> Collection[str]: ...
    @property
    def pending(self) -> Sequence[Update_co]: ...
    @property
    def waiting_since(self) -> float: ...
    @property
    def fresh_since(self) -> Sequence[float]: ...
    def unmerged(self, worker: str) -> Mapping[str, int]: ...


@dataclass(frozen=True)
class PendingUpdate:
    """A verified update that is to be merged."""

    lease: str
    worker: str
    base_version: int
    steps: int
    committed: float
    continues: str | None = None  # the lease whose end it started from


@dataclass(frozen=True)
class BlockState:
    index: int
    version: int
    merged_batches: int
    next_batch: int  # the first batch that was never leased
    total_batches: int
    returned_batches: int  # leased before, then returned or lost
    leased_batches: int
    open_leases: int
    workers: frozenset[str]  # with a lease or a pending update of this block
    finishing: frozenset[str]  # with an update of the current version that is sent or pending
    pending: tuple[PendingUpdate, ...]  # without those that wait for their checks
    sending: tuple[tuple[str, str, int], ...] = ()  # (worker, lease, steps) that are being sent
    unchecked: tuple[PendingUpdate, ...] = ()  # their leases count as open
    busy_until: float = -math.inf  # when the last update of the open leases should arrive

    @property
    def to_hand_out(self) -> int:
        """Batches that can be leased."""
        return self.total_batches - self.next_batch + self.returned_batches

    @property
    def under_way(self) -> int:
        """Batches that are merged, leased or pending."""
        return self.merged_batches + self.leased_batches + sum(u.steps for u in self.pending)

    @property
    def waiting_since(self) -> float:
        """When the first pending update arrived; infinite if there is none."""
        return min((update.committed for update in self.pending), default=math.inf)

    @property
    def fresh_since(self) -> list[float]:
        """When each worker's first update of the current version arrived, in order."""
        arrivals: dict[str, float] = {}
        for update in self.pending:
            if update.base_version == self.version:
                arrivals[update.worker] = min(
                    update.committed, arrivals.get(update.worker, math.inf)
                )
        return sorted(arrivals.values())

    def unmerged(self, worker: str) -> dict[str, int]:
        """A worker's trained leases that are in no version yet: their steps, by lease."""
        sending: dict[str, int] = {
            lease: steps for sender, lease, steps in self.sending if sender == worker
        }
        waiting = (*self.unchecked, *self.pending)
        return sending | {u.lease: u.steps for u in waiting if u.worker == worker}

    @property
    def finished(self) -> bool:
        return not (self.to_hand_out or self.open_leases or self.pending)
