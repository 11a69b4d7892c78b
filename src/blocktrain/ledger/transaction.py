"""One transaction: the run, the tables by noun, and publishing a version, which touches most."""

from collections.abc import Sequence

from sqlalchemy import Connection, insert, select, text, update

from blocktrain.ledger.lease_tables import BlockTable, LeaseTable
from blocktrain.ledger.member_tables import EventTable, MemberTable
from blocktrain.ledger.rows import BlockRow, RunRow, Statements, Version
from blocktrain.ledger.schema import blocks, runs
from blocktrain.ledger.update_tables import UpdateTable, VersionTable
from blocktrain.protocol.messages import Blob
from blocktrain.swarm.state import PendingUpdate


class Transaction(Statements):
    def __init__(self, connection: Connection, *, locked: bool = False) -> None:
        """`locked`: blocks and events are locked for the whole transaction already."""
        super().__init__(connection)
        self.blocks = BlockTable(connection, locked=locked)
        self.leases = LeaseTable(connection)
        self.updates = UpdateTable(connection)
        self.versions = VersionTable(connection)
        self.members = MemberTable(connection)
        self.events = EventTable(connection, locked=locked)

    def run(self) -> RunRow | None:
        return self.first(RunRow, select(runs))

    def may_create_run(self) -> bool:
        """Keep others from creating a run until this transaction ends; False if there is one."""
        if self.connection.dialect.name == "postgresql":
            self.connection.execute(text("LOCK TABLE runs IN SHARE ROW EXCLUSIVE MODE"))
        return self.run() is None

    def create_run(self, row: RunRow) -> None:
        self.write(insert(runs), **vars(row))

    def finish_run(self, now: float) -> bool:
        """Mark the run finished; False if it was before."""
        return bool(self.write(update(runs).where(runs.c.finished.is_(None)).values(finished=now)))

    def create_block(self, index: int, total_batches: int, weights: Blob, now: float) -> None:
        """A block and its version 0."""
        self.blocks.add(BlockRow(block=index, total_batches=total_batches))
        first = Version(block=index, version=0, weights=weights, merged_batches=0, created=now)
        self.versions.add(first)

    def publish(
        self,
        block: int,
        version: int,
        weights: Blob,
        velocity: Blob | None,
        merged: Sequence[PendingUpdate],
        now: float,
        *,
        delta: Blob | None = None,
        residual: Blob | None = None,
    ) -> bool:
        """Make the block's next version, if its current one is still `version` and all merged
        updates still wait; False otherwise. `delta` leads to the new version from the one before,
        `residual` is what the delta left out."""
        self.blocks.lock()
        names = {item.lease for item in merged}
        if not self.updates.are_pending(names):
            return False
        swapped = self.write(
            update(blocks)
            .where(blocks.c.block == block, blocks.c.version == version)
            .values(
                version=version + 1,
                merged_batches=blocks.c.merged_batches + sum(item.steps for item in merged),
                merging_until=0.0,
            )
        )
        if not swapped:
            return False
        self.versions.add(
            Version(
                block=block,
                version=version + 1,
                weights=weights,
                velocity=velocity,
                residual=residual,
                merged_batches=self.blocks.get(block).merged_batches,
                created=now,
            )
        )
        if delta:
            self.versions.add_delta(block, version + 1, delta)
        self.updates.mark_merged(names, version + 1)
        self.updates.rebase_those_that_continue(names, version + 1)
        return True
