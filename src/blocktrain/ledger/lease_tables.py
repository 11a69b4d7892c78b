"""Blocks, the ranges of text that are handed out of each, and the leases on these ranges."""

import math
from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple

from sqlalchemy import Connection, bindparam, delete, func, insert, select, update

from blocktrain.errors import NotFoundError
from blocktrain.ledger.rows import BlockRow, LeaseRow, Statements
from blocktrain.ledger.schema import (
    HELD,
    LeaseStatus,
    blocks,
    gaps,
    in_state,
    leases,
    the_block,
    the_lease,
    the_worker,
    updates,
    workers,
)
from blocktrain.swarm.state import BlockState, PendingUpdate

# Statements that every request needs are built once, as constants: building one takes five times as
# long as running it.


class Range(NamedTuple):
    """Batches to hand out, and the fencing token of the lease on them."""

    first_batch: int
    steps: int
    fence: int


class BlockTable(Statements):
    def __init__(self, connection: Connection, *, locked: bool) -> None:
        """`locked`: the transaction began by locking all blocks."""
        super().__init__(connection)
        self._locked = locked

    ALL = select(blocks).order_by(blocks.c.block)
    LOCK = select(blocks.c.block).order_by(blocks.c.block).with_for_update()
    GET = select(blocks).where(blocks.c.block == the_block)

    def lock(self) -> None:
        """Until this transaction ends no other hands out, takes back or merges. A transaction
        that needs the lock takes it first, so that no two wait for each other."""
        if not self._locked:
            self.connection.execute(self.LOCK)
            self._locked = True

    def add(self, row: BlockRow) -> None:
        self.write(insert(blocks), **vars(row))

    def get(self, index: int) -> BlockRow:
        row = self.first(BlockRow, self.GET, the_block=index)
        if row is None:
            raise NotFoundError(f"the ledger has no block {index}")
        return row

    RETURNED = select(gaps.c.block, func.sum(gaps.c.steps)).group_by(gaps.c.block)
    HELD_LEASES = select(
        leases.c.block,
        leases.c.worker,
        leases.c.id,
        leases.c.steps,
        leases.c.base_version,
        leases.c.state,
        leases.c.expected,
    ).where(in_state(leases, *HELD))
    PENDING = select(
        updates.c.block,
        updates.c.lease,
        updates.c.worker,
        updates.c.base_version,
        updates.c.steps,
        updates.c.committed,
        updates.c.continues,
    ).where(in_state(updates, "pending"))

    def states(self) -> list[BlockState]:
        """All blocks in order, with the leases that are held and the updates that wait."""
        returned = {block: int(steps) for block, steps in self.connection.execute(self.RETURNED)}
        held: dict[int, list[_HeldLease]] = defaultdict(list)
        for block, *columns in self.connection.execute(self.HELD_LEASES):
            held[block].append(_HeldLease(*columns))
        pending: dict[int, list[PendingUpdate]] = defaultdict(list)
        for block, *columns in self.connection.execute(self.PENDING):
            pending[block].append(PendingUpdate(*columns))
        return [
            _state(row, returned.get(row.block, 0), held[row.block], pending[row.block])
            for row in self.rows(BlockRow, self.ALL)
        ]

    HAND_OUT = (
        update(blocks)
        .where(blocks.c.block == the_block)
        .values(next_batch=bindparam("end"), fence=bindparam("token"))
    )

    def take_range(self, block: int, most: int) -> Range:
        """Up to `most` batches to hand out: returned ones first, then new ones."""
        row = self.get(block)
        fence, end = row.fence + 1, row.next_batch
        if gap := self._take_gap(block, most):
            first_batch, steps = gap
        else:
            first_batch, steps = end, min(most, row.total_batches - end)
            end += steps
        self.write(self.HAND_OUT, the_block=block, end=end, token=fence)
        return Range(first_batch, steps, fence)

    FIRST_GAP = (
        select(gaps.c.first_batch, gaps.c.steps)
        .where(gaps.c.block == the_block)
        .order_by(gaps.c.first_batch)
        .limit(1)
    )

    def _take_gap(self, block: int, most: int) -> tuple[int, int] | None:
        """(first batch, steps) of the first returned range; the rest of it stays returned."""
        gap = self.connection.execute(self.FIRST_GAP, {"the_block": block}).first()
        if gap is None:
            return None
        first_batch, whole = gap
        self.reclaim_range(block, first_batch, whole)
        steps = min(most, whole)
        if steps < whole:
            self.give_back_range(block, first_batch + steps, whole - steps)
        return first_batch, steps

    def give_back_range(self, block: int, first_batch: int, steps: int) -> None:
        self.write(insert(gaps), block=block, first_batch=first_batch, steps=steps)

    def reclaim_range(self, block: int, first_batch: int, steps: int) -> bool:
        """Take back exactly this range; False if any of it was handed out again."""
        same = (gaps.c.block == block, gaps.c.first_batch == first_batch, gaps.c.steps == steps)
        return bool(self.write(delete(gaps).where(*same)))

    COUNT_MET = (
        update(blocks).where(blocks.c.block == the_block).values(leases_met=blocks.c.leases_met + 1)
    )
    COUNT_MISSED = (
        update(blocks)
        .where(blocks.c.block == the_block)
        .values(leases_missed=blocks.c.leases_missed + 1)
    )

    def count_lease(self, block: int, *, met: bool) -> None:
        self.write(self.COUNT_MET if met else self.COUNT_MISSED, the_block=block)

    def claim_merge(self, block: int, version: int, now: float, seconds: float) -> bool:
        """Announce a merge, so that other coordinators do not do the same work; False if one is
        announced already. Only `publish` decides, so a claim that is never released costs no more
        than these seconds."""
        free = update(blocks).where(
            blocks.c.block == block, blocks.c.version == version, blocks.c.merging_until < now
        )
        return bool(self.write(free.values(merging_until=now + seconds)))

    def release_merge(self, block: int, version: int) -> None:
        """The merge failed: others need not wait until its announced time is over."""
        same = update(blocks).where(blocks.c.block == block, blocks.c.version == version)
        self.write(same.values(merging_until=0.0))


