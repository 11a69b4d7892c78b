"""Removes merged updates from a block: rebuilds it from an earlier version, without them.

The result is the version that merging the other updates alone would have given, and is published as
the next version: numbers grow, and no number is used twice. The batches of the removed updates are
leased again. Works beside running coordinators: like a merge, it claims the block and replaces the
current version by compare-and-swap. Leases from versions that contain removed updates go on; their
updates are late ones.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from blocktrain import faults
from blocktrain.codec import delta_codec
from blocktrain.coordinator.merger import (
    CLAIM_BYTES_PER_SECOND,
    CLAIM_SECONDS,
    UNREADABLE,
    MergedAs,
    merge_inputs,
)
from blocktrain.coordinator.run import Run
from blocktrain.coordinator.updates import signed_claim
from blocktrain.errors import NotFoundError, RunError
from blocktrain.ledger.ledger import Transaction
from blocktrain.ledger.schema import UpdateRow, Version
from blocktrain.protocol.messages import Blob
from blocktrain.storage.merging import Merge, Merged, rebuild_blobs
from blocktrain.swarm import merging_rules
from blocktrain.swarm.rollback import clean_versions, kept_starts
from blocktrain.swarm.state import PendingUpdate

log = logging.getLogger(__name__)

WAIT_SECONDS = 120.0  # for a merge of the block to end
RETRY_SECONDS = 0.1

Choice = Callable[[UpdateRow], bool]


@dataclass(frozen=True)
class _Plan:
    """How to rebuild a block. `start`: the version that it starts from; `current`: the number of
    the one that it replaces; `kept`: the updates to merge again, by version."""

    start: Version
    current: int
    removed: Sequence[UpdateRow]
    kept: Sequence[Sequence[UpdateRow]]
    bases: dict[int, Blob]  # weights of stored versions, by number

    @property
    def bytes_to_read(self) -> int:
        return (1 + sum(map(len, self.kept))) * self.start.weights.size


@dataclass(frozen=True)
class Unmerged:
    """What was done to a block. `version`: the new one, which was rebuilt from `start`."""

    block: int
    version: int
    start: int
    removed: Sequence[UpdateRow]
    seconds: float

    @property
    def steps(self) -> int:
        return sum(row.steps for row in self.removed)

    def __str__(self) -> str:
        count, versions = len(self.removed), sorted({row.merged_into or 0 for row in self.removed})
        return (
            f"version {self.version} is version {self.start} and the updates since then without"
            f" {count} update{'s' * (count > 1)} ({self.steps} steps) that"
            f" {'were' if count > 1 else 'was'} merged into version"
            f"{'s' * (len(versions) > 1)} {', '.join(map(str, versions))}"
        )


class Unmerger:
    def __init__(self, run: Run) -> None:
        self.run = run

    def unmerge(
        self, block: int, choice: Choice, reason: str, wait_seconds: float = WAIT_SECONDS
    ) -> Unmerged | None:
        """Remove the chosen updates of a block, as far back as its updates are kept; None if there
        are none. RunError if the block does not stand still for this long, or a file is lost."""
        until, began = time.monotonic() + wait_seconds, time.monotonic()
        while True:
            plan = self._plan(block, choice)
            if plan is None:
                return None
            if self._claim(plan) and self._rebuild_and_publish(plan, reason):
                seconds = time.monotonic() - began
                return Unmerged(block, plan.current + 1, plan.start.version, plan.removed, seconds)
            if time.monotonic() > until:
                raise RunError(f"block {block} is being merged by a coordinator; try again")
            time.sleep(RETRY_SECONDS)

    def _plan(self, block: int, choice: Choice) -> _Plan | None:
        with self.run.ledger.read() as tx:
            versions = {each.version: each for each in tx.versions.all() if each.block == block}
            current = tx.blocks.get(block).version
            starts, rows = removable_updates(tx, block, self.run.config.swarm.keep_updates)
        removed = [row for row in rows if choice(row)]
        if not removed:
            return None
        first = min(row.merged_into or 0 for row in removed)
        start = max(version for version in starts if version < first)
        names = {row.lease for row in removed}
        kept = [row for row in rows if (row.merged_into or 0) > start and row.lease not in names]
        groups = [list(group) for _, group in groupby(kept, lambda row: row.merged_into)]
        bases = {number: version.weights for number, version in versions.items()}
        return _Plan(versions[start], current, removed, groups, bases)

    def _claim(self, plan: _Plan) -> bool:
        seconds = CLAIM_SECONDS + plan.bytes_to_read / CLAIM_BYTES_PER_SECOND
        with self.run.ledger.write() as tx:
            now = self.run.clock()
            return tx.blocks.claim_merge(plan.start.block, plan.current, now, seconds)

    def _rebuild_and_publish(self, plan: _Plan, reason: str) -> bool:
        block, published = plan.start.block, False
        try:
            rebuilt = self._rebuilt(plan)
            faults.reached("rebuilt")
            published = self._publish(plan, rebuilt, reason)
        except UNREADABLE as error:
            raise RunError(
                f"block {block} cannot be rebuilt from version {plan.start.version}, because a"
                f" file is lost ({error}); restore the run from a backup"
            ) from None
        finally:
            if not published:  # publishing releases the claim
                with self.run.ledger.write() as tx:
                    tx.blocks.release_merge(block, plan.current)
        return published

    def _rebuilt(self, plan: _Plan) -> Merged:
        swarm, start = self.run.config.swarm, plan.start
        merges = []
        for rows in plan.kept:
            claims = {row.lease: signed_claim(row) for row in rows}
            if swarm.codec == "none" and any(row.base_version not in plan.bases for row in rows):
                raise NotFoundError("the version that an update was trained from was deleted")
            as_what = {_as_pending(row): _how(row) for row in rows}
            is_final = any(how.final for how in as_what.values())
            codec = delta_codec(swarm, len(rows), final=is_final)
            merges.append(Merge(merge_inputs(as_what, claims, plan.bases), codec))
        before = Merged(start.weights, start.velocity, residual=start.residual)
        return rebuild_blobs(self.run.blobs, before, merges, merging_rules.merge_rule(swarm))

    def _publish(self, plan: _Plan, rebuilt: Merged, reason: str) -> bool:
        block, now = plan.start.block, self.run.clock()
        done = Unmerged(block, plan.current + 1, plan.start.version, plan.removed, 0.0)
        with self.run.ledger.write() as tx:
            published = tx.publish_rebuilt(
                block,
                plan.current,
                rebuilt.weights,
                rebuilt.velocity,
                rebuilt.residual,
                plan.removed,
                f"removed again: {reason}",
                now,
            )
            if published:
                tx.events.add(now, "unmerged", block=block, detail=f"{done}: {reason}")
        return published


def removable_updates(
    tx: Transaction, block: int, keep: int
) -> tuple[Sequence[int], Sequence[UpdateRow]]:
    """The versions from which a block can be rebuilt, and the updates that can be removed. `keep`:
    the setting keep_updates."""
    current = tx.blocks.get(block).version
    stored = [each.version for each in tx.versions.all() if each.block == block]
    clean = clean_versions(stored, tx.updates.removals(block))
    first, *_ = kept_starts(clean, current, keep) or [current]
    rows = tx.updates.merged_after(block, first)
    unknown = max((row.merged_into or 0 for row in rows if not row.merged_as), default=first)
    starts = [version for version in clean if version >= unknown]
    rows = [row for row in rows if starts and (row.merged_into or 0) > starts[0]]
    return starts, rows


def _how(row: UpdateRow) -> MergedAs:
    how = MergedAs.of(row)
    assert how is not None, "it is not among the updates that can be removed"
    return how


def _as_pending(row: UpdateRow) -> PendingUpdate:
    assert row.committed is not None, "a merged update was committed"
    return PendingUpdate(
        row.lease, row.worker, row.base_version, row.steps, row.committed, row.continues
    )
