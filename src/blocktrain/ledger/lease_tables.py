"""The tables of blocks and leases, and the ranges of batches that leases get."""

import math
from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple

from sqlalchemy import bindparam, delete, func, insert, or_, select, update

from blocktrain.errors import NotFoundError
from blocktrain.ledger.schema import (
    ACTIVE,
    BlockRow,
    LeaseRow,
    LeaseStatus,
    Statements,
    blocks,
    gaps,
    in_state,
    leases,
    runs,
    the_block,
    the_lease,
    the_worker,
    updates,
    workers,
)
from blocktrain.swarm.state import BlockState, PendingUpdate

# Frequent statements are built once, as constants: building one takes five times as long as running
# it.


class Range(NamedTuple):
    """The batches of a lease, and its fence."""

    first_batch: int
    steps: int
    fence: int


class BlockTable(Statements):
    ALL = select(blocks).order_by(blocks.c.block)
    LOCK = select(blocks.c.block).order_by(blocks.c.block).with_for_update()
    GET = select(blocks).where(blocks.c.block == the_block)

    def lock(self) -> None:
        """Prevent other transactions from leasing, returning or merging until this one ends. Take
        this lock before any other, so that no deadlock is possible."""
        self.lock_by(self.LOCK)

    def add(self, row: BlockRow) -> None:
        self.write(insert(blocks), **vars(row))

    def get(self, index: int) -> BlockRow:
        row = self.first(BlockRow, self.GET, the_block=index)
        if row is None:
            raise NotFoundError(f"the ledger has no block {index}")
        return row

    TOTAL = select(func.max(blocks.c.total_batches))

    def total(self) -> int:
        """How many batches each block is trained on."""
        return int(self.connection.execute(self.TOTAL).scalar_one())

    RETURNED = select(gaps.c.block, func.sum(gaps.c.steps)).group_by(gaps.c.block)
    HELD_LEASES = select(
        *leases.c["block", "worker", "id", "steps", "base_version", "state", "expected"]
    ).where(in_state(leases, *ACTIVE))
    PENDING = select(
        *updates.c["block", "lease", "worker", "base_version", "steps", "committed", "continues"],
        or_(updates.c.checked, ~select(runs.c.requires_checks).scalar_subquery()),
    ).where(in_state(updates, "pending"))

    def states(self) -> list[BlockState]:
        """All blocks in order, with their active leases and pending updates."""
        returned = {block: int(steps) for block, steps in self.connection.execute(self.RETURNED)}
        active: dict[int, list[_ActiveLease]] = defaultdict(list)
        for block, *columns in self.connection.execute(self.HELD_LEASES):
            active[block].append(_ActiveLease(*columns))
        pending: dict[int, list[PendingUpdate]] = defaultdict(list)
        unchecked: dict[int, list[PendingUpdate]] = defaultdict(list)
        for block, *columns, counts in self.connection.execute(self.PENDING):
            (pending if counts else unchecked)[block].append(PendingUpdate(*columns))
        return [
            _state(
                row,
                returned.get(row.block, 0),
                active[row.block],
                unchecked[row.block],
                pending[row.block],
            )
            for row in self.rows(BlockRow, self.ALL)
        ]

    SET = update(blocks).where(blocks.c.block == the_block)
    HAND_OUT = SET.values(next_batch=bindparam("end"), fence=bindparam("token"))

    def take_range(self, block: int, most: int) -> Range:
        """Take up to `most` batches for a lease: returned ones first, then new ones."""
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
        """Take up to `most` batches of the first returned range, as (first batch, steps)."""
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
        """Let a range of batches be leased again."""
        self.write(insert(gaps), block=block, first_batch=first_batch, steps=steps)

    def reclaim_range(self, block: int, first_batch: int, steps: int) -> bool:
        """Take exactly this range from the returned ones. Returns False if it was leased again."""
        same = (gaps.c.block == block, gaps.c.first_batch == first_batch, gaps.c.steps == steps)
        return bool(self.write(delete(gaps).where(*same)))

    COUNT_MET = SET.values(leases_met=blocks.c.leases_met + 1)
    COUNT_MISSED = SET.values(leases_missed=blocks.c.leases_missed + 1)

    def count_lease(self, block: int, *, met: bool) -> None:
        self.write(self.COUNT_MET if met else self.COUNT_MISSED, the_block=block)

    def claim_merge(self, block: int, version: int, now: float, seconds: float) -> bool:
        """Claim a merge for these seconds, so that other coordinators do not do the same work.
        Returns False if there is a claim already. Only `publish` is decisive, so a claim that is
        never released just costs this time."""
        free = update(blocks).where(
            blocks.c.block == block, blocks.c.version == version, blocks.c.merging_until < now
        )
        return bool(self.write(free.values(merging_until=now + seconds)))

    def begin_rollback(self, block: int, now: float, pause: float) -> bool:
        """Record that an automatic rollback begins; False if the last one was less than this pause
        ago."""
        rested = update(blocks).where(blocks.c.block == block, blocks.c.rolled_back < now - pause)
        return bool(self.write(rested.values(rolled_back=now)))

    def release_merge(self, block: int, version: int) -> None:
        """End a claim early because the merge failed."""
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

    SINCE = select(func.count()).where(leases.c.id > the_lease, leases.c.worker == the_worker)

    def count_since(self, worker: str, lease: str) -> int:
        """How many leases a worker got after this one; their ids begin with the time."""
        return self.connection.execute(
            self.SINCE, {"the_lease": lease, "the_worker": worker}
        ).scalar_one()

    ALL_ACTIVE = select(leases).where(in_state(leases, *ACTIVE))

    def active(self) -> list[LeaseRow]:
        return self.rows(LeaseRow, self.ALL_ACTIVE)

    OVERDUE = ALL_ACTIVE.where(leases.c.deadline < bindparam("now"))

    def overdue(self, now: float) -> list[LeaseRow]:
        return self.rows(LeaseRow, self.OVERDUE, now=now)

    SILENT = (
        select(leases)
        .join(workers, workers.c.id == leases.c.worker)
        .where(in_state(leases, *ACTIVE), workers.c.seen < bindparam("since"))
    )

    def silent(self, since: float) -> list[LeaseRow]:
        """Held leases whose worker was last heard from before this time."""
        return self.rows(LeaseRow, self.SILENT, since=since)

    SET = update(leases).where(leases.c.id == the_lease)
    MOVE = SET.where(in_state(leases, *ACTIVE)).values(state=bindparam("to"))

    def move(self, lease: str, state: LeaseStatus) -> bool:
        """Change the state of an active lease. Returns False if it is not active any more."""
        return bool(self.write(self.MOVE, the_lease=lease, to=state))

    TRAINED = SET.where(leases.c.worker == the_worker, in_state(leases, "open"))
    MARK_TRAINED = TRAINED.values(state="sending")

    def mark_trained(self, lease: str, worker: str) -> None:
        """Record that a worker has trained its open lease to the end, and will send the update."""
        self.write(self.MARK_TRAINED, the_lease=lease, the_worker=worker)

    SET_EXPECTED = SET.values(expected=bindparam("at"))

    def set_expected(self, lease: str, at: float) -> None:
        """Set when the lease's update is expected, according to its progress."""
        self.write(self.SET_EXPECTED, the_lease=lease, at=at)

    SHORTEN = SET.where(in_state(leases, "open")).values(steps=bindparam("shorter"))

    def shorten(self, lease: str, steps: int) -> bool:
        """Reduce an open lease to its first steps. Returns False if it is not open."""
        return bool(self.write(self.SHORTEN, the_lease=lease, shorter=steps))

    COUNTED = (
        select(updates.c.lease)
        .where(updates.c.lease == leases.c.id, in_state(updates, "pending", "merged"))
        .exists()
    )
    LOST = (
        select(leases.c.block, func.sum(leases.c.steps))
        .where(in_state(leases, "expired"), ~COUNTED)
        .group_by(leases.c.block)
    )

    def steps_lost(self) -> dict[int, int]:
        """By block, the steps of expired leases whose update does not count."""
        return {block: int(steps) for block, steps in self.connection.execute(self.LOST)}

    SET_DEADLINE = SET.values(deadline=bindparam("at"))

    def set_deadline(self, lease: str, at: float) -> None:
        self.write(self.SET_DEADLINE, the_lease=lease, at=at)

    def return_expired(self, lease: str) -> bool:
        """Mark an expired lease as returned. Returns False if it has not expired, or was returned
        before."""
        expired = update(leases).where(leases.c.id == lease, in_state(leases, "expired"))
        return bool(self.write(expired.values(state="returned")))

    def reopen_unsent(self, worker: str) -> None:
        """Reopen the leases of a restarted worker whose updates were never offered."""
        offered = select(updates.c.lease).where(updates.c.lease == leases.c.id).exists()
        unsent = (leases.c.worker == worker, in_state(leases, "sending"), ~offered)
        self.write(update(leases).where(*unsent).values(state="open"))


