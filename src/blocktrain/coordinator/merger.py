"""Merges due updates into versions, and deletes versions and chunks that are no longer needed.

Knows neither requests nor when it is called.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from sqlalchemy.exc import SQLAlchemyError

from blocktrain import faults
from blocktrain.coordinator.heirs import open_heirs
from blocktrain.coordinator.replays import replayed_versions
from blocktrain.coordinator.run import Run
from blocktrain.coordinator.updates import refuse_update, signed_claim
from blocktrain.coordinator.verification import block_bounds, last_moves
from blocktrain.errors import (
    BlocktrainError,
    CorruptFileError,
    DivergedError,
    NotFoundError,
    ProtocolError,
)
from blocktrain.ledger.ledger import Transaction
from blocktrain.ledger.schema import ACTIVE, UpdateRow, Version
from blocktrain.protocol.identity import first_identifier
from blocktrain.protocol.messages import Blob, Recipe, UpdateClaim
from blocktrain.storage.blobs import blob_of
from blocktrain.storage.merging import Compression, Merged, MergeInput, merge_blobs
from blocktrain.storage.weights_file import weights_form
from blocktrain.swarm import merging_rules, reputation
from blocktrain.swarm.bounds import Bounds, Move, compared_with
from blocktrain.swarm.rollback import clean_versions, kept_starts
from blocktrain.swarm.state import BlockState, PendingUpdate

log = logging.getLogger(__name__)

# A coordinator claims a merge before it starts the merge. Claims expire, because a coordinator may
# die. If a claim expires too early, two coordinators merely do the same work.
CLAIM_SECONDS = 5.0
CLAIM_BYTES_PER_SECOND = 50e6
UNREADABLE = (NotFoundError, CorruptFileError, ProtocolError)

# An unreferenced chunk may belong to an upload or a merge in progress.
COLLECT_SECONDS = 3600.0
REFUSED_SECONDS = 60.0  # how long chunks of refused updates stay at least
UNFINISHED_SECONDS = 600.0  # without another byte, a chunk that is being received is abandoned
# Chunks of a deleted version stay for workers that download it, if they are at least this fast.
FETCH_SECONDS = 60.0
FETCH_BYTES_PER_SECOND = 1e6


class Collector:
    def __init__(self, run: Run) -> None:
        self.run = run
        self._retired: dict[str, float] = {}  # by chunk: since when it is unreferenced

    def retire(self, chunks: Iterable[str], since: float | None = None) -> None:
        """Mark chunks as unreferenced: the next collection deletes them, unless they are stored
        again. If the coordinator stops before that, later collections find them by their age."""
        self._retired.update(dict.fromkeys(chunks, self.run.clock() if since is None else since))

    def collect(self) -> int:
        """Delete old versions and unreferenced chunks. Returns the number of deleted chunks."""
        try:
            needed = self._forget()
        except SQLAlchemyError:
            # The disk may be full: deleting chunks makes room for the ledger.
            with self.run.ledger.read() as tx:
                names = self.run.needed_blobs(tx) | tx.versions.retired_blobs()
                history = self._history(tx, _current(tx))
                still_needed = [*tx.updates.live(), *history.updates]
            names = self.run.chunks.has(names)
            self._delete_all_but(self._chunks_of(names) | _sent(still_needed))
            raise
        return self._delete_all_but(needed)

    def _forget(self) -> set[str]:
        """Remove from the ledger what is no longer needed. Returns the chunks that are still
        needed."""
        now = self.run.clock()
        with self.run.ledger.write() as tx:
            tx.blocks.lock()
            current = _current(tx)
            self._refuse_never_sent(tx, current)
            before = self.run.needed_blobs(tx)
            history = self._history(tx, current)
            self._forget_old_versions(tx, current, history.versions)
            self._forget_useless_deltas(tx, current)
            names = self.run.needed_blobs(tx)
            replayed = tx.checks.being_replayed()
            still_needed = [*tx.updates.live(), *history.updates, *replayed]
            refused = tx.updates.refused_since(first_identifier(now - 2 * COLLECT_SECONDS))
            model_bytes = sum(version.weights.size for version in current.values())
            fetched = now + FETCH_SECONDS + model_bytes / FETCH_BYTES_PER_SECOND
            tx.versions.retire_blobs(before - names, now, fetched)
            ended, fetching = tx.versions.end_retired(now), tx.versions.retired_blobs()
        for name, since in ended.items():
            self.retire(self._chunks_of(self.run.chunks.has([name])), since)
        for offer in refused:  # a chunk of it may just have been sent for another update
            chunks = UpdateClaim.model_validate_json(offer).recipe.chunks
            self.retire(chunks, now - REFUSED_SECONDS)
        # A retired blob may be missing, for example after a restore.
        self.retire(chunk for row in history.ended for chunk in signed_claim(row).recipe.chunks)
        return self._chunks_of(names | self.run.chunks.has(fetching)) | _sent(still_needed)

    def _history(self, tx: Transaction, current: Mapping[int, Version]) -> "_History":
        """What is kept to remove merged updates again. Without a codec, an update's change is the
        difference from its base, so the bases are kept too."""
        history, swarm = _History(set(), [], []), self.run.config.swarm
        stored: dict[int, set[int]] = defaultdict(set)
        for version in tx.versions.all():
            stored[version.block].add(version.version)
        for block, newest in current.items():
            clean = clean_versions(stored[block], tx.updates.removals(block))
            starts = kept_starts(clean, newest.version, swarm.keep_updates)
            history.versions.update((block, version) for version in starts)
            for row in tx.updates.merged_after(block, min(stored[block])) if starts else ():
                is_kept = (row.merged_into or 0) > starts[0]
                (history.updates if is_kept else history.ended).append(row)
                if is_kept and swarm.codec == "none":
                    history.versions.add((block, row.base_version))
        return history

    def _delete_all_but(self, needed: set[str]) -> int:
        """Delete all chunks that are not needed and are old or marked. Returns their number."""
        now, deleted = self.run.clock(), 0
        oldest = now - COLLECT_SECONDS
        retired, self._retired = self._retired, {}
        for name, put_at in self.run.chunks.stored():
            # Delete right after the check of its age, because storing a chunk again renews it.
            if name not in needed and put_at < max(oldest, retired.get(name, oldest)):
                self.run.chunks.delete(name)
                deleted += 1
        has_urls = self.run.chunks.has_presigned_urls  # leftovers: whole uploads in quarantine
        self.run.chunks.clear_leftovers(oldest if has_urls else now - UNFINISHED_SECONDS)
        return deleted

    def _chunks_of(self, blobs: Iterable[str]) -> set[str]:
        return {chunk for name in blobs for chunk in self.run.blobs.chunks_of(name)}

    def _refuse_never_sent(self, tx: Transaction, current: Mapping[int, Version]) -> None:
        """Refuse updates that were only offered, whose lease has ended, and that are too stale or
        have not been sent for long."""
        swarm, before = self.run.config.swarm, self.run.clock() - COLLECT_SECONDS
        for row in tx.updates.live():
            lease = tx.leases.get(row.lease) if row.state == "offered" else None
            if lease is None or lease.state in ACTIVE:
                continue
            version = current[row.block].version
            weight = merging_rules.update_weight(swarm, version, row.base_version)
            if weight == 0.0 or lease.deadline < before:
                tx.updates.refuse(row.lease, "the update was never sent")

    def _forget_old_versions(
        self, tx: Transaction, current: Mapping[int, Version], in_use: Set[tuple[int, int]]
    ) -> None:
        """Delete versions except the newest few, those `in_use`, the bases of leases and updates,
        those that replays need, and those that were current when the oldest open lease was granted
        (blocks of a cascade read their predecessors)."""
        leases = tx.leases.active()
        in_use = in_use | {(lease.block, lease.base_version) for lease in leases}
        in_use |= {(update.block, update.base_version) for update in tx.updates.live()}
        in_use |= replayed_versions(tx, self.run.config)
        since = min((lease.created for lease in leases), default=self.run.clock())
        versions = tx.versions.all()
        replaced = {(version.block, version.version - 1): version.created for version in versions}
        for version in versions:
            key = (version.block, version.version)
            age = current[version.block].version - version.version
            is_recent = age < self.run.config.swarm.keep_versions
            if not is_recent and key not in in_use and replaced.get(key, 0.0) < since:
                tx.versions.forget(version.block, version.version)

    def _forget_useless_deltas(self, tx: Transaction, current: Mapping[int, Version]) -> None:
        """Delete deltas except those that lead to a stored version, and the newest ones that are
        together smaller than the newest version."""
        stored = {(version.block, version.version) for version in tx.versions.all()}
        for block, newest in current.items():
            sizes = {version: delta.size for version, delta in tx.versions.deltas(block).items()}
            useful = merging_rules.useful_deltas(sizes, newest.weights.size)
            for version in sizes:
                if version not in useful and (block, version) not in stored:
                    tx.versions.forget_delta(block, version)


def _current(tx: Transaction) -> dict[int, Version]:
    """The newest version of each block."""
    return {state.index: tx.versions.get(state.index) for state in tx.blocks.states()}


def _sent(updates: Iterable[UpdateRow]) -> set[str]:
    """The chunks of these updates, and the names of their recipes."""
    recipes = [signed_claim(row).recipe for row in updates]
    return {name for recipe in recipes for name in (blob_of(recipe).name, *recipe.chunks)}


class _History(NamedTuple):
    """What is kept for rebuilds: versions by block and number, and merged updates. `ended`: updates
    whose time is over."""

    versions: set[tuple[int, int]]
    updates: list[UpdateRow]
    ended: list[UpdateRow]


class MergedAs(NamedTuple):
    """How an update was merged: its weight in the mean, the factor of its change for being late,
    whether all batches were leased, which gives the delta another codec, and by tensor the factors
    by which it was clipped."""

    weight: float
    late: float
    final: bool
    clip: Sequence[float] | None = None

    @classmethod
    def of(cls, row: UpdateRow) -> "MergedAs | None":
        """None: it was merged by a release that did not record it."""
        return cls(**json.loads(row.merged_as)) if row.merged_as else None


def merge_inputs(
    updates: Mapping[PendingUpdate, MergedAs],
    claims: Mapping[str, UpdateClaim],
    starts: Mapping[int, Blob],
) -> list[MergeInput]:
    """The updates of one merge. `claims`: by lease. `starts`: the weights of base versions that the
    updates without a codec are compared with."""
    factors, inputs = merging_rules.chain_factors(list(updates)), []
    for update, how in updates.items():
        claim = claims[update.lease]
        is_encoded = claim.codec != "none"
        start = None if is_encoded else starts.get(update.base_version)
        share = factors[update.lease] * how.late
        weight, end = how.weight, claim.recipe
        inputs.append(MergeInput(update.lease, end, weight, start, share, is_encoded, how.clip))
    return inputs


class _Clipped(NamedTuple):
    """The factors by which an update is scaled, by tensor, and how far it moves the block then;
    None: it counts as it is."""

    factors: list[float] | None
    move: Move | None


class Merger:
    def __init__(self, run: Run, collector: Collector) -> None:
        self.run, self._collector = run, collector
        self._bounds: dict[int, Bounds] = {}  # by block

    def merge_due(self) -> int:
        """Merge every block that is due. Returns the number of new versions. Several coordinators
        may do this concurrently."""
        with self.run.ledger.read() as tx:
            states = tx.blocks.states()
        versions = 0
        for state in states:
            due = merging_rules.due_updates(state, self.run.config.swarm, self.run.clock())
            try:
                versions += bool(due and self.merge(state, due))
            except BlocktrainError as error:
                log.warning("merge failed, trying again: %s", error, extra={"block": state.index})
        versions += open_heirs(self.run)
        if all(state.finished for state in states):
            with self.run.ledger.write() as tx:
                if tx.finish_run(now := self.run.clock()):
                    tx.events.add(now, "finished")
        return versions

    def merge(self, state: BlockState, due: Sequence[PendingUpdate]) -> bool:
        """Merge these updates into a new version of their block. Returns whether it was
        published."""
        if not self._claim(state, len(due)):
            return False
        published, updates = False, list(due)
        try:
            updates, stale = merging_rules.split_stale(self.run.config.swarm, state.version, due)
            for update in stale:
                behind = state.version - update.base_version
                self._refuse([update], f"the update fell {behind} versions behind while it waited")
            if updates:
                published = self._merge_and_publish(state, updates)
        except DivergedError as error:
            self._refuse(updates, str(error))
        except UNREADABLE:
            if not self._refuse_lost(state, updates):
                raise
        finally:
            if not published:  # publishing releases the claim
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
            waiting = tx.updates.pending(state.index)
            if any(update.lease not in waiting for update in updates):
                return False  # another coordinator has merged or refused it
            claims = {each.lease: signed_claim(waiting[each.lease]) for each in updates}
            moves = self._clipped(tx, current, {each: waiting[each.lease] for each in updates})
            as_what = {each: self._how(tx, state, each, moves[each]) for each in updates}
            inputs = merge_inputs(as_what, claims, self._starts(tx, state, updates))
        merged = self._merged(state, current, inputs, updates)
        faults.reached("merge-written")
        if not self._publish(state, merged, as_what, moves):
            return False
        faults.reached("published")
        if not self.run.config.swarm.keep_updates:
            chunks = (name for claim in claims.values() for name in claim.recipe.chunks)
            self._collector.retire(chunks)
        return True

    def _clipped(
        self, tx: Transaction, current: Version, rows: Mapping[PendingUpdate, UpdateRow]
    ) -> dict[PendingUpdate, "_Clipped"]:
        """How far each of the updates that are merged together may move the block."""
        if current.block not in self._bounds:
            specs = weights_form(self.run.blobs.reader(current.weights))
            self._bounds[current.block] = block_bounds(self.run.config, specs)
        moves = {each: Move.from_json(row.norms) for each, row in rows.items() if row.norms}
        others = compared_with(last_moves(tx, current.block), list(moves.values()))
        found = dict.fromkeys(rows, _Clipped(None, None))
        for update, move in moves.items() if others else ():
            factors = self._bounds[current.block].clip_factors(move, others)
            if factors is not None:
                found[update] = _Clipped([float(each) for each in factors], move.scaled(factors))
        return found

    def _how(
        self, tx: Transaction, state: BlockState, update: PendingUpdate, clipped: "_Clipped"
    ) -> MergedAs:
        config = self.run.config
        late = merging_rules.update_weight(config.swarm, state.version, update.base_version)
        weight = update.steps * config.bytes_per_step * self._trust(tx, update.worker)
        return MergedAs(weight, late, state.to_hand_out == 0, clipped.factors)

    def _starts(
        self, tx: Transaction, state: BlockState, updates: Sequence[PendingUpdate]
    ) -> dict[int, Blob]:
        """The weights of the older versions that updates without a codec were trained from."""
        if self.run.config.swarm.codec != "none":
            return {}
        bases = {update.base_version for update in updates} - {state.version}
        return {base: tx.versions.get(state.index, base).weights for base in bases}

    def _trust(self, tx: Transaction, worker: str) -> float:
        """The factor of a worker's updates in a mean."""
        row = tx.members.worker(worker) if tx.checks.required() else None
        return reputation.merge_weight(row) if row else 1.0

    def _merged(
        self,
        state: BlockState,
        current: Version,
        inputs: Sequence[MergeInput],
        updates: Sequence[PendingUpdate],
    ) -> Merged:
        swarm = self.run.config.swarm
        weights, velocity, rule = current.weights, current.velocity, merging_rules.merge_rule(swarm)
        merge = partial(merge_blobs, self.run.blobs, weights, inputs, velocity, rule)
        codec = merging_rules.delta_codec(swarm, state, len(updates))
        if not codec:
            return merge()
        is_last = merging_rules.makes_last_version(state, updates)
        compression = Compression(None if is_last else codec, current.residual)
        try:
            return merge(compression)
        except UNREADABLE:
            if current.residual is None or self._is_intact(current.residual):
                raise
        # The residual only corrects later deltas and no worker has it, so it can be dropped.
        fields = {"block": state.index}
        log.warning("the residual of the last delta is lost, merging without it", extra=fields)
        with self.run.ledger.write() as tx:
            tx.versions.forget_residual(state.index, state.version)
        return merge(replace(compression, residual=None))

    def _publish(
        self,
        state: BlockState,
        merged: Merged,
        updates: Mapping[PendingUpdate, MergedAs],
        moves: Mapping[PendingUpdate, "_Clipped"],
    ) -> bool:
        now = self.run.clock()
        with self.run.ledger.write() as tx:
            published = tx.publish(
                state.index,
                state.version,
                merged.weights,
                merged.velocity,
                list(updates),
                now,
                delta=merged.delta,
                residual=merged.residual,
                merged_as={each.lease: json.dumps(how._asdict()) for each, how in updates.items()},
            )
            if published:
                steps = sum(update.steps for update in updates)
                for update, (factors, move) in moves.items():
                    if factors is not None and move is not None:
                        self._record_clip(tx, state.index, update, min(factors), move)
                count = f"{len(updates)} update{'s' * (len(updates) > 1)}"
                detail = f"version {state.version + 1}: {count}, {steps} steps"
                tx.events.add(now, "merged", block=state.index, detail=detail)
        return published

    def _record_clip(
        self, tx: Transaction, block: int, update: PendingUpdate, factor: float, move: Move
    ) -> None:
        tx.updates.record_clip(update.lease, factor, move.to_json())
        detail = (
            f"its largest change of a tensor counts with factor {factor:.2f}, since it was larger"
            f" than usual (lease {update.lease})"
        )
        tx.events.add(self.run.clock(), "clipped", update.worker, block, detail)

    def _refuse_lost(self, state: BlockState, updates: Sequence[PendingUpdate]) -> bool:
        """Refuse updates whose chunks, or whose base's chunks, are lost. They can never be merged,
        and the block's other updates would wait for them. Returns whether there were any."""
        with self.run.ledger.read() as tx:
            bases = {
                version.version: version.weights
                for version in tx.versions.all()
                if version.block == state.index
            }
            rows = [tx.updates.get(update.lease) for update in updates]
        claims = {row.lease: signed_claim(row) for row in rows if row}

        def is_lost(update: PendingUpdate) -> bool:
            claim, base = claims[update.lease], bases.get(update.base_version)
            if not self._is_intact(claim.recipe):
                return True
            needs_base = claim.codec == "none" and update.base_version != state.version
            return needs_base and not (base and self._is_intact(base))

        lost = [update for update in updates if is_lost(update)]
        self._refuse(lost, "chunks of the update or of its base version are missing or damaged")
        return bool(lost)

    def _refuse(self, updates: Sequence[PendingUpdate], reason: str) -> None:
        with self.run.ledger.write() as tx:
            tx.blocks.lock()
            for update in updates:
                lease = tx.leases.get(update.lease)
                assert lease is not None
                refuse_update(tx, lease, reason, self.run.clock(), give_back=True)

    def _is_intact(self, file: Recipe | Blob) -> bool:
        try:
            recipe = file if isinstance(file, Recipe) else self.run.blobs.recipe(file.name)
        except (NotFoundError, CorruptFileError):
            return False
        intact = [
            self._is_chunk_intact(name) for name in recipe.chunks
        ]  # all of them: each damaged one is deleted
        return all(intact)

    def _is_chunk_intact(self, chunk: str) -> bool:
        """Whether a chunk is stored and undamaged. A damaged chunk is deleted, so that a worker can
        send it again: workers send only chunks that are not stored."""
        try:
            self.run.chunks.get(chunk)
        except NotFoundError:
            return False
        except CorruptFileError as error:
            log.warning("%s; deleting the chunk", error)
            self.run.chunks.delete(chunk)
            return False
        return True
