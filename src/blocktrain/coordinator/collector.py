"""Deletes what is not needed any more: old versions, and chunks that nothing refers to."""

from collections.abc import Iterable

from blocktrain.coordinator.run import Run
from blocktrain.coordinator.updates import signed_claim
from blocktrain.ledger.transaction import Transaction
from blocktrain.swarm import merging_rules

# A chunk that nothing refers to may belong to an upload or a merge that is under way.
COLLECT_SECONDS = 3600.0
# A deleted version's chunks stay for workers that were given it and fetch at least this fast.
FETCH_SECONDS = 60.0
FETCH_BYTES_PER_SECOND = 1e6


class Collector:
    def __init__(self, run: Run) -> None:
        self.run = run
        self._retired: dict[str, float] = {}  # chunks, and since when nothing refers to them

    def retire(self, chunks: Iterable[str], since: float | None = None) -> None:
        """Nothing refers to these chunks any more: the next collection deletes them, unless they
        are put again. Those of a coordinator that stops before are found like any other."""
        self._retired.update(dict.fromkeys(chunks, self.run.clock() if since is None else since))

    def collect(self) -> int:
        """Delete old versions, and chunks that nothing refers to; the number of these chunks."""
        now = self.run.clock()
        with self.run.ledger.write() as tx:
            tx.blocks.lock()
            self._refuse_never_sent(tx)
            before = referenced_blobs(tx)
            self._forget_old_versions(tx)
            self._forget_useless_deltas(tx)
            kept, live = referenced_blobs(tx), tx.updates.live()
            model_bytes = sum(
                tx.versions.get(state.index).weights.size for state in tx.blocks.states()
            )
            fetched = now + FETCH_SECONDS + model_bytes / FETCH_BYTES_PER_SECOND
            tx.versions.retire_blobs(before - kept, now, fetched)
            ended, fetching = tx.versions.end_retired(now), tx.versions.retired_blobs()
        for name, since in ended.items():
            self.retire(self._chunks_of(self.run.chunks.has([name])), since)
        corpus = {blob.name for blob in self.run.description.corpus.values()}
        # Retired blobs may be missing, for example from a backup that was restored.
        needed = self._chunks_of(corpus | kept | self.run.chunks.has(fetching))
        return self._delete_all_but(
            needed | {chunk for row in live for chunk in signed_claim(row).recipe.chunks}
        )

    def _delete_all_but(self, needed: set[str]) -> int:
        oldest, deleted = self.run.clock() - COLLECT_SECONDS, 0
        retired, self._retired = self._retired, {}
        for name, put_at in self.run.chunks.stored():
            # Right after the look at its age, because putting a chunk again makes it new.
            if name not in needed and put_at < max(oldest, retired.get(name, oldest)):
                self.run.chunks.delete(name)
                deleted += 1
        self.run.chunks.clear_leftovers(oldest)
        return deleted

    def _chunks_of(self, blobs: Iterable[str]) -> set[str]:
        return {chunk for name in blobs for chunk in self.run.blobs.chunks_of(name)}

    def _refuse_never_sent(self, tx: Transaction) -> None:
        """Updates that were only offered, whose lease has ended, and that would be too late now."""
        current = {state.index: state.version for state in tx.blocks.states()}
        leased = {lease.id for lease in tx.leases.held()}
        for row in tx.updates.live():
            swarm = self.run.config.swarm
            weight = merging_rules.update_weight(swarm, current[row.block], row.base_version)
            if row.state == "offered" and row.lease not in leased and weight == 0.0:
                tx.updates.refuse(row.lease, "it was never sent")

    def _forget_old_versions(self, tx: Transaction) -> None:
        """All but the newest few, the bases of leases and updates, and those that were current
        when the oldest open lease was given (blocks of a cascade read the blocks before)."""
        leases = tx.leases.held()
        in_use = {(lease.block, lease.base_version) for lease in leases}
        in_use |= {(update.block, update.base_version) for update in tx.updates.live()}
        since = min((lease.created for lease in leases), default=self.run.clock())
        versions = tx.versions.all()
        replaced = {(version.block, version.version - 1): version.created for version in versions}
        current = {state.index: state.version for state in tx.blocks.states()}
        for version in versions:
            key = (version.block, version.version)
            is_recent = (
                version.version > current[version.block] - self.run.config.swarm.keep_versions
            )
            if not is_recent and key not in in_use and replaced.get(key, 0.0) < since:
                tx.versions.forget(version.block, version.version)

    def _forget_useless_deltas(self, tx: Transaction) -> None:
        """All but those that lead to a stored version, and the newest ones that are together
        smaller than the newest version."""
        stored = {(version.block, version.version) for version in tx.versions.all()}
        for state in tx.blocks.states():
            deltas = tx.versions.deltas(state.index)
            useful = merging_rules.useful_deltas(
                {version: blob.size for version, blob in deltas.items()},
                tx.versions.get(state.index).weights.size,
            )
            for version in deltas:
                if version not in useful and (state.index, version) not in stored:
                    tx.versions.forget_delta(state.index, version)


def referenced_blobs(tx: Transaction) -> set[str]:
    """Those of all stored versions and deltas."""
    names = {
        blob.name
        for version in tx.versions.all()
        for blob in (version.weights, version.velocity, version.residual)
        if blob
    }
    for state in tx.blocks.states():
        names |= {blob.name for blob in tx.versions.deltas(state.index).values()}
    return names
