"""Who holds which lease, which version is current, what was promised to whom.

SQLite by default, PostgreSQL by URL, through the same statements. Every change is one transaction,
on disk when it returns; claims take the block's row first (`BEGIN IMMEDIATE` / `FOR UPDATE`), so
that any number of coordinators may share one ledger. Knows no clock: times are handed in.
"""

import json
import sqlite3
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sql
from sqlalchemy import Connection, CursorResult, Row, func, insert, select, update
from sqlalchemy.exc import DatabaseError

from blocktrain.core.swarm import BlockState, PendingUpdate
from blocktrain.errors import ConfigError, NotFoundError, UnreachableError
from blocktrain.protocol.messages import Blob, Event
from blocktrain.storage.migrations import upgrade
from blocktrain.storage.schema import (
    blocks,
    events,
    gaps,
    invites,
    leases,
    runs,
    scores,
    updates,
    versions,
    workers,
)

Found = Row[*tuple[Any, ...]]

BUSY_MILLISECONDS = 30_000
HELD = ("open", "sending")  # states in which a lease is somebody's


@dataclass(frozen=True)
class Version:
    block: int
    version: int
    weights: Blob
    velocity: Blob | None
    merged_batches: int
    created: float


class Ledger:
    def __init__(self, url: str) -> None:
        self.url = url
        self.engine = _engine(url)
        try:
            upgrade(self.engine)
        except DatabaseError as error:
            self.engine.dispose()
            raise UnreachableError(f"cannot open the ledger {_shown(url)}: {error.orig}") from None

    @contextmanager
    def write(self) -> Iterator["Transaction"]:
        """All of what happens inside, or nothing; on disk afterwards."""
        with self.engine.begin() as connection:
            yield Transaction(connection)

    @contextmanager
    def read(self) -> Iterator["Transaction"]:
        """What is seen inside is of one moment."""
        options: dict[str, Any] = {"read": True}
        if self.engine.dialect.name == "postgresql":
            options["isolation_level"] = "REPEATABLE READ"
        with self.engine.connect().execution_options(**options) as connection:
            yield Transaction(connection)

    def close(self) -> None:
        self.engine.dispose()


