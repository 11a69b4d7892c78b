"""Who holds which lease, which version is current, what was promised to whom: the statements of one
transaction, each named by what it means."""

from collections import namedtuple
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import sqlalchemy as sql
from sqlalchemy import func, insert, select, update

from blocktrain.errors import NotFoundError
from blocktrain.ledger import statements
from blocktrain.ledger.people import People
from blocktrain.ledger.prepared import Found
from blocktrain.ledger.records import Records
from blocktrain.ledger.schema import (
    LIVE,
    blocks,
    differences,
    gaps,
    leases,
    retired,
    runs,
    updates,
    versions,
    workers,
)
from blocktrain.ledger.session import StatementSession
from blocktrain.ledger.standing import LedgerSnapshot
from blocktrain.ledger.statements import in_state
from blocktrain.protocol.messages import Blob
from blocktrain.swarm.state import BlockState, PendingUpdate


@dataclass(frozen=True)
class Version:
    block: int
    version: int
    weights: Blob
    velocity: Blob | None
    owed: Blob | None
    merged_batches: int
    created: float


class Range(NamedTuple):
    """Text to hand out, and the fencing token of whoever gets it."""

    first_batch: int
    steps: int
    fence: int


_LeaseRow = namedtuple("_LeaseRow", leases.c.keys())  # type: ignore[misc]  # as one that was read