class _ActiveLease(NamedTuple):
    worker: str
    lease: str
    steps: int
    base_version: int
    state: str
    expected: float | None


def _state(
    row: BlockRow,
    returned: int,
    active: list[_ActiveLease],
    unchecked: list[PendingUpdate],
    pending: list[PendingUpdate],
) -> BlockState:
    """`unchecked`: updates that wait for their checks. Until they are done, an update counts as one
    that is being sent, and its lease as open."""
    sending = [lease for lease in active if lease.state == "sending"]
    unfinished: list[_ActiveLease | PendingUpdate] = [*active, *unchecked]
    arriving: list[_ActiveLease | PendingUpdate] = [*sending, *unchecked, *pending]
    trained_until = [
        lease.expected for lease in active if lease.state == "open" and lease.expected is not None
    ]
    return BlockState(
        index=row.block,
        version=row.version,
        merged_batches=row.merged_batches,
        next_batch=row.next_batch,
        total_batches=row.total_batches,
        returned_batches=returned,
        leased_batches=sum(each.steps for each in unfinished),
        open_leases=len(unfinished),
        workers=frozenset(each.worker for each in [*unfinished, *pending]),
        finishing=frozenset(each.worker for each in arriving if each.base_version == row.version),
        pending=tuple(pending),
        sending=tuple((each.worker, each.lease, each.steps) for each in sending),
        unchecked=tuple(unchecked),
        busy_until=max(trained_until, default=-math.inf),
    )
