"""Invites and workers; events and scores of the run."""

import json

from sqlalchemy import Insert, bindparam, func, insert, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from blocktrain.ledger.schema import (
    InviteRow,
    ScoreRow,
    Statements,
    WorkerRow,
    events,
    in_state,
    invites,
    leases,
    scores,
    the_worker,
    traffic,
    workers,
)
from blocktrain.protocol.status_messages import Event, Moved, Score


class MemberTable(Statements):
    def add_invite(self, row: InviteRow) -> None:
        self.write(insert(invites), **vars(row))

    def invites(self) -> list[InviteRow]:
        return self.rows(InviteRow, select(invites).order_by(invites.c.expires))

    def invite(self, secret_hash: str) -> InviteRow | None:
        return self.first(InviteRow, select(invites).where(invites.c.secret_hash == secret_hash))

    def revoke_invite(self, invite: str) -> bool:
        """Revoke an invite. Returns False if there is no such invite."""
        return bool(self.write(update(invites).where(invites.c.id == invite).values(revoked=True)))

    def use_invite(self, invite: str) -> bool:
        """Count one use of an invite. Returns False if no use is left."""
        unused = update(invites).where(invites.c.id == invite, invites.c.uses_left > 0)
        return bool(self.write(unused.values(uses_left=invites.c.uses_left - 1)))

    def add_worker(self, row: WorkerRow) -> None:
        self.write(insert(workers), **vars(row))

    WORKER = select(workers).where(workers.c.id == the_worker)
    TOUCH = update(workers).where(workers.c.id == the_worker).values(seen=bindparam("now"))

    LOST = func.count().filter(or_(workers.c.banned, workers.c.excluded))
    JOINED_WITH = select(func.count(), LOST).where(
        workers.c.invite == bindparam("the_invite"), workers.c.role == "train"
    )
    VALIDATORS = (
        select(workers)
        .where(
            workers.c.role == "validate",
            ~workers.c.banned,
            ~workers.c.excluded,
            workers.c.seen >= bindparam("since"),
        )
        .order_by(workers.c.joined)
    )

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

    def joined_with(self, invite: str) -> tuple[int, int]:
        """How many workers joined with an invite to train, and how many of them are banned or
        excluded."""
        joined, lost = self.connection.execute(self.JOINED_WITH, {"the_invite": invite}).one()
        return joined, lost

    def touch_worker(self, worker: str, now: float) -> None:
        """Record when a worker was last heard from."""
        self.write(self.TOUCH, the_worker=worker, now=now)

    def rename_worker(self, worker: str, name: str, device: str) -> None:
        same = update(workers).where(workers.c.id == worker)
        self.write(same.values(name=name, device=device))

    def ban_worker(self, worker: str) -> bool:
        """Ban a worker. Returns False if there is no such worker."""
        return bool(self.write(update(workers).where(workers.c.id == worker).values(banned=True)))

    def record_standing(self, worker: str, **columns: float | bool | None) -> None:
        """Record what the checks have found about a worker."""
        self.write(update(workers).where(workers.c.id == worker).values(**columns))

    def count_times(
        self, worker: str, *, checks: int = 0, check_seconds: float = 0, train_seconds: float = 0
    ) -> None:
        """Add to the time that a worker has spent on checks and on training."""
        self.write(
            update(workers)
            .where(workers.c.id == worker)
            .values(
                checks=workers.c.checks + checks,
                check_seconds=workers.c.check_seconds + check_seconds,
                train_seconds=workers.c.train_seconds + train_seconds,
            )
        )

    def validators(self, since: float) -> list[WorkerRow]:
        """Validators that were heard from since this time, the longest-standing first."""
        return self.rows(WorkerRow, self.VALIDATORS, since=since)

    def lost_workers(self) -> set[str]:
        """Ids of workers whose lease expired and that have been silent since."""
        expired = select(workers.c.id).join(leases, leases.c.worker == workers.c.id)
        silent = leases.c.deadline >= workers.c.seen
        lost = expired.where(in_state(leases, "expired"), silent)
        return set(self.connection.execute(lost).scalars())


EVENT_LOCK = 726565  # id of the advisory lock in PostgreSQL; arbitrary


def _adding_to(row: postgresql.Insert | sqlite.Insert) -> Insert:
    """Insert a row of traffic, or add its counts to the existing row."""
    sums = {count: traffic.c[count] + row.excluded[count] for count in Moved.model_fields}
    return row.on_conflict_do_update(index_elements=list(traffic.primary_key), set_=sums)


COUNT_TRAFFIC = {  # by dialect
    "postgresql": _adding_to(postgresql.insert(traffic)),
    "sqlite": _adding_to(sqlite.insert(traffic)),
}


class EventTable(Statements):
    LOCK = select(func.pg_advisory_xact_lock(EVENT_LOCK))
    ADD = insert(events)

    def lock(self) -> None:
        """Make events visible in the order of their numbers, so that a reader that continues from
        the last number it saw misses none."""
        self.lock_by(self.LOCK)

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
        """Up to `most` events after this number, oldest first."""
        later = select(events).where(events.c.number > number)
        return self.rows(Event, later.order_by(events.c.number).limit(most))

    def last_number(self) -> int:
        """The number of the newest event; 0 if there are no events."""
        return self.connection.execute(select(func.max(events.c.number))).scalar() or 0

    def add_score(self, score: Score, worker: str, now: float) -> None:
        row = score.model_dump(exclude={"versions", "downloads"})
        text = json.dumps(score.versions)
        self.write(insert(scores), **row, versions=text, worker=worker, time=now)

    def newest_score(self, block: int | None) -> ScoreRow | None:
        """The newest score on `valid` of a block or, if `block` is None, of the assembled model."""
        same = select(scores).where(scores.c.block.is_not_distinct_from(block))
        newest = same.where(scores.c.split == "valid").order_by(scores.c.number.desc())
        return self.first(ScoreRow, newest.limit(1))

    def count_traffic(self, worker: str, block: int, moved: Moved) -> None:
        """Add bytes moved between a worker and the run."""
        statement = COUNT_TRAFFIC[self.connection.dialect.name]
        self.write(statement, worker=worker, block=block, **moved.model_dump())

    def traffic(self) -> dict[tuple[str, int], Moved]:
        """Bytes moved, by worker and block."""
        rows = self.connection.execute(select(traffic)).mappings()
        return {
            (row["worker"], row["block"]): Moved(**{key: row[key] for key in Moved.model_fields})
            for row in rows
        }
