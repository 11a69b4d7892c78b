"""What a coordinator does by itself: updates become versions, once enough of them are there."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from blocktrain import faults
from blocktrain.coordinator.collector import Collector
from blocktrain.coordinator.run import Run
from blocktrain.coordinator.updates import claimed
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

# A claim ends soon after the merge should have: what a coordinator that died had claimed waits for
# it. One that ends too soon only means that two do the same work.
CLAIM_SECONDS = 5.0
CLAIM_BYTES_PER_SECOND = 50e6


class Merger:
    def __init__(self, run: Run, collector: Collector) -> None:
        self.run, self._collector = run, collector

    def merge_due(self) -> int:
        """Merge every block whose time has come; how many versions that made. Blocks never wait
        for each other, and two coordinators doing this at once do no harm."""
        with self.run.ledger.read() as tx:
            states = tx.blocks.states()
        made = 0
        for state in states:
            due = merging_rules.due_updates(state, self.run.config.swarm, self.run.clock())
            try:
                made += bool(due and self._merge(state, due))
            except BlocktrainError as error:
                log.warning("block %d: merge failed, will try again: %s", state.index, error)
        if all(state.finished for state in states):
            self._finish()
        return made

    def _merge(self, state: BlockState, due: Sequence[PendingUpdate]) -> bool:
        now = self.run.clock()
        with self.run.ledger.write() as tx:
            to_read = (1 + len(due)) * tx.versions.get(state.index).weights.size
            seconds = CLAIM_SECONDS + to_read / CLAIM_BYTES_PER_SECOND
            if not tx.blocks.claim_merge(state.index, state.version, now, seconds):
                return False
        made = False
        try:
            made = self._merge_claimed(state, due)
        finally:
            if not made:  # a version that was published has ended the claim
                with self.run.ledger.write() as tx:
                    tx.blocks.release_merge(state.index, state.version)
        return made

    def _merge_claimed(self, state: BlockState, due: Sequence[PendingUpdate]) -> bool:
        swarm = self.run.config.swarm
        fresh, stale = merging_rules.split_stale(swarm, state.version, due)
        for update in stale:
            behind = state.version - update.base_version
            self._refuse([update], f"it fell {behind} versions behind while it waited")
        if not fresh:
            return False
        try:
            with self.run.ledger.read() as tx:
                current = tx.versions.get(state.index, state.version)
                waiting = tx.updates.pending(state.index)
                if any(item.lease not in waiting for item in fresh):
                    return False  # another coordinator was faster
                factors = merging_rules.chain_factors(fresh)
                sources = [
                    self._source(tx, state, item, claimed(waiting[item.lease]), factors[item.lease])
                    for item in fresh
                ]
            merged = self._merged(
                state, current, sources, final=merging_rules.makes_last_version(state, fresh)
            )
        except DivergedError as error:
            self._refuse(fresh, str(error))
            return False
        except (NotFoundError, CorruptFileError, ProtocolError):
            lost = self._lost(state, fresh)
            if not lost:
                raise
            self._refuse(
                lost, "what it was made of or trained from is not kept any more, or was altered"
            )
            return False
        faults.reached("merge-written")
        due = fresh
        with self.run.ledger.write() as tx:
            published = tx.publish(
                state.index,
                state.version,
                merged.weights,
                merged.velocity,
                due,
                self.run.clock(),
                delta=merged.delta,
                residual=merged.residual,
            )
            if not published:
                return False
            steps = sum(update.steps for update in due)
            tx.events.add(
                self.run.clock(),
                "merged",
                block=state.index,
                detail=f"version {state.version + 1}: {len(due)} updates, {steps} steps",
            )
        faults.reached("published")
        self._collector.retire(_chunks_of(sources))
        return True

    def _merged(
        self,
        state: BlockState,
        current: Version,
        sources: Sequence[MergeInput],
        *,
        final: bool = False,
    ) -> Merged:
        swarm = self.run.config.swarm
        codec = merging_rules.delta_codec(swarm, state, len(sources))
        merge = partial(
            merge_blobs,
            self.run.blobs,
            current.weights,
            sources,
            current.velocity,
            merge_rule(swarm),
        )
        if not codec:
            return merge()
        compression = Compression(None if final else codec, current.residual)
        try:
            return merge(compression)
        except (NotFoundError, CorruptFileError, ProtocolError):
            if current.residual is None or self._is_whole(current.residual):
                raise
        # It was to be made up for, and nobody builds on it: without it all go on alike.
        log.warning("block %d: what its versions owe was lost; it goes on without", state.index)
        with self.run.ledger.write() as tx:
            tx.versions.forget_residual(state.index, state.version)
        return merge(replace(compression, residual=None))

    def _refuse(self, updates: Sequence[PendingUpdate], reason: str) -> None:
        """Drop updates that wait; their text is handed out again."""
        now = self.run.clock()
        with self.run.ledger.write() as tx:
            tx.blocks.lock()
            for update in updates:
                covered = tx.leases.get(update.lease)
                assert covered is not None
                if tx.updates.refuse(update.lease, reason):
                    tx.blocks.give_back_range(covered.block, covered.first_batch, covered.steps)
                    tx.events.add(now, "refused", update.worker, covered.block, reason)

    def _lost(self, state: BlockState, updates: Sequence[PendingUpdate]) -> list[PendingUpdate]:
        """Updates that can never be merged: all others of the block would wait for ever."""
        with self.run.ledger.read() as tx:
            bases = {
                held.version: held.weights
                for held in tx.versions.all()
                if held.block == state.index
            }
            rows = [tx.updates.get(update.lease) for update in updates]
        claims = {row.lease: claimed(row) for row in rows if row}

        def is_lost(update: PendingUpdate) -> bool:
            claim = claims[update.lease]
            needs_base = claim.codec == "none" and update.base_version != state.version
            base = bases.get(update.base_version)
            return not self._is_whole(claim.recipe) or (
                needs_base and not (base and self._is_whole(base))
            )

        return [update for update in updates if is_lost(update)]

    def _is_whole(self, file: Recipe | Blob) -> bool:
        try:
            recipe = file if isinstance(file, Recipe) else self.run.blobs.recipe(file.name)
        except (NotFoundError, CorruptFileError):
            return False
        found = [self._is_intact(name) for name in recipe.chunks]  # each of them
        return all(found)

    def _is_intact(self, chunk: str) -> bool:
        """Whether it is as it was stored. One that was altered goes: while it is there, nobody is
        asked to send it again."""
        try:
            self.run.chunks.get(chunk)
        except NotFoundError:
            return False
        except CorruptFileError as error:
            log.warning("%s", error)
            self.run.chunks.delete(chunk)
            return False
        return True

    def _source(
        self,
        tx: Transaction,
        state: BlockState,
        update: PendingUpdate,
        claim: UpdateClaim,
        factor: float,
    ) -> MergeInput:
        """An update as the merge sees it: what it ends at, what it started from, what it counts."""
        share = factor * merging_rules.update_weight(
            self.run.config.swarm, state.version, update.base_version
        )
        covered = update.steps * self.run.batch_bytes
        if claim.codec != "none":
            return MergeInput(update.lease, claim.recipe, covered, share=share, encoded=True)
        start = None
        if update.base_version != state.version:
            start = tx.versions.get(state.index, update.base_version).weights
        return MergeInput(update.lease, claim.recipe, covered, start, share)

    def _finish(self) -> None:
        now = self.run.clock()
        with self.run.ledger.write() as tx:
            if tx.finish_run(now):
                tx.events.add(now, "finished")
                log.info("the run is finished")


def _chunks_of(updates: Sequence[MergeInput]) -> list[str]:
    recipes = [update.end for update in updates if isinstance(update.end, Recipe)]
    return [chunk for recipe in recipes for chunk in recipe.chunks]
