"""What a plan decides on: the state of a run's blocks at one moment, as plain values.

A ledger reads a `BlockState` whenever it is asked; a simulation keeps one state and changes it. The
plan takes either, because it asks for no more than a `BlockView`.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar


class LeaseView(Protocol):
    """What a plan reads of a lease that is trained."""

    @property
    def steps(self) -> int: ...
    @property
    def created(self) -> float: ...
    @property
    def deadline(self) -> float: ...
    @property
    def expected(self) -> float | None: ...


class UpdateView(Protocol):
    """What a plan reads of an update that waits to be merged."""

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
    """What a plan reads of a block; `BlockState` says what each of these means."""

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
    """A verified update that waits to be merged."""

    lease: str
    worker: str
    base_version: int
    steps: int
    committed: float
    continues: str | None = None  # the lease whose end it was trained from


@dataclass(frozen=True)
class BlockState:
    index: int
    version: int
    merged_batches: int
    next_batch: int  # the first that was never handed out
    total_batches: int
    returned_batches: int  # handed out once, given back or lost
    leased_batches: int
    open_leases: int
    workers: frozenset[str]  # that hold a lease of it, or sent an update that waits
    finishing: frozenset[str]  # of these, whose update of the current version is on its way in
    pending: tuple[PendingUpdate, ...]
    sending: tuple[tuple[str, str, int], ...] = ()  # worker, lease, steps
    busy_until: float = -math.inf  # when the last of those who train now is expected to have sent

    @property
    def to_hand_out(self) -> int:
        return self.total_batches - self.next_batch + self.returned_batches

    @property
    def under_way(self) -> int:
        """Batches merged, or in somebody's hands."""
        return self.merged_batches + self.leased_batches + sum(u.steps for u in self.pending)

    @property
    def waiting_since(self) -> float:
        """When the first of the updates that wait came; infinity where none does."""
        return min((update.committed for update in self.pending), default=math.inf)

    @property
    def fresh_since(self) -> list[float]:
        """When each worker's first update of the current version came, in order."""
        came: dict[str, float] = {}
        for update in self.pending:
            if update.base_version == self.version:
                came[update.worker] = min(update.committed, came.get(update.worker, math.inf))
        return sorted(came.values())

    def unmerged(self, worker: str) -> dict[str, int]:
        """Leases a worker has trained that no version holds yet: how many steps each had."""
        sending: dict[str, int] = {
            lease: steps for sender, lease, steps in self.sending if sender == worker
        }
        return sending | {u.lease: u.steps for u in self.pending if u.worker == worker}

    @property
    def finished(self) -> bool:
        return not (self.to_hand_out or self.open_leases or self.pending)
