"""Merges updates that are due into versions. Knows neither requests nor when it is called."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from blocktrain import faults
from blocktrain.coordinator.collector import Collector
from blocktrain.coordinator.run import Run
from blocktrain.coordinator.updates import signed_claim
from blocktrain.errors import (
    BlocktrainError,
    CorruptFileError,
    DivergedError,
    NotFoundError,
    ProtocolError,
)
from blocktrain.ledger.rows import Version
from blocktrain.ledger.transaction import Transaction
from blocktrain.numerics.merge import merge_rule
from blocktrain.protocol.messages import Blob, Recipe, UpdateClaim
from blocktrain.storage.merging import Compression, Merged, MergeInput, merge_blobs
from blocktrain.swarm import merging_rules
from blocktrain.swarm.state import BlockState, PendingUpdate

log = logging.getLogger(__name__)

# A coordinator claims a merge before it does the work. Claims end by themselves, because it may
# die; one that ends too early only means that two coordinators do the same work.
CLAIM_SECONDS = 5.0
CLAIM_BYTES_PER_SECOND = 50e6
UNREADABLE = (NotFoundError, CorruptFileError, ProtocolError)


class Merger:
    def __init__(self, run: Run, collector: Collector) -> None:
        self.run, self._collector = run, collector

    def merge_due(self) -> int:
        """Merge every block that is due; the number of new versions. Several coordinators may do
        this at the same time."""
        with self.run.ledger.read() as tx:
            states = tx.blocks.states()
        versions = 0
        for state in states:
            due = merging_rules.due_updates(state, self.run.config.swarm, self.run.clock())
            try:
                versions += bool(due and self.merge(state, due))
            except BlocktrainError as error:
                fields = {"block": state.index}
                log.warning("merge failed, will try again: %s", error, extra=fields)
        if all(state.finished for state in states):
            self._finish()
        return versions

    def merge(self, state: BlockState, due: Sequence[PendingUpdate]) -> bool:
        """Merge these updates of a block into a new version; whether that was published."""
        if not self._claim(state, len(due)):
            return False
        published, updates = False, due
        try:
            updates = self._refuse_stale(state, due)
            if updates:
                published = self._merge_and_publish(state, updates)
        except DivergedError as error:
            self._refuse(updates, str(error))
        except UNREADABLE:
            if not self._refuse_lost(state, updates):
                raise
        finally:
            if not published:  # publishing ends the claim
                with self.run.ledger.write() as tx:
                    tx.blocks.release_merge(state.index, state.version)
        return published

    def _claim(self, state: BlockState, updates: int) -> bool:
        with self.run.ledger.write() as tx:
            to_read = (1 + updates) * tx.versions.get(state.index).weights.size
            seconds = CLAIM_SECONDS + to_read / CLAIM_BYTES_PER_SECOND
            return tx.blocks.claim_merge(state.index, state.version, self.run.clock(), seconds)

    def _merge_and_publish(self, state: BlockState, updates: Sequence[PendingUpdate]) -> bool:
        with self.run.ledger.read() as tx:
            current = tx.versions.get(state.index, state.version)
            inputs = self._inputs(tx, state, updates)
        if not inputs:
            return False
        merged = self._merged(
            state, current, inputs, final=merging_rules.makes_last_version(state, updates)
        )
        faults.reached("merge-written")
        if not self._publish(state, merged, updates):
            return False
        faults.reached("published")
        recipes = [each.end for each in inputs if isinstance(each.end, Recipe)]
        self._collector.retire(chunk for recipe in recipes for chunk in recipe.chunks)
        return True

    def _inputs(
        self, tx: Transaction, state: BlockState, updates: Sequence[PendingUpdate]
    ) -> list[MergeInput]:
        """What is merged; nothing if another coordinator has merged one of them already."""
        waiting = tx.updates.pending(state.index)
        if any(update.lease not in waiting for update in updates):
            return []
        factors = merging_rules.chain_factors(updates)
        return [
            self._input(tx, state, each, signed_claim(waiting[each.lease]), factors[each.lease])
            for each in updates
        ]

    def _input(
        self,
        tx: Transaction,
        state: BlockState,
        update: PendingUpdate,
        claim: UpdateClaim,
        factor: float,
    ) -> MergeInput:
        swarm = self.run.config.swarm
        share = factor * merging_rules.update_weight(swarm, state.version, update.base_version)
        covered = update.steps * self.run.batch_bytes
        if claim.codec != "none":
            return MergeInput(update.lease, claim.recipe, covered, share=share, encoded=True)
        start = None
        if update.base_version != state.version:
            start = tx.versions.get(state.index, update.base_version).weights
        return MergeInput(update.lease, claim.recipe, covered, start, share)

    def _merged(
        self,
        state: BlockState,
        current: Version,
        inputs: Sequence[MergeInput],
        *,
        final: bool,
    ) -> Merged:
        swarm = self.run.config.swarm
        codec = merging_rules.delta_codec(swarm, state, len(inputs))
        merge = partial(
            merge_blobs,
            self.run.blobs,
            current.weights,
            inputs,
            current.velocity,
            merge_rule(swarm),
        )
        if not codec:
            return merge()
        compression = Compression(None if final else codec, current.residual)
        try:
            return merge(compression)
        except UNREADABLE:
            if current.residual is None or self._is_intact(current.residual):
                raise
        # A residual only corrects later deltas. No worker has it, so it may be dropped.
        fields = {"block": state.index}
        log.warning("the residual of the last delta is lost, merging without it", extra=fields)
        with self.run.ledger.write() as tx:
            tx.versions.forget_residual(state.index, state.version)
        return merge(replace(compression, residual=None))

    def _publish(self, state: BlockState, merged: Merged, updates: Sequence[PendingUpdate]) -> bool:
        now = self.run.clock()
        version, steps = state.version + 1, sum(update.steps for update in updates)
        with self.run.ledger.write() as tx:
            if not tx.publish(
                state.index,
                state.version,
                merged.weights,
                merged.velocity,
                updates,
                now,
                delta=merged.delta,
                residual=merged.residual,
            ):
                return False
            detail = f"version {version}: {len(updates)} updates, {steps} steps"
            tx.events.add(now, "merged", block=state.index, detail=detail)
        fields = {"block": state.index, "version": version}
        log.info("version merged: %d updates, %d steps", len(updates), steps, extra=fields)
        return True

    def _refuse_stale(
        self, state: BlockState, due: Sequence[PendingUpdate]
    ) -> Sequence[PendingUpdate]:
        """Refuse those that fell too far behind while they waited, and return the others."""
        fresh, stale = merging_rules.split_stale(self.run.config.swarm, state.version, due)
        for update in stale:
            behind = state.version - update.base_version
            self._refuse([update], f"it fell {behind} versions behind while it waited")
        return fresh

    def _refuse_lost(self, state: BlockState, updates: Sequence[PendingUpdate]) -> bool:
        """Refuse updates that can never be merged, because all others of the block wait for them;
        whether there were any."""
        lost = self._lost(state, updates)
        self._refuse(lost, "chunks of it, or of the version it started from, are lost or altered")
        return bool(lost)

    def _refuse(self, updates: Sequence[PendingUpdate], reason: str) -> None:
        """Their text is handed out again."""
        now = self.run.clock()
        with self.run.ledger.write() as tx:
            tx.blocks.lock()
            for update in updates:
                lease = tx.leases.get(update.lease)
                assert lease is not None
                if tx.updates.refuse(update.lease, reason):
                    tx.blocks.give_back_range(lease.block, lease.first_batch, lease.steps)
                    tx.events.add(now, "refused", update.worker, lease.block, reason)
                    fields = {"lease": lease.id, "worker": update.worker, "block": lease.block}
                    log.info("update refused: %s", reason, extra=fields)

    def _lost(self, state: BlockState, updates: Sequence[PendingUpdate]) -> list[PendingUpdate]:
        with self.run.ledger.read() as tx:
            bases = {
                version.version: version.weights
                for version in tx.versions.all()
                if version.block == state.index
            }
            rows = [tx.updates.get(update.lease) for update in updates]
        claims = {row.lease: signed_claim(row) for row in rows if row}

        def is_lost(update: PendingUpdate) -> bool:
            claim = claims[update.lease]
            if not self._is_intact(claim.recipe):
                return True
            if claim.codec != "none" or update.base_version == state.version:
                return False
            base = bases.get(update.base_version)
            return base is None or not self._is_intact(base)

        return [update for update in updates if is_lost(update)]

    def _is_intact(self, file: Recipe | Blob) -> bool:
        try:
            recipe = file if isinstance(file, Recipe) else self.run.blobs.recipe(file.name)
        except (NotFoundError, CorruptFileError):
            return False
        intact = [self._is_chunk_intact(name) for name in recipe.chunks]  # each, to delete all bad
        return all(intact)

    def _is_chunk_intact(self, chunk: str) -> bool:
        """Deletes an altered chunk, because a worker is never asked for one that is stored."""
        try:
            self.run.chunks.get(chunk)
        except NotFoundError:
            return False
        except CorruptFileError as error:
            log.warning("%s; deleting the chunk", error)
            self.run.chunks.delete(chunk)
            return False
        return True

    def _finish(self) -> None:
        now = self.run.clock()
        with self.run.ledger.write() as tx:
            if tx.finish_run(now):
                tx.events.add(now, "finished")
                log.info("the run is finished")
