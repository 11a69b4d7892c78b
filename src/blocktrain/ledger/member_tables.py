"""Invites and workers; events and scores of the run."""

import json
from collections.abc import Collection

from sqlalchemy import Connection, Insert, bindparam, func, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from blocktrain.ledger.rows import InviteRow, ScoreRow, Statements, WorkerRow
from blocktrain.ledger.schema import (
    events,
    in_state,
    invites,
    leases,
    scores,
    the_worker,
    traffic,
    workers,
)
from blocktrain.protocol.messages import Event, Moved


class MemberTable(Statements):
    def add_invite(self, row: InviteRow) -> None:
        self.write(insert(invites), **vars(row))

    def invites(self) -> list[InviteRow]:
        return self.rows(InviteRow, select(invites).order_by(invites.c.expires))

    def invite(self, secret_hash: str) -> InviteRow | None:
        return self.first(InviteRow, select(invites).where(invites.c.secret_hash == secret_hash))

    def revoke_invite(self, invite: str) -> bool:
        """False if there is no such invite."""
        return bool(self.write(update(invites).where(invites.c.id == invite).values(revoked=True)))

    def use_invite(self, invite: str) -> bool:
        """Count one use; False if none is left."""
        unused = update(invites).where(invites.c.id == invite, invites.c.uses_left > 0)
        return bool(self.write(unused.values(uses_left=invites.c.uses_left - 1)))

    def add_worker(self, row: WorkerRow) -> None:
        self.write(insert(workers), **vars(row))

    WORKER = select(workers).where(workers.c.id == the_worker)
    TOUCH = update(workers).where(workers.c.id == the_worker).values(seen=bindparam("now"))

    def worker(self, worker: str) -> WorkerRow | None:
        return self.first(WorkerRow, self.WORKER, the_worker=worker)

    def worker_of_key(self, public_key: str) -> WorkerRow | None:
        return self.first(WorkerRow, select(workers).where(workers.c.public_key == public_key))

    def workers(self) -> list[WorkerRow]:
        return self.rows(WorkerRow, select(workers).order_by(workers.c.joined))

    def workers_of_invite(self, invite: str) -> list[WorkerRow]:
        """Workers that joined with an invite and are not banned."""
        joined = select(workers).where(workers.c.invite == invite, ~workers.c.banned)
        return self.rows(WorkerRow, joined.order_by(workers.c.joined))

    def touch_worker(self, worker: str, now: float) -> None:
        """Note when a worker was last heard from."""
        self.write(self.TOUCH, the_worker=worker, now=now)

    def rename_worker(self, worker: str, name: str, device: str) -> None:
        same = update(workers).where(workers.c.id == worker)
        self.write(same.values(name=name, device=device))

    def ban_worker(self, worker: str) -> bool:
        """False if there is no such worker."""
        return bool(self.write(update(workers).where(workers.c.id == worker).values(banned=True)))

    def lost_workers(self) -> set[str]:
        """Ids of workers whose lease expired and that were not heard from since."""
        expired = select(workers.c.id).join(leases, leases.c.worker == workers.c.id)
        silent = leases.c.deadline >= workers.c.seen
        lost = expired.where(in_state(leases, "expired"), silent)
        return set(self.connection.execute(lost).scalars())


EVENT_LOCK = 726565  # the number names the lock in PostgreSQL and has no other meaning


def _adding_to(row: postgresql.Insert | sqlite.Insert) -> Insert:
    """Insert a row of traffic, or add its counts to those of the row that is there."""
    sums = {count: traffic.c[count] + row.excluded[count] for count in Moved.model_fields}
    return row.on_conflict_do_update(index_elements=list(traffic.primary_key), set_=sums)


COUNT_TRAFFIC = {  # by dialect
    "postgresql": _adding_to(postgresql.insert(traffic)),
    "sqlite": _adding_to(sqlite.insert(traffic)),
}


class EventTable(Statements):
    def __init__(self, connection: Connection, *, locked: bool) -> None:
        """`locked`: no other transaction adds an event until this one ends."""
        super().__init__(connection)
        self._locked = locked

    LOCK = select(func.pg_advisory_xact_lock(EVENT_LOCK))
    ADD = insert(events)

    def lock(self) -> None:
        """Events become visible in the order of their numbers, so that a reader that continues
        from the last number it saw misses none."""
        if not self._locked:
            self.connection.execute(self.LOCK)
            self._locked = True

    def add(
        self,
        now: float,
        kind: str,
        worker: str | None = None,
        block: int | None = None,
        detail: str = "",
    ) -> None:
        self.lock()
        self.write(self.ADD, time=now, kind=kind, worker=worker, block=block, detail=detail[:500])

    def after(self, number: int, most: int) -> list[Event]:
        """The next events after this number, oldest first."""
        later = select(events).where(events.c.number > number)
        return self.rows(Event, later.order_by(events.c.number).limit(most))

    def last_number(self) -> int:
        """0 if there are no events."""
        return self.connection.execute(select(func.max(events.c.number))).scalar() or 0

    def add_score(
        self,
        *,
        block: int | None,
        versions: Collection[int],
        split: str,
        windows: str,
        ce: float,
        worker: str,
        time: float,
    ) -> None:
        self.write(
            insert(scores),
            block=block,
            versions=json.dumps(list(versions)),
            split=split,
            windows=windows,
            ce=ce,
            worker=worker,
            time=time,
        )

    def newest_score(self, block: int | None, split: str = "valid") -> ScoreRow | None:
        """Of a block, or of the assembled model if `block` is None."""
        same = select(scores).where(scores.c.block.is_not_distinct_from(block))
        newest = same.where(scores.c.split == split).order_by(scores.c.number.desc())
        return self.first(ScoreRow, newest.limit(1))

    def count_traffic(self, worker: str, block: int, moved: Moved) -> None:
        """Add to the bytes that were moved between a worker and the run."""
        statement = COUNT_TRAFFIC[self.connection.dialect.name]
        self.write(statement, worker=worker, block=block, **moved.model_dump())

    def traffic(self) -> dict[tuple[str, int], Moved]:
        """Bytes moved, by worker and block."""
        rows = self.connection.execute(select(traffic)).mappings()
        return {
            (row["worker"], row["block"]): Moved(**{key: row[key] for key in Moved.model_fields})
            for row in rows
        }
