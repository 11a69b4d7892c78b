"""Updates, the versions they are merged into, and the blobs of both."""

from collections.abc import Collection

from sqlalchemy import Row, bindparam, delete, func, insert, select, update

from blocktrain.errors import NotFoundError
from blocktrain.ledger.schema import (
    DUE,
    LIVE,
    Statements,
    UpdateRow,
    UpdateStatus,
    Version,
    checks,
    differences,
    in_state,
    retired,
    the_block,
    the_lease,
    the_worker,
    updates,
    versions,
    workers,
)
from blocktrain.protocol.messages import Blob
from blocktrain.swarm.rollback import Removal


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

    OFFERED_WITH = (
        select(func.count())
        .select_from(updates.join(workers, workers.c.id == updates.c.worker))
        .where(in_state(updates, "offered"), workers.c.invite == bindparam("the_invite"))
    )

    def offered_with(self, invite: str) -> int:
        """How many offered updates are from workers that joined with this invite."""
        return self.connection.execute(self.OFFERED_WITH, {"the_invite": invite}).scalar() or 0

    def refused_since(self, lease: str) -> list[str]:
        """The offers of refused updates of this lease or later ones."""
        refused = select(updates.c.offer).where(
            updates.c.lease >= lease, in_state(updates, "refused")
        )
        return list(self.connection.execute(refused).scalars())

    def pending(self, block: int) -> dict[str, UpdateRow]:
        """A block's pending updates, by lease."""
        waiting = select(updates).where(updates.c.block == block, in_state(updates, "pending"))
        return {row.lease: row for row in self.rows(UpdateRow, waiting)}

    def are_pending(self, names: Collection[str]) -> bool:
        """Whether all these updates are still pending."""
        waiting = select(func.count()).where(updates.c.lease.in_(names))
        count = self.connection.execute(waiting.where(in_state(updates, "pending"))).scalar()
        return count == len(names)

    def live(self) -> list[UpdateRow]:
        """Updates whose chunks are still needed."""
        return self.rows(UpdateRow, select(updates).where(in_state(updates, *LIVE)))

    def merged(self) -> list[UpdateRow]:
        """All updates that are part of a version, in the order in which they became it."""
        merged = select(updates).where(in_state(updates, "merged"))
        return self.rows(UpdateRow, merged.order_by(updates.c.block, updates.c.merged_into))

    LAST_NORMS = (
        select(updates.c.worker, updates.c.norms)
        .join(workers, workers.c.id == updates.c.worker)
        .where(
            updates.c.block == the_block,
            in_state(updates, "merged"),
            updates.c.norms.is_not(None),
            ~workers.c.excluded,
            ~workers.c.banned,
        )
        .order_by(updates.c.merged_into.desc(), updates.c.lease)
        .limit(bindparam("most"))
    )

    def last_norms(self, block: int, most: int) -> list[tuple[str, str]]:
        """The workers and sizes of a block's last merged updates, newest first. Leaves out workers
        that were excluded or banned."""
        found = self.connection.execute(self.LAST_NORMS, {"the_block": block, "most": most})
        return [(worker, norms) for worker, norms in found]

    ACCEPT = (
        update(updates)
        .where(updates.c.lease == the_lease, in_state(updates, "offered"))
        .values(
            state="pending",
            base_version=bindparam("base"),
            weight=bindparam("share"),
            committed=bindparam("now"),
            norms=bindparam("sizes"),
        )
    )

    def accept(
        self, lease: str, base: int, weight: float, now: float, norms: str | None = None
    ) -> None:
        """Make an offered update pending. `base`: the version it counts as trained from."""
        self.write(self.ACCEPT, the_lease=lease, base=base, share=weight, now=now, sizes=norms)

    EARLIER = (
        select(updates)
        .where(
            updates.c.worker == the_worker,
            updates.c.block == the_block,
            updates.c.lease < the_lease,
        )
        .order_by(updates.c.lease.desc())
        .limit(bindparam("most"))
    )

    def earlier(self, update: UpdateRow, most: int) -> list[UpdateRow]:
        """The updates of the same worker and block before this one, newest first."""
        return self.rows(
            UpdateRow, self.EARLIER, the_worker=update.worker, the_block=update.block,
            the_lease=update.lease, most=most,
        )  # fmt: skip

    def refuse(self, lease: str, reason: str) -> bool:
        """Refuse an update. Returns False if it was merged or refused before."""
        live = update(updates).where(updates.c.lease == lease, in_state(updates, *LIVE))
        if not self.write(live.values(state="refused", reason=reason[:500], weight=0.0)):
            return False
        scores = (checks.c.lease == lease, checks.c.method == "score", in_state(checks, *DUE))
        self.write(delete(checks).where(*scores))
        return True

    def mark_merged(self, names: Collection[str], version: int) -> None:
        """Mark updates as merged into this version of their block, and credit their workers."""
        merged = updates.c.lease.in_(names)
        self.write(update(updates).where(merged).values(state="merged", merged_into=version))
        self._credit(names, 1)

    MERGED_AS = update(updates).where(updates.c.lease == the_lease)

    def record_merge(self, lease: str, merged_as: str) -> None:
        """Record how an update was merged."""
        self.write(
            self.MERGED_AS.values(merged_as=bindparam("how")), the_lease=lease, how=merged_as
        )

    def record_clip(self, lease: str, factor: float, norms: str) -> None:
        """Record that an update was scaled down, and how far it then moved the block."""
        same = update(updates).where(updates.c.lease == lease)
        self.write(same.values(clip=factor, norms=norms))

    MERGED_AFTER = (
        select(updates)
        .where(
            updates.c.block == the_block,
            in_state(updates, "merged"),
            updates.c.merged_into > bindparam("after"),
        )
        .order_by(updates.c.merged_into, updates.c.lease)
    )

    def merged_after(self, block: int, version: int) -> list[UpdateRow]:
        """The updates that were merged into later versions of a block than this, oldest first."""
        return self.rows(UpdateRow, self.MERGED_AFTER, the_block=block, after=version)

    REMOVALS = select(updates.c.merged_into, updates.c.removed_in).where(
        updates.c.block == the_block, updates.c.removed_in.is_not(None)
    )

    def removals(self, block: int) -> list[Removal]:
        """Which versions of a block contain updates that were removed later."""
        rows = self.connection.execute(self.REMOVALS, {"the_block": block})
        return [Removal(*row) for row in rows]

    def remove(self, names: Collection[str], version: int, reason: str) -> None:
        """Refuse merged updates, which this version of their block does not contain any more."""
        self._credit(names, -1)
        gone = update(updates).where(updates.c.lease.in_(names), in_state(updates, "merged"))
        self.write(
            gone.values(state="refused", reason=reason[:500], weight=0.0, removed_in=version)
        )

    def _credit(self, names: Collection[str], sign: int) -> None:
        """Credit the workers of these updates, or take it back."""
        done = (
            select(
                updates.c.worker,
                func.sum(updates.c.steps).label("steps"),
                func.count().label("updates"),
            )
            .where(updates.c.lease.in_(names))
            .group_by(updates.c.worker)
            .subquery()
        )
        credit = {
            "batches_merged": workers.c.batches_merged + sign * done.c.steps,
            "updates_merged": workers.c.updates_merged + sign * done.c.updates,
        }
        self.write(update(workers).where(workers.c.id == done.c.worker).values(**credit))

    def rebase_those_that_continue(self, names: Collection[str], version: int) -> None:
        """Let pending updates that continue these count as trained from `version`, into which these
        were merged."""
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
        self.write(
            insert(versions),
            block=version.block,
            version=version.version,
            merged_batches=version.merged_batches,
            created=version.created,
            **_columns("weights", version.weights),
            **_columns("velocity", version.velocity),
            **_columns("owed", version.residual),
        )

    def get(self, block: int, version: int | None = None) -> Version:
        """A version of a block, by default the newest."""
        if version is None:
            result = self.connection.execute(self.NEWEST, {"the_block": block})
        else:
            result = self.connection.execute(self.GET, {"the_block": block, "the_version": version})
        row = result.first()
        if row is None:
            raise NotFoundError(f"version {version} of block {block} was deleted; use a newer one")
        return _version(row)

    def all(self) -> list[Version]:
        return [_version(row) for row in self.connection.execute(select(versions))]

    def forget(self, block: int, version: int) -> None:
        same = (versions.c.block == block, versions.c.version == version)
        self.write(delete(versions).where(*same))

    def forget_residual(self, block: int, version: int) -> None:
        """Remove the reference to a version's residual, whose blob is lost."""
        same = update(versions).where(versions.c.block == block, versions.c.version == version)
        self.write(same.values(owed=None, owed_size=None))

    def deltas(self, block: int) -> dict[int, Blob]:
        """The stored deltas, by the version that each leads to, oldest first."""
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
        """Keep these blobs until the time `until`, although nothing has referred to them since the
        time `since`."""
        self.write(
            delete(retired).where(retired.c.name.in_(names))
        )  # retired and used again before
        rows = [{"name": name, "since": since, "until": until} for name in names]
        if rows:
            self.connection.execute(insert(retired), rows)

    def retired_blobs(self) -> set[str]:
        return set(self.connection.execute(select(retired.c.name)).scalars())

    def end_retired(self, now: float) -> dict[str, float]:
        """Remove the retired blobs whose time is over. Returns since when each was unused."""
        over = retired.c.until <= now
        ended = {
            row.name: row.since for row in self.connection.execute(select(retired).where(over))
        }
        self.write(delete(retired).where(over))
        return ended


def _columns(name: str, blob: Blob | None) -> dict[str, str | int | None]:
    return {name: blob.name if blob else None, f"{name}_size": blob.size if blob else None}


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
