"""Updates, the versions they are merged into, and the blobs of both."""

from collections.abc import Collection

from sqlalchemy import Row, bindparam, delete, func, insert, select, update

from blocktrain.errors import NotFoundError
from blocktrain.ledger.rows import Statements, UpdateRow, Version
from blocktrain.ledger.schema import (
    LIVE,
    UpdateStatus,
    differences,
    in_state,
    retired,
    the_block,
    the_lease,
    updates,
    versions,
    workers,
)
from blocktrain.protocol.messages import Blob


class UpdateTable(Statements):
    ADD = insert(updates)
    GET = select(updates).where(updates.c.lease == the_lease)

    def add(self, row: UpdateRow) -> None:
        self.write(self.ADD, **vars(row))

    def get(self, lease: str) -> UpdateRow | None:
        return self.first(UpdateRow, self.GET, the_lease=lease)

    def of_worker(self, worker: str, states: Collection[UpdateStatus]) -> list[UpdateRow]:
        same = select(updates).where(updates.c.worker == worker, in_state(updates, *states))
        return self.rows(UpdateRow, same)

    def pending(self, block: int) -> dict[str, UpdateRow]:
        """Updates that wait to be merged into a block, by lease."""
        waiting = select(updates).where(updates.c.block == block, in_state(updates, "pending"))
        return {row.lease: row for row in self.rows(UpdateRow, waiting)}

    def are_pending(self, names: Collection[str]) -> bool:
        """Whether all these updates still wait to be merged."""
        waiting = select(func.count()).where(updates.c.lease.in_(names))
        count = self.connection.execute(waiting.where(in_state(updates, "pending"))).scalar()
        return count == len(names)

    def live(self) -> list[UpdateRow]:
        """Updates whose chunks are still needed."""
        return self.rows(UpdateRow, select(updates).where(in_state(updates, *LIVE)))

    ACCEPT = (
        update(updates)
        .where(updates.c.lease == the_lease, in_state(updates, "offered"))
        .values(
            state="pending",
            base_version=bindparam("base"),
            weight=bindparam("share"),
            committed=bindparam("now"),
        )
    )

    def accept(self, lease: str, base: int, weight: float, now: float) -> None:
        """An offered update waits to be merged from now on. `base`: the version it counts as
        trained from."""
        self.write(self.ACCEPT, the_lease=lease, base=base, share=weight, now=now)

    def refuse(self, lease: str, reason: str) -> bool:
        """False if it was merged or refused before."""
        live = update(updates).where(updates.c.lease == lease, in_state(updates, *LIVE))
        refused = live.values(state="refused", reason=reason[:500], weight=0.0)
        return bool(self.write(refused))

    def mark_merged(self, names: Collection[str], version: int) -> None:
        """Updates became part of this version of their block; their workers get the credit."""
        merged = updates.c.lease.in_(names)
        self.write(update(updates).where(merged).values(state="merged", merged_into=version))
        done = (
            select(
                updates.c.worker,
                func.sum(updates.c.steps).label("steps"),
                func.count().label("updates"),
            )
            .where(merged)
            .group_by(updates.c.worker)
            .subquery()
        )
        credit = {
            "batches_merged": workers.c.batches_merged + done.c.steps,
            "updates_merged": workers.c.updates_merged + done.c.updates,
        }
        self.write(update(workers).where(workers.c.id == done.c.worker).values(**credit))

    def rebase_those_that_continue(self, names: Collection[str], version: int) -> None:
        """Waiting updates that were trained on from the end of these, which are now merged into
        this version, count as trained from it."""
        waiting = update(updates).where(
            in_state(updates, "pending"), updates.c.continues.in_(names)
        )
        self.write(waiting.values(base_version=version))


class VersionTable(Statements):
    GET = select(versions).where(
        versions.c.block == the_block, versions.c.version == bindparam("the_version")
    )
    NEWEST = (
        select(versions)
        .where(versions.c.block == the_block)
        .order_by(versions.c.version.desc())
        .limit(1)
    )

    def add(self, version: Version) -> None:
        velocity, residual = version.velocity, version.residual
        self.write(
            insert(versions),
            block=version.block,
            version=version.version,
            weights=version.weights.name,
            weights_size=version.weights.size,
            velocity=velocity.name if velocity else None,
            velocity_size=velocity.size if velocity else None,
            owed=residual.name if residual else None,
            owed_size=residual.size if residual else None,
            merged_batches=version.merged_batches,
            created=version.created,
        )

    def get(self, block: int, version: int | None = None) -> Version:
        """A version of a block; the newest if none is named."""
        if version is None:
            result = self.connection.execute(self.NEWEST, {"the_block": block})
        else:
            result = self.connection.execute(self.GET, {"the_block": block, "the_version": version})
        row = result.first()
        if row is None:
            raise NotFoundError(f"version {version} of block {block} is not kept any more")
        return _version(row)

    def all(self) -> list[Version]:
        return [_version(row) for row in self.connection.execute(select(versions))]

    def forget(self, block: int, version: int) -> None:
        same = (versions.c.block == block, versions.c.version == version)
        self.write(delete(versions).where(*same))

    def forget_residual(self, block: int, version: int) -> None:
        """The blob of a version's residual is lost: nothing may refer to it."""
        same = update(versions).where(versions.c.block == block, versions.c.version == version)
        self.write(same.values(owed=None, owed_size=None))

    def deltas(self, block: int) -> dict[int, Blob]:
        """The deltas that are kept, by the version that each leads to, oldest first."""
        same = select(differences).where(differences.c.block == block)
        rows = self.connection.execute(same.order_by(differences.c.version))
        return {row.version: Blob(name=row.name, size=row.size) for row in rows}

    def add_delta(self, block: int, version: int, delta: Blob) -> None:
        self.write(
            insert(differences), block=block, version=version, name=delta.name, size=delta.size
        )

    def forget_delta(self, block: int, version: int) -> None:
        same = (differences.c.block == block, differences.c.version == version)
        self.write(delete(differences).where(*same))

    def retire_blobs(self, names: Collection[str], since: float, until: float) -> None:
        """From `since` on nothing refers to these blobs; they are kept `until` this time."""
        self.write(delete(retired).where(retired.c.name.in_(names)))  # retired before, used since
        rows = [{"name": name, "since": since, "until": until} for name in names]
        if rows:
            self.connection.execute(insert(retired), rows)

    def retired_blobs(self) -> set[str]:
        return set(self.connection.execute(select(retired.c.name)).scalars())

    def end_retired(self, now: float) -> dict[str, float]:
        """Remove the retired blobs whose time is over; since when nothing refers to each."""
        over = retired.c.until <= now
        ended = {
            row.name: row.since for row in self.connection.execute(select(retired).where(over))
        }
        self.write(delete(retired).where(over))
        return ended


def _version(row: Row[tuple[object, ...]]) -> Version:
    return Version(
        block=row.block,
        version=row.version,
        weights=Blob(name=row.weights, size=row.weights_size),
        velocity=Blob(name=row.velocity, size=row.velocity_size) if row.velocity else None,
        residual=Blob(name=row.owed, size=row.owed_size) if row.owed else None,
        merged_batches=row.merged_batches,
        created=row.created,
    )
