"""How a run's blocks stand: read once, then kept up to date for as long as nobody else may change
it.

Every claim looks at all leases that are held and at all updates that wait: hundreds of rows, of
which the claim before has changed one. Whoever writes says here what it wrote, or that all is to be
read again. Knows neither statements nor the clock.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from blocktrain.ledger.prepared import Found
from blocktrain.ledger.schema import HELD
from blocktrain.swarm.state import BlockState, PendingUpdate


class LedgerSnapshot:
    """Of one transaction, or of all those that are committed together."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Something else than what can be said here has happened, or what was said has not."""
        self.known = False
        self._blocks: dict[int, Found] = {}
        self._returned: dict[int, int] = {}
        self._leases: dict[str, Found] = {}
        self._pending: dict[int, dict[str, PendingUpdate]] = defaultdict(dict)
        self._versions: dict[tuple[int, int], Found] = {}
        self._states: dict[int, BlockState] = {}  # of blocks where nothing has changed since

    def learn(
        self,
        blocks: Iterable[Found],
        versions: Iterable[Found],
        returned: Iterable[Found],
        leases: Iterable[Found],
        pending: Iterable[Found],
    ) -> None:
        """All there is: blocks in order, each one's newest version, what came back of it, leases
        that are held, updates that wait."""
        self.forget()
        for row in versions:
            self.version_read(row)
        self._blocks = {row.block: row for row in blocks}
        self._returned = {row.block: int(row.steps) for row in returned}
        self._leases = {row.id: row for row in leases}
        for row in pending:
            self._pending[row.block][row.lease] = _pending(row)
        self.known = True

    def states(self) -> list[BlockState]:
        return [self._state(block) for block in self._blocks]

    def block(self, index: int) -> Found:
        return self._blocks[index]

    def returned(self, block: int) -> int:
        """Batches of it that came back."""
        return self._returned.get(block, 0)

    def lease(self, lease: str) -> Found | None:
        """None where it is not held, or nothing is known."""
        return self._leases.get(lease)

    def open_lease_of(self, worker: str) -> Found | None:
        """The oldest."""
        its = (row for row in self._leases.values() if row.worker == worker and row.state == "open")
        return min(its, key=lambda row: row.created, default=None)

    def version(self, block: int, version: int) -> Found | None:
        """None where it was not read yet."""
        return self._versions.get((block, version))

    def version_read(self, row: Found) -> None:
        self._versions[row.block, row.version] = row

    # What was written

    def block_changed(self, index: int, **values: Any) -> None:
        if self.known:
            self._blocks[index] = self._blocks[index]._replace(**values)
            self._states.pop(index, None)

    def lease_added(self, row: Found) -> None:
        if self.known:
            self._leases[row.id] = row
            self._states.pop(row.block, None)

    def lease_changed(self, lease: str, **values: Any) -> None:
        """Nothing, where it was not held."""
        if row := self._leases.pop(lease, None):
            self._states.pop(row.block, None)
            row = row._replace(**values)
            if row.state in HELD:
                self._leases[lease] = row

    def update_waits(self, block: int, update: PendingUpdate) -> None:
        if self.known:
            self._pending[block][update.lease] = update
            self._states.pop(block, None)

    def _state(self, block: int) -> BlockState:
        if block not in self._states:
            leases = [row for row in self._leases.values() if row.block == block]
            pending = list(self._pending[block].values())
            row, returned = self._blocks[block], self.returned(block)
            self._states[block] = _block_state(row, returned, leases, pending)
        return self._states[block]


def _block_state(
    row: Found, returned: int, held: list[Found], pending: list[PendingUpdate]
) -> BlockState:
    coming = {lease.worker for lease in held}
    coming |= {item.worker for item in pending}
    finishing = {
        lease.worker
        for lease in held
        if lease.state == "sending" and lease.base_version == row.version
    }
    finishing |= {item.worker for item in pending if item.base_version == row.version}
    return BlockState(
        index=row.block,
        version=row.version,
        merged_batches=row.merged_batches,
        next_batch=row.next_batch,
        total_batches=row.total_batches,
        returned_batches=returned,
        leased_batches=sum(lease.steps for lease in held),
        open_leases=len(held),
        workers=frozenset(coming),
        finishing=frozenset(finishing),
        pending=tuple(pending),
        sending=tuple(
            (lease.worker, lease.id, lease.steps) for lease in held if lease.state == "sending"
        ),
        busy_until=max(
            (
                lease.expected
                for lease in held
                if lease.state == "open" and lease.expected is not None
            ),
            default=-math.inf,
        ),
    )


def _pending(row: Found) -> PendingUpdate:
    return PendingUpdate(
        row.lease, row.worker, row.base_version, row.steps, row.committed, row.continues
    )