class Transaction:
    def __init__(self, session: StatementSession, standing: LedgerSnapshot) -> None:
        self._session, self._standing = session, standing
        self.people, self.records = People(session), Records(session)

    # The run

    def begin_run(self) -> bool:
        """Keep others from founding a run until this one is written; False where there is one."""
        if self._session.connection.dialect.name == "postgresql":
            self._session.connection.exec_driver_sql("LOCK TABLE runs IN SHARE ROW EXCLUSIVE MODE")
        return self.run() is None

    def create_run(self, **values: Any) -> None:
        self._session.run(insert(runs).values(**values, finished=None))

    def run(self) -> Found | None:
        return self._session.run(select(runs)).first()

    def finish_run(self, now: float) -> bool:
        """Mark the run finished; False where it was already."""
        return self._session.changed(
            update(runs).where(runs.c.finished.is_(None)).values(finished=now)
        )

    def add_block(self, index: int, total_batches: int, weights: Blob, now: float) -> None:
        zeros = dict.fromkeys(
            ("version", "merged_batches", "next_batch", "fence", "leases_met", "leases_missed",
             "merging_until"), 0,
        )  # fmt: skip
        self._session.run(insert(blocks).values(block=index, total_batches=total_batches, **zeros))
        self._add_version(index, 0, 0, now, weights)
        self._standing.forget()

    # Blocks and leases

    def lock_blocks(self) -> None:
        """Nobody else hands out, takes back or merges until this transaction is over. Comes first
        in every transaction that needs it: whoever waits for it holds nothing others wait for."""
        if not self._session.alone:
            self._session.tell(statements.LOCK_BLOCKS)
            self._standing.forget()

    def expect_claim(self, worker: str) -> None:
        """Ask for all that a claim looks at first, at once: each is read when it is its turn."""
        self._session.ask(statements.WORKER, of_worker=worker)
        if not self._standing.known:
            self._ask_standing()

    def expect_update(self, worker: str, lease: str) -> None:
        """The same for an update that is offered or settled."""
        self._session.ask(statements.WORKER, of_worker=worker)
        if self._standing.lease(lease) is None:
            self._session.ask(statements.LEASE, of_lease=lease)
        self._session.ask(statements.UPDATE, of_lease=lease)

    def block_states(self) -> list[BlockState]:
        return self._known_standing().states()

    def block(self, index: int) -> Found | None:
        return self._session.first(statements.BLOCK, of_block=index)

    def block_version(self, index: int) -> int:
        """The newest, on which all others build."""
        row = self._standing.block(index) if self._standing.known else self.block(index)
        assert row is not None
        return int(row.version)

    def take_range(self, block: int, most: int) -> Range:
        """What came back first, then what was never handed out."""
        standing = self._known_standing()
        row, returned = standing.block(block), standing.returned(block)
        fence, end = row.fence + 1, row.next_batch
        if returned:
            first_batch, steps = self._take_gap(block, most)
        else:
            first_batch, steps = end, min(most, row.total_batches - end)
            end += steps
        self._session.tell(statements.HAND_OUT, of_block=block, end=end, token=fence)
        self._standing.block_changed(block, next_batch=end, fence=fence)
        return Range(first_batch, steps, fence)

    def give_back_range(self, block: int, first_batch: int, steps: int) -> None:
        self._session.run(insert(gaps).values(block=block, first_batch=first_batch, steps=steps))
        self._standing.forget()

    def reclaim_range(self, block: int, first_batch: int, steps: int) -> bool:
        """Take back exactly this range, if nobody else has had it since."""
        chosen = sql.delete(gaps).where(
            gaps.c.block == block, gaps.c.first_batch == first_batch, gaps.c.steps == steps
        )
        self._standing.forget()
        return self._session.changed(chosen)

    def add_lease(self, **values: Any) -> Found:
        """Record a lease as open."""
        row = _LeaseRow(**{"continues": None, "expected": None, **values, "state": "open"})
        self._session.tell(statements.ADD_LEASE, **row._asdict())
        self._standing.lease_added(row)
        return row

    def lease(self, lease: str) -> Found | None:
        return self._standing.lease(lease) or self._session.first(statements.LEASE, of_lease=lease)

    def open_lease_of(self, worker: str) -> Found | None:
        return self._known_standing().open_lease_of(worker)

    def leases_of(self, worker: str, states: Collection[str]) -> Sequence[Found]:
        chosen = select(leases).where(leases.c.worker == worker, in_state(leases, *states))
        return self._session.run(chosen.order_by(leases.c.created)).all()

    def move_lease(self, lease: str, state: str) -> bool:
        """Move a lease on; False where it is nobody's any more."""
        self._standing.lease_changed(lease, state=state)
        return self._session.change(statements.MOVE_LEASE, of_lease=lease, to=state)

    def trained_lease(self, lease: str, worker: str) -> None:
        """Its worker has come to the end of an open lease: the update is on its way."""
        self._session.tell(statements.TRAINED_LEASE, of_lease=lease, of_worker=worker)
        held = self._standing.lease(lease)
        if held and held.worker == worker:
            self._standing.lease_changed(lease, state="sending")

    def expect_lease(self, lease: str, at: float) -> None:
        """When its update is to be there, by what is known now."""
        self._session.tell(statements.EXPECT_LEASE, of_lease=lease, at=at)
        self._standing.lease_changed(lease, expected=at)

    def move_deadline(self, lease: str, deadline: float) -> None:
        self._session.tell(statements.MOVE_DEADLINE, of_lease=lease, until=deadline)
        self._standing.lease_changed(lease, deadline=deadline)

    def move_lease_if_held(self, lease: str, state: str) -> None:
        """The same for whoever does not ask: nothing waits for it."""
        self._session.tell(statements.MOVE_LEASE, of_lease=lease, to=state)
        self._standing.lease_changed(lease, state=state)

    def return_expired(self, lease: str) -> bool:
        """A lease that ran out is given back after all; False where it did not, or was before."""
        chosen = update(leases).where(leases.c.id == lease, in_state(leases, "expired"))
        return self._session.changed(chosen.values(state="returned"))

    def forget_owed(self, block: int, version: int) -> None:
        """What a version owed is lost, and nobody may look for it."""
        chosen = update(versions).where(versions.c.block == block, versions.c.version == version)
        self._session.run(chosen.values(owed=None, owed_size=None))
        self._standing.forget()

    def overdue(self, now: float) -> Sequence[Found]:
        return self._session.rows(statements.OVERDUE, now=now)

    def silent(self, now: float, silence: float) -> Sequence[Found]:
        """Leases that are held by workers not heard of for more than so many seconds."""
        return self._session.rows(statements.SILENT, now=now, silence=silence)

    def held_leases(self) -> Sequence[Found]:
        return self._session.rows(statements.HELD_LEASES)

    def count_lease(self, block: int, *, met: bool) -> None:
        self._session.tell(statements.COUNT_MET if met else statements.COUNT_MISSED, of_block=block)

    # Updates and versions

    def add_update(self, **values: Any) -> Found:
        offered = {
            **values, "state": "offered", "reason": "", "weight": 0.0, "committed": None,
            "merged_into": None,
        }  # fmt: skip
        self._session.tell(statements.ADD_UPDATE, **offered)
        return SimpleNamespace(**offered)

    def update(self, lease: str) -> Found | None:
        return self._session.first(statements.UPDATE, of_lease=lease)

    def updates_of(self, worker: str, states: Collection[str]) -> Sequence[Found]:
        chosen = select(updates).where(updates.c.worker == worker, in_state(updates, *states))
        return self._session.run(chosen).all()

    def waiting_updates(self, block: int) -> dict[str, Found]:
        """All of those that wait to be merged into a block, by lease."""
        return {row.lease: row for row in self._session.rows(statements.WAITING, of_block=block)}

    def accept_update(self, offered: Found, base: int, weight: float, now: float) -> None:
        """`base`: the version it counts as trained from."""
        if offered.state != "offered":
            return
        accepted = {"base": base, "share": weight, "now": now}
        self._session.tell(statements.ACCEPT_UPDATE, of_lease=offered.lease, **accepted)
        waits = PendingUpdate(
            offered.lease, offered.worker, base, offered.steps, now, offered.continues
        )
        self._standing.update_waits(offered.block, waits)

    def refuse_update(self, lease: str, reason: str) -> bool:
        chosen = update(updates).where(updates.c.lease == lease)
        chosen = chosen.where(in_state(updates, *LIVE))
        self._standing.forget()
        return self._session.changed(
            chosen.values(state="refused", reason=reason[:500], weight=0.0)
        )

    def claim_merge(self, block: int, version: int, now: float, seconds: float) -> bool:
        """Announce a merge, so that other coordinators do not do the same work. Only `publish`
        decides: a claim that outlives its maker costs nothing but the wait."""
        chosen = update(blocks).where(
            blocks.c.block == block, blocks.c.version == version, blocks.c.merging_until < now
        )
        return self._session.changed(chosen.values(merging_until=now + seconds))

    def release_merge(self, block: int, version: int) -> None:
        """A merge that failed: others need not wait for its announced time to end."""
        chosen = update(blocks).where(blocks.c.block == block, blocks.c.version == version)
        self._session.run(chosen.values(merging_until=0.0))

    def publish(
        self,
        block: int,
        version: int,
        weights: Blob,
        velocity: Blob | None,
        merged: Sequence[PendingUpdate],
        now: float,
        *,
        difference: Blob | None = None,
        owed: Blob | None = None,
    ) -> bool:
        """Version + 1, if the block still stands at `version` and every update still waits. It
        comes with the difference that leads to it, and with what that left out."""
        self.lock_blocks()
        self._standing.forget()
        names = {item.lease for item in merged}
        waiting = {row.lease: row for row in self._session.rows(statements.PENDING)}
        if not names <= waiting.keys():
            return False
        steps = sum(item.steps for item in merged)
        swapped = self._session.changed(
            update(blocks)
            .where(blocks.c.block == block, blocks.c.version == version)
            .values(
                version=version + 1,
                merged_batches=blocks.c.merged_batches + steps,
                merging_until=0.0,
            )
        )
        if not swapped:
            return False
        row = self.block(block)
        assert row is not None
        self._add_version(block, version + 1, row.merged_batches, now, weights, velocity, owed)
        if difference:
            leads = {"block": block, "version": version + 1}
            self._session.run(insert(differences).values(**leads, **difference.model_dump()))
        self._merged(names, version + 1)
        for row in waiting.values():
            # Came in meanwhile and continues what was merged: counts as trained from that.
            if row.lease not in names and row.continues in names:
                self._session.tell(statements.REBASE_UPDATE, of_lease=row.lease, base=version + 1)
        return True

    def _merged(self, leases: Collection[str], into: int) -> None:
        """Of updates by their leases: which version they became, and that it is to their workers'
        credit."""
        chosen = updates.c.lease.in_(leases)
        self._session.run(update(updates).where(chosen).values(state="merged", merged_into=into))
        done = (
            select(
                updates.c.worker,
                func.sum(updates.c.steps).label("steps"),
                func.count().label("updates"),
            )
            .where(chosen)
            .group_by(updates.c.worker)
            .subquery()
        )
        credit = {
            "batches_merged": workers.c.batches_merged + done.c.steps,
            "updates_merged": workers.c.updates_merged + done.c.updates,
        }
        self._session.run(update(workers).where(workers.c.id == done.c.worker).values(**credit))

    def reopen_unsent(self, worker: str) -> None:
        """Leases of a worker that began anew, of whose updates nothing was heard: it is to have
        them again."""
        heard_of = select(updates.c.lease).where(updates.c.lease == leases.c.id).exists()
        self._session.run(
            update(leases)
            .where(leases.c.worker == worker, in_state(leases, "sending"), ~heard_of)
            .values(state="open")
        )
        self._standing.forget()

    def version(self, block: int, version: int | None = None) -> Version:
        """A version of a block; the current one where none is named."""
        if version is None:
            found = self._session.first(statements.NEWEST_VERSION, of_block=block)
        elif not (found := self._standing.version(block, version)):
            found = self._session.first(statements.VERSION, of_block=block, of_version=version)
        if found is None:
            raise NotFoundError(f"version {version} of block {block} is not kept any more")
        self._standing.version_read(found)
        return _version(found)

    def versions(self) -> list[Version]:
        return [_version(row) for row in self._session.run(select(versions))]

    def forget_version(self, block: int, version: int) -> None:
        chosen = sql.delete(versions)
        self._session.run(chosen.where(versions.c.block == block, versions.c.version == version))
        self._standing.forget()

    def differences(self, block: int) -> dict[int, Blob]:
        """What is kept of the differences that lead to a block's versions, oldest first."""
        chosen = select(differences).where(differences.c.block == block)
        rows = self._session.run(chosen.order_by(differences.c.version))
        return {row.version: Blob(name=row.name, size=row.size) for row in rows}

    def forget_difference(self, block: int, version: int) -> None:
        chosen = sql.delete(differences)
        self._session.run(
            chosen.where(differences.c.block == block, differences.c.version == version)
        )

    def retire_blobs(self, names: Collection[str], since: float, until: float) -> None:
        """Nothing refers to these blobs any more; they are kept for so long."""
        each_once = sql.delete(retired).where(retired.c.name.in_(names))  # for its last time
        self._session.run(each_once)
        for name in names:
            self._session.run(insert(retired).values(name=name, since=since, until=until))

    def retired_blobs(self) -> set[str]:
        return set(self._session.run(select(retired.c.name)).scalars())

    def end_retired(self, now: float) -> dict[str, float]:
        """Blobs that need not be kept from now on, and since when nothing refers to them."""
        over = retired.c.until <= now
        found = {row.name: row.since for row in self._session.run(select(retired).where(over))}
        self._session.run(sql.delete(retired).where(over))
        return found

    def live_updates(self) -> Sequence[Found]:
        """Updates whose chunks are still needed."""
        return self._session.run(select(updates).where(in_state(updates, *LIVE))).all()

    def _add_version(
        self,
        block: int,
        version: int,
        merged_batches: int,
        now: float,
        weights: Blob,
        velocity: Blob | None = None,
        owed: Blob | None = None,
    ) -> None:
        self._session.run(
            insert(versions).values(
                block=block,
                version=version,
                weights=weights.name,
                weights_size=weights.size,
                velocity=velocity.name if velocity else None,
                velocity_size=velocity.size if velocity else None,
                owed=owed.name if owed else None,
                owed_size=owed.size if owed else None,
                merged_batches=merged_batches,
                created=now,
            )
        )

    def _take_gap(self, block: int, most: int) -> tuple[int, int]:
        """(first batch, steps) of the first range that came back, the rest of which stays."""
        gap = self._session.first(statements.FIRST_GAP, of_block=block)
        assert gap is not None
        first, steps = int(gap.first_batch), min(most, gap.steps)
        self._session.run(
            sql.delete(gaps).where(gaps.c.block == block, gaps.c.first_batch == first)
        )
        if rest := gap.steps - steps:
            self.give_back_range(block, first + steps, rest)
        self._standing.forget()
        return first, steps

    def _known_standing(self) -> LedgerSnapshot:
        if not self._standing.known:
            self._ask_standing()
            self._standing.learn(*(self._session.rows(each) for each in statements.STANDING))
        return self._standing

    def _ask_standing(self) -> None:
        for statement in statements.STANDING:
            self._session.ask(statement)


def _version(row: Found) -> Version:
    velocity = Blob(name=row.velocity, size=row.velocity_size) if row.velocity else None
    owed = Blob(name=row.owed, size=row.owed_size) if row.owed else None
    weights = Blob(name=row.weights, size=row.weights_size)
    return Version(row.block, row.version, weights, velocity, owed, row.merged_batches, row.created)