class LeaseTable(Statements):
    ADD = insert(leases)
    GET = select(leases).where(leases.c.id == the_lease)

    def add(self, row: LeaseRow) -> None:
        self.write(self.ADD, **vars(row))

    def get(self, lease: str) -> LeaseRow | None:
        return self.first(LeaseRow, self.GET, the_lease=lease)

    OPEN_OF = (
        select(leases)
        .where(leases.c.worker == the_worker, in_state(leases, "open"))
        .order_by(leases.c.created)
        .limit(1)
    )

    def open_of(self, worker: str) -> LeaseRow | None:
        """A worker's oldest open lease."""
        return self.first(LeaseRow, self.OPEN_OF, the_worker=worker)

    def of_worker(self, worker: str, states: Collection[LeaseStatus]) -> list[LeaseRow]:
        same = select(leases).where(leases.c.worker == worker, in_state(leases, *states))
        return self.rows(LeaseRow, same.order_by(leases.c.created))

    ALL_HELD = select(leases).where(in_state(leases, *HELD))

    def held(self) -> list[LeaseRow]:
        return self.rows(LeaseRow, self.ALL_HELD)

    OVERDUE = ALL_HELD.where(leases.c.deadline < bindparam("now"))

    def overdue(self, now: float) -> list[LeaseRow]:
        return self.rows(LeaseRow, self.OVERDUE, now=now)

    SILENT = (
        select(leases)
        .join(workers, workers.c.id == leases.c.worker)
        .where(in_state(leases, *HELD), workers.c.seen < bindparam("since"))
    )

    def silent(self, since: float) -> list[LeaseRow]:
        """Held leases whose worker was last heard of before this time."""
        return self.rows(LeaseRow, self.SILENT, since=since)

    MOVE = (
        update(leases)
        .where(leases.c.id == the_lease, in_state(leases, *HELD))
        .values(state=bindparam("to"))
    )

    def move(self, lease: str, state: LeaseStatus) -> bool:
        """Give a held lease another state; False if it is not held any more."""
        return bool(self.write(self.MOVE, the_lease=lease, to=state))

    MARK_TRAINED = (
        update(leases)
        .where(
            leases.c.id == the_lease,
            leases.c.worker == the_worker,
            in_state(leases, "open"),
        )
        .values(state="sending")
    )

    def mark_trained(self, lease: str, worker: str) -> None:
        """The worker has reached the end of its open lease: the update is on its way."""
        self.write(self.MARK_TRAINED, the_lease=lease, the_worker=worker)

    SET_EXPECTED = update(leases).where(leases.c.id == the_lease).values(expected=bindparam("at"))

    def set_expected(self, lease: str, at: float) -> None:
        """When the lease's update is expected, by its progress so far."""
        self.write(self.SET_EXPECTED, the_lease=lease, at=at)

    SET_DEADLINE = update(leases).where(leases.c.id == the_lease).values(deadline=bindparam("at"))

    def set_deadline(self, lease: str, at: float) -> None:
        self.write(self.SET_DEADLINE, the_lease=lease, at=at)

    def return_expired(self, lease: str) -> bool:
        """Mark an expired lease returned; False if it did not expire or was returned before."""
        expired = update(leases).where(leases.c.id == lease, in_state(leases, "expired"))
        return bool(self.write(expired.values(state="returned")))

    def reopen_unsent(self, worker: str) -> None:
        """Open again the leases of a restarted worker of which no update was offered."""
        offered = select(updates.c.lease).where(updates.c.lease == leases.c.id).exists()
        unsent = (leases.c.worker == worker, in_state(leases, "sending"), ~offered)
        self.write(update(leases).where(*unsent).values(state="open"))


class _HeldLease(NamedTuple):
    worker: str
    id: str
    steps: int
    base_version: int
    state: str
    expected: float | None


def _state(
    row: BlockRow, returned: int, held: list[_HeldLease], pending: list[PendingUpdate]
) -> BlockState:
    sending = [lease for lease in held if lease.state == "sending"]
    arriving: list[_HeldLease | PendingUpdate] = [*sending, *pending]
    trained_until = [
        lease.expected for lease in held if lease.state == "open" and lease.expected is not None
    ]
    return BlockState(
        index=row.block,
        version=row.version,
        merged_batches=row.merged_batches,
        next_batch=row.next_batch,
        total_batches=row.total_batches,
        returned_batches=returned,
        leased_batches=sum(lease.steps for lease in held),
        open_leases=len(held),
        workers=frozenset({lease.worker for lease in held} | {each.worker for each in pending}),
        finishing=frozenset(e.worker for e in arriving if e.base_version == row.version),
        pending=tuple(pending),
        sending=tuple((lease.worker, lease.id, lease.steps) for lease in sending),
        busy_until=max(trained_until, default=-math.inf),
    )