class Transaction:
    """The statements, each named by what it means."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    # The run

    def begin_run(self) -> bool:
        """Keep others from founding a run until this one is written; False where there is one."""
        if self._connection.dialect.name == "postgresql":
            self._connection.exec_driver_sql("LOCK TABLE runs IN SHARE ROW EXCLUSIVE MODE")
        return self.run() is None

    def create_run(self, **values: Any) -> None:
        self._run(insert(runs).values(**values, finished=None))

    def run(self) -> Found | None:
        return self._run(select(runs)).first()

    def finish_run(self, now: float) -> bool:
        """Mark the run finished; False where it was already."""
        return self._changed(update(runs).where(runs.c.finished.is_(None)).values(finished=now))

    def add_block(self, index: int, total_batches: int, weights: Blob, now: float) -> None:
        zeros = dict.fromkeys(
            ("version", "merged_batches", "next_batch", "fence", "leases_given", "leases_met",
             "leases_missed", "merging_until"), 0,
        )  # fmt: skip
        self._run(insert(blocks).values(block=index, total_batches=total_batches, **zeros))
        self._add_version(index, 0, weights, None, 0, now)

    # People

    def add_invite(self, **values: Any) -> None:
        self._run(insert(invites).values(**values, revoked=False))

    def invites(self) -> Sequence[Found]:
        return self._run(select(invites).order_by(invites.c.expires)).all()

    def revoke_invite(self, invite: str) -> bool:
        return self._changed(update(invites).where(invites.c.id == invite).values(revoked=True))

    def invite(self, secret_hash: str) -> Found | None:
        return self._run(select(invites).where(invites.c.secret_hash == secret_hash)).first()

    def use_invite(self, invite: str) -> bool:
        """Count one use; False where none is left."""
        chosen = update(invites).where(invites.c.id == invite, invites.c.uses_left > 0)
        return self._changed(chosen.values(uses_left=invites.c.uses_left - 1))

    def add_worker(self, **values: Any) -> None:
        self._run(
            insert(workers).values(**values, banned=False, batches_merged=0, updates_merged=0)
        )

    def worker(self, worker: str) -> Found | None:
        return self._run(select(workers).where(workers.c.id == worker)).first()

    def worker_of_key(self, public_key: str) -> Found | None:
        return self._run(select(workers).where(workers.c.public_key == public_key)).first()

    def workers(self) -> Sequence[Found]:
        return self._run(select(workers).order_by(workers.c.joined)).all()

    def touch_worker(self, worker: str, now: float) -> None:
        self._run(update(workers).where(workers.c.id == worker).values(seen=now))

    def ban_worker(self, worker: str) -> bool:
        return self._changed(update(workers).where(workers.c.id == worker).values(banned=True))

    # Blocks and leases

    def lock_blocks(self) -> None:
        """Nobody else hands out, takes back or merges until this transaction is over. Comes first
        in every transaction that needs it: whoever waits for it holds nothing others wait for."""
        self._run(select(blocks.c.block).order_by(blocks.c.block).with_for_update())

    def block_states(self) -> list[BlockState]:
        returned = dict(self._pairs(gaps.c.block, func.sum(gaps.c.steps)))
        is_open = leases.c.state.in_(HELD)
        leased = dict(self._pairs(leases.c.block, func.sum(leases.c.steps), is_open))
        held: dict[int, list[Found]] = defaultdict(list)
        for row in self._run(select(leases).where(is_open)):
            held[row.block].append(row)
        pending: dict[int, list[PendingUpdate]] = defaultdict(list)
        for row in self._run(select(updates).where(updates.c.state == "pending")):
            pending[row.block].append(_pending(row))
        return [
            _block_state(
                row,
                returned.get(row.block, 0),
                leased.get(row.block, 0),
                held[row.block],
                pending[row.block],
            )
            for row in self._run(select(blocks).order_by(blocks.c.block))
        ]

    def block(self, index: int) -> Found | None:
        return self._run(select(blocks).where(blocks.c.block == index)).first()

    def take_range(self, block: int, most: int) -> tuple[int, int]:
        """(first batch, steps): what came back first, then what was never handed out."""
        ordered = select(gaps).where(gaps.c.block == block).order_by(gaps.c.first_batch)
        gap = self._run(ordered.limit(1)).first()
        if gap is None:
            row = self.block(block)
            assert row is not None
            steps = min(most, row.total_batches - row.next_batch)
            end = row.next_batch + steps
            self._run(update(blocks).where(blocks.c.block == block).values(next_batch=end))
            return int(row.next_batch), steps
        self._take_gap(block, gap.first_batch)
        steps = min(most, gap.steps)
        if rest := gap.steps - steps:
            self.give_back_range(block, gap.first_batch + steps, rest)
        return int(gap.first_batch), steps

    def give_back_range(self, block: int, first_batch: int, steps: int) -> None:
        self._run(insert(gaps).values(block=block, first_batch=first_batch, steps=steps))

    def reclaim_range(self, block: int, first_batch: int, steps: int) -> bool:
        """Take back exactly this range, if nobody else has had it since."""
        chosen = sql.delete(gaps).where(
            gaps.c.block == block, gaps.c.first_batch == first_batch, gaps.c.steps == steps
        )
        return self._changed(chosen)

    def add_lease(self, **values: Any) -> int:
        """Record a lease as open; its fencing token."""
        chosen = blocks.c.block == values["block"]
        count = {"fence": blocks.c.fence + 1, "leases_given": blocks.c.leases_given + 1}
        self._run(update(blocks).where(chosen).values(**count))
        fence = int(self._run(select(blocks.c.fence).where(chosen)).scalar_one())
        self._run(insert(leases).values(**values, fence=fence, state="open"))
        return fence

    def lease(self, lease: str) -> Found | None:
        return self._run(select(leases).where(leases.c.id == lease)).first()

    def leases_of(self, worker: str, states: Collection[str]) -> Sequence[Found]:
        chosen = select(leases).where(leases.c.worker == worker, leases.c.state.in_(states))
        return self._run(chosen.order_by(leases.c.created)).all()

    def move_lease(self, lease: str, state: str) -> bool:
        """Move a lease on; False where it is nobody's any more."""
        chosen = update(leases).where(leases.c.id == lease, leases.c.state.in_(HELD))
        return self._changed(chosen.values(state=state))

    def overdue(self, now: float) -> Sequence[Found]:
        chosen = select(leases).where(leases.c.state.in_(HELD), leases.c.deadline < now)
        return self._run(chosen).all()

    def held_leases(self) -> Sequence[Found]:
        return self._run(select(leases).where(leases.c.state.in_(HELD))).all()

    def count_lease(self, block: int, *, met: bool) -> None:
        column = blocks.c.leases_met if met else blocks.c.leases_missed
        self._run(update(blocks).where(blocks.c.block == block).values({column: column + 1}))

    # Updates and versions

    def add_update(self, **values: Any) -> None:
        self._run(
            insert(updates).values(
                **values, state="offered", reason="", weight=0.0, blob=None, blob_size=None,
                committed=None, merged_into=None,
            )
        )  # fmt: skip

    def update(self, lease: str) -> Found | None:
        return self._run(select(updates).where(updates.c.lease == lease)).first()

    def updates_of(self, worker: str, states: Collection[str]) -> Sequence[Found]:
        chosen = select(updates).where(updates.c.worker == worker, updates.c.state.in_(states))
        return self._run(chosen).all()

    def accept_update(self, lease: str, blob: Blob, weight: float, now: float) -> bool:
        chosen = update(updates).where(updates.c.lease == lease, updates.c.state == "offered")
        return self._changed(
            chosen.values(
                state="pending", blob=blob.name, blob_size=blob.size, weight=weight, committed=now
            )
        )

    def refuse_update(self, lease: str, reason: str) -> bool:
        chosen = update(updates).where(updates.c.lease == lease)
        chosen = chosen.where(updates.c.state.in_(("offered", "pending")))
        return self._changed(chosen.values(state="refused", reason=reason[:500], weight=0.0))

    def claim_merge(self, block: int, version: int, now: float, seconds: float) -> bool:
        """Announce a merge, so that other coordinators do not do the same work. Only `publish`
        decides: a claim that outlives its maker costs nothing but the wait."""
        chosen = update(blocks).where(
            blocks.c.block == block, blocks.c.version == version, blocks.c.merging_until < now
        )
        return self._changed(chosen.values(merging_until=now + seconds))

    def release_merge(self, block: int, version: int) -> None:
        """A merge that failed: others need not wait for its announced time to end."""
        chosen = update(blocks).where(blocks.c.block == block, blocks.c.version == version)
        self._run(chosen.values(merging_until=0.0))

    def publish(
        self,
        block: int,
        version: int,
        weights: Blob,
        velocity: Blob | None,
        merged: Sequence[PendingUpdate],
        now: float,
    ) -> bool:
        """Version + 1, if the block still stands at `version` and every update still waits."""
        self.lock_blocks()
        leases_of = [item.lease for item in merged]
        waiting = select(func.count()).where(
            updates.c.lease.in_(leases_of), updates.c.state == "pending"
        )
        if self._run(waiting).scalar_one() != len(leases_of):
            return False
        steps = sum(item.steps for item in merged)
        swapped = self._changed(
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
        self._add_version(block, version + 1, weights, velocity, row.merged_batches, now)
        for item in merged:
            chosen = update(updates).where(updates.c.lease == item.lease)
            self._run(chosen.values(state="merged", merged_into=version + 1))
            self._run(
                update(workers)
                .where(workers.c.id == item.worker)
                .values(
                    batches_merged=workers.c.batches_merged + item.steps,
                    updates_merged=workers.c.updates_merged + 1,
                )
            )
        return True

    def version(self, block: int, version: int | None = None) -> Version:
        """A version of a block; the current one where none is named."""
        chosen = select(versions).where(versions.c.block == block)
        if version is None:
            chosen = chosen.order_by(versions.c.version.desc()).limit(1)
        else:
            chosen = chosen.where(versions.c.version == version)
        found = self._run(chosen).first()
        if found is None:
            raise NotFoundError(f"version {version} of block {block} is not kept any more")
        return _version(found)

    def versions(self) -> list[Version]:
        return [_version(row) for row in self._run(select(versions))]

    def forget_version(self, block: int, version: int) -> None:
        chosen = sql.delete(versions)
        self._run(chosen.where(versions.c.block == block, versions.c.version == version))

    def live_updates(self) -> Sequence[Found]:
        """Updates whose chunks are still needed."""
        return self._run(select(updates).where(updates.c.state.in_(("offered", "pending")))).all()

    # Events and scores

    def add_event(
        self,
        now: float,
        kind: str,
        worker: str | None = None,
        block: int | None = None,
        detail: str = "",
    ) -> None:
        if self._connection.dialect.name == "postgresql":
            # Numbers become visible in their order, so that a reader who goes on from one misses
            # none; the number of the lock means nothing.
            self._connection.exec_driver_sql("SELECT pg_advisory_xact_lock(726565)")
        values = {"time": now, "kind": kind, "worker": worker, "block": block}
        self._run(insert(events).values(**values, detail=detail[:500]))

    def events(self, after: int, most: int) -> list[Event]:
        chosen = select(events).where(events.c.number > after).order_by(events.c.number)
        return [Event(**row._mapping) for row in self._run(chosen.limit(most))]

    def last_event(self) -> int:
        return int(self._run(select(func.max(events.c.number))).scalar() or 0)

    def add_score(self, *, versions: Collection[int], **values: Any) -> None:
        self._run(insert(scores).values(**values, versions=json.dumps(list(versions))))

    def newest_score(self, block: int | None, split: str = "valid") -> Found | None:
        same = scores.c.block.is_(None) if block is None else scores.c.block == block
        chosen = select(scores).where(same, scores.c.split == split)
        return self._run(chosen.order_by(scores.c.number.desc()).limit(1)).first()

    def _add_version(
        self,
        block: int,
        version: int,
        weights: Blob,
        velocity: Blob | None,
        merged_batches: int,
        now: float,
    ) -> None:
        self._run(
            insert(versions).values(
                block=block,
                version=version,
                weights=weights.name,
                weights_size=weights.size,
                velocity=velocity.name if velocity else None,
                velocity_size=velocity.size if velocity else None,
                merged_batches=merged_batches,
                created=now,
            )
        )

    def _take_gap(self, block: int, first_batch: int) -> None:
        self._run(sql.delete(gaps).where(gaps.c.block == block, gaps.c.first_batch == first_batch))

    def _pairs(self, key: Any, value: Any, *where: Any) -> list[tuple[int, Any]]:
        return [
            (row[0], row[1]) for row in self._run(select(key, value).where(*where).group_by(key))
        ]

    def _changed(self, statement: Any) -> bool:
        return bool(self._run(statement).rowcount)

    def _run(self, statement: Any) -> CursorResult[*tuple[Any, ...]]:
        return self._connection.execute(statement)


def _block_state(
    row: Found, returned: int, leased: int, held: list[Found], pending: list[PendingUpdate]
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
        returned_batches=int(returned),
        leased_batches=int(leased),
        open_leases=len(held),
        workers=frozenset(coming),
        finishing=frozenset(finishing),
        pending=tuple(pending),
    )


def _pending(row: Found) -> PendingUpdate:
    return PendingUpdate(row.lease, row.worker, row.base_version, row.steps, row.committed)


def _version(row: Found) -> Version:
    velocity = Blob(name=row.velocity, size=row.velocity_size) if row.velocity else None
    weights = Blob(name=row.weights, size=row.weights_size)
    return Version(row.block, row.version, weights, velocity, row.merged_batches, row.created)


def _engine(url: str) -> sql.Engine:
    try:
        parsed = sql.make_url(url)
    except sql.exc.ArgumentError:
        raise ConfigError(f"{_shown(url)} is not a database URL") from None
    if parsed.drivername == "sqlite":
        if parsed.database:
            Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
        return _sqlite_engine(parsed)
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    try:
        return sql.create_engine(parsed, pool_pre_ping=True, pool_size=16)
    except (sql.exc.ArgumentError, ImportError):
        raise ConfigError(f"{_shown(url)} is neither SQLite nor PostgreSQL") from None


def _sqlite_engine(url: sql.URL) -> sql.Engine:
    engine = sql.create_engine(url, pool_size=16)

    @sql.event.listens_for(engine, "connect")
    def prepare(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # transactions are begun below, not by the driver
        connection.execute(f"PRAGMA busy_timeout={BUSY_MILLISECONDS}")
        _write_ahead(connection)
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")

    @sql.event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A writer takes the lock at once: two that both begin by reading could not both go on.
        reads = connection.get_execution_options().get("read")
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Here SQLite does not wait: of two that open a new file at once, one is turned away."""
    deadline = time.monotonic() + BUSY_MILLISECONDS / 1000
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _shown(url: str) -> str:
    """Without the password."""
    try:
        return sql.make_url(url).render_as_string(hide_password=True)
    except sql.exc.ArgumentError:
        return "given"
