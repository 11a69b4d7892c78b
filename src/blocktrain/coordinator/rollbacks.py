"""Rolls a block back whose loss on hidden text jumped after a merge, and removes the merged updates
of workers whose replays differed.

After a jump, all updates since the last good version are removed again, their batches are trained
again, and no worker is punished: which update is to blame is not known, and it may be the base. At
most one such rollback of a block in half an hour.
"""

import logging
from collections.abc import Collection

from blocktrain.coordinator.run import Run
from blocktrain.coordinator.unmerger import Choice, Unmerged, Unmerger
from blocktrain.coordinator.verdicts import hidden_loss
from blocktrain.errors import RunError
from blocktrain.ledger.ledger import Transaction
from blocktrain.swarm.rollback import (
    PAUSE_SECONDS,
    Jump,
    Opinion,
    clean_versions,
    find_jump,
)

log = logging.getLogger(__name__)

WAIT_SECONDS = 30.0  # for another coordinator's merge of the block to end
MOST_SCORES = 128  # newest scores of a block that are looked at


class Rollbacks:
    def __init__(self, run: Run) -> None:
        self.run, self._unmerger = run, Unmerger(run)

    def roll_back_due(self) -> int:
        """Roll back every block whose loss has jumped. Returns the number of new versions. Call
        this when validators have reported."""
        return sum(self._look_at(block) is not None for block in range(self.run.config.block_count))

    def remove_updates_of(self, workers: Collection[str]) -> int:
        """Remove the updates of dishonest workers from all blocks, as far back as updates are kept.
        Returns the number of new versions."""
        reason = "replays have not shown that its worker trained as it said"
        return sum(
            self._remove(block, lambda row: row.worker in workers, reason) is not None
            for block in range(self.run.config.block_count if workers else 0)
        )

    def _look_at(self, block: int) -> Unmerged | None:
        now = self.run.clock()
        with self.run.ledger.read() as tx:
            jump = find_jump(self._opinions(tx, block))
        if jump is None:
            return None
        with self.run.ledger.write() as tx:
            if not tx.blocks.begin_rollback(block, now, PAUSE_SECONDS):
                return None
        return self._roll_back(block, jump)

    def _roll_back(self, block: int, jump: Jump) -> Unmerged | None:
        reason = (
            f"the loss on hidden text jumped from {jump.usual:.3f} to {jump.loss:.3f} after"
            f" version {jump.good}"
        )
        done = self._remove(block, lambda row: (row.merged_into or 0) > jump.good, reason)
        if done is None:
            fields = {"block": block}
            log.warning("%s, but no update since then can be removed", reason, extra=fields)
        return done

    def _remove(self, block: int, choice: Choice, reason: str) -> Unmerged | None:
        """Remove the chosen updates; None if there are none, or the block cannot be rebuilt."""
        fields = {"block": block}
        try:
            done = self._unmerger.unmerge(block, choice, reason, WAIT_SECONDS)
        except RunError as error:
            log.warning("%s, but it cannot be rolled back: %s", reason, error, extra=fields)
            return None
        if done:
            log.warning("rolled back: %s; %s", reason, done, extra=fields)
        return done

    def _opinions(self, tx: Transaction, block: int) -> list[Opinion]:
        """Measured losses of the versions that contain no removed update."""
        scores = tx.checks.newest_scores(block, MOST_SCORES)
        clean = set(clean_versions({each.version for each in scores}, tx.updates.removals(block)))
        opinions = []
        for version, validator, result in scores:
            loss = hidden_loss(result) if version in clean else None
            if loss is not None:
                opinions.append(Opinion(version, validator, loss))
        return opinions
