"""What nobody needs any more goes: old versions, and chunks that nothing refers to."""

from collections.abc import Iterable

from blocktrain.coordinator.run import Run
from blocktrain.coordinator.updates import claimed
from blocktrain.ledger.transaction import Transaction
from blocktrain.swarm import merging_rules

# Seconds: a chunk that nothing has referred to yet may be of an upload or a merge under way.
COLLECT_AFTER = 3600.0
# A version that is forgotten stays for those who were told of it and fetch the model this fast.
FETCH_SECONDS = 60.0
FETCH_BYTES_PER_SECOND = 1e6


class Collector:
    def __init__(self, run: Run) -> None:
        self.run = run
        self._retired: dict[str, float] = {}  # chunks, and since when

    def retire(self, chunks: Iterable[str], since: float | None = None) -> None:
        """Nothing refers to these chunks any more: they go with the next collection, unless
        somebody puts them again, and then relies on them. What is retired when a coordinator ends
        goes like any chunk that nothing refers to."""
        self._retired.update(dict.fromkeys(chunks, self.run.clock() if since is None else since))

    def collect(self) -> int:
        """Drop versions beyond those kept, and chunks nobody needs; how many chunks went."""
        now = self.run.clock()
        with self.run.ledger.write() as tx:
            tx.blocks.lock()
            self._refuse_never_sent(tx)
            before = named_blobs(tx)
            self._forget_old_versions(tx)
            self._forget_useless_differences(tx)
            kept, live = named_blobs(tx), tx.updates.live()
            model_bytes = sum(
                tx.versions.get(state.index).weights.size for state in tx.blocks.states()
            )
            fetched = now + FETCH_SECONDS + model_bytes / FETCH_BYTES_PER_SECOND
            tx.versions.retire_blobs(before - kept, now, fetched)
            over, fetching = tx.versions.end_retired(now), tx.versions.retired_blobs()
        for name, since in over.items():
            self.retire(self._chunks_of(self.run.chunks.has([name])), since)
        corpus = {blob.name for blob in self.run.description.corpus.values()}
        # Of what is only fetched something may be gone: in a backup that was restored, for one.
        needed = self._chunks_of(corpus | kept | self.run.chunks.has(fetching))
        return self._delete_all_but(
            needed | {chunk for row in live for chunk in claimed(row).recipe.chunks}
        )

    def _delete_all_but(self, needed: set[str]) -> int:
        oldest, gone = self.run.clock() - COLLECT_AFTER, 0
        retired, self._retired = self._retired, {}
        for name, put_at in self.run.chunks.stored():
            # At once: whoever puts it again meanwhile makes it new, and may then rely on it.
            if name not in needed and put_at < max(oldest, retired.get(name, oldest)):
                self.run.chunks.delete(name)
                gone += 1
        self.run.chunks.clear_leftovers(oldest)
        return gone

    def _chunks_of(self, blobs: Iterable[str]) -> set[str]:
        return {chunk for name in blobs for chunk in self.run.blobs.chunks_of(name)}

    def _refuse_never_sent(self, tx: Transaction) -> None:
        """What was offered, whose lease is over, and which would be too late by now."""
        current = {state.index: state.version for state in tx.blocks.states()}
        held = {lease.id for lease in tx.leases.held()}
        for row in tx.updates.live():
            counts = merging_rules.update_weight(
                self.run.config.swarm, current[row.block], row.base_version
            )
            if row.state == "offered" and row.lease not in held and counts == 0.0:
                tx.updates.refuse(row.lease, "it was never sent")

    def _forget_old_versions(self, tx: Transaction) -> None:
        """All but the newest few, whatever somebody builds on, and whatever was current when a
        lease that is still held was given (a cascade reads the blocks before)."""
        held = tx.leases.held()
        in_use = {(lease.block, lease.base_version) for lease in held}
        in_use |= {(update.block, update.base_version) for update in tx.updates.live()}
        since = min((lease.created for lease in held), default=self.run.clock())
        replaced = {(item.block, item.version - 1): item.created for item in tx.versions.all()}
        current = {state.index: state.version for state in tx.blocks.states()}
        for version in tx.versions.all():
            here = (version.block, version.version)
            recent = version.version > current[version.block] - self.run.config.swarm.keep_versions
            if not recent and here not in in_use and replaced.get(here, 0.0) < since:
                tx.versions.forget(version.block, version.version)

    def _forget_useless_differences(self, tx: Transaction) -> None:
        """All but those that lead to a version that is there, and those that with all after them
        are still smaller than the newest version."""
        there = {(version.block, version.version) for version in tx.versions.all()}
        for state in tx.blocks.states():
            found = tx.versions.deltas(state.index)
            useful = merging_rules.useful_deltas(
                {version: blob.size for version, blob in found.items()},
                tx.versions.get(state.index).weights.size,
            )
            for version in found:
                if version not in useful and (state.index, version) not in there:
                    tx.versions.forget_delta(state.index, version)


def named_blobs(tx: Transaction) -> set[str]:
    """Of all versions and differences that are not forgotten."""
    names = {
        blob.name
        for version in tx.versions.all()
        for blob in (version.weights, version.velocity, version.residual)
        if blob
    }
    for state in tx.blocks.states():
        names |= {blob.name for blob in tx.versions.deltas(state.index).values()}
    return names
