"""Decides on updates by what validators have found, with the rules of swarm/judgement.py and
swarm/reputation.py.

An update passes its checks or is refused. Its worker's reputation follows, and that of a validator
whose result others could not repeat.
"""

import math
from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import Field, TypeAdapter

from blocktrain.coordinator import standing
from blocktrain.coordinator.leases import add_event
from blocktrain.coordinator.members import validators_present
from blocktrain.coordinator.run import SECRET_NUMBERS, Run, secret_number
from blocktrain.coordinator.updates import refuse_update
from blocktrain.ledger.check_tables import ScoredUpdate
from blocktrain.ledger.ledger import Transaction
from blocktrain.ledger.schema import CheckMethod, CheckRow, CheckStatus, LeaseRow, UpdateRow
from blocktrain.protocol import identity
from blocktrain.protocol.check_messages import Losses, ReplayResult, ScoreResult, Unable
from blocktrain.swarm import reputation
from blocktrain.swarm.bounds import LeaseSchedule
from blocktrain.swarm.judgement import (
    FEWEST,
    Consensus,
    Judgement,
    Measured,
    Scored,
    agree,
    base_is_at_fault,
    consensus,
    judge,
)

HISTORY = 64  # newest scored updates to compare with
MOST_UNABLE = 3  # validators that could not score an update; then it counts without a score
OPINIONS = 3  # at most, on one update
# The share of scores that a second validator repeats, besides those that would refuse an update and
# those of a new validator.
REPEATED, NEW_VALIDATOR = 0.1, 10
RESULT: TypeAdapter[ScoreResult | ReplayResult | Unable] = TypeAdapter(
    Annotated[ScoreResult | ReplayResult | Unable, Field(discriminator="method")]
)


class Verdicts:
    def __init__(self, run: Run, on_refused: Callable[[Transaction, UpdateRow], None]) -> None:
        """`on_refused` is called with an update whose score was bad."""
        self.run, self._on_refused = run, on_refused

    def decide(self, tx: Transaction, lease_id: str) -> None:
        """Decide on an update if its checks are done, or queue another one. Call this in a
        transaction that has locked the blocks."""
        update, lease = tx.updates.get(lease_id), tx.leases.get(lease_id)
        assert lease is not None
        rows = [row for row in tx.checks.of_update(lease_id) if row.method == "score"]
        if update is None or update.state != "pending" or update.checked:
            self._drop_due(tx, rows)
            return
        free = validators_present(tx, self.run.clock()) - {
            row.validator for row in rows if row.validator
        }
        if any(row.state != "done" for row in rows):
            if free or not any(row.state == "done" for row in rows):
                return
            # The validators that could repeat it have left.
            if any(row.state == "assigned" for row in rows):
                return
            self._drop_due(tx, rows)
        scores = [(row.validator or "", score) for row in rows if (score := _measured(row))]
        if not scores:
            if len(rows) < MOST_UNABLE and (free or not rows):
                add_check(self.run, tx, lease_id, "score")
            else:
                self._pass_unscored(tx, update, lease)
            return
        found = consensus(scores, agree)
        score = found.value if found else _of_longest_standing(tx, scores)
        judgement = self._judge(tx, score, update, lease)
        if free and self._wants_repetition(tx, lease_id, scores, found, judgement):
            add_check(self.run, tx, lease_id, "score")
            return
        if found:
            standing.judge_validators(self.run, tx, lease, found.confirmed, found.overruled)
        tx.checks.set_gain(update.lease, score.gain, score.own_gain)
        self._conclude(tx, update, lease, judgement)

    # Checks

    def _drop_due(self, tx: Transaction, rows: Sequence[CheckRow]) -> None:
        for row in rows:
            if row.state != "done":
                tx.checks.drop(row.id)

    def _wants_repetition(
        self,
        tx: Transaction,
        lease: str,
        scores: Sequence[tuple[str, Measured]],
        found: Consensus[Measured] | None,
        judgement: Judgement,
    ) -> bool:
        """Whether another validator should score the update too."""
        if found is None:
            return len(scores) < OPINIONS
        if len(scores) > 1:
            return False
        validator = tx.members.worker(scores[0][0])
        is_new = validator is None or validator.checks <= NEW_VALIDATOR
        draw = secret_number(self.run, "repeat", lease) / SECRET_NUMBERS
        return is_new or bool(judgement.kind) or draw < REPEATED

    # Judging

    def _judge(
        self, tx: Transaction, score: Measured, update: UpdateRow, lease: LeaseRow
    ) -> Judgement:
        rate = self._rate(lease)
        of_block = tx.checks.newest_scored(HISTORY, update.block)
        rows = list(of_block)
        if sum(row.worker != update.worker for row in of_block) < FEWEST:
            everywhere = tx.checks.newest_scored(HISTORY)
            rows += [row for row in everywhere if row.block != update.block]
        history = [self._scored(row) for row in rows]
        judgement = judge(score, lease.steps, rate, update.worker, update.block, history)
        if judgement.kind == "harmful" and self._base_is_at_fault(tx, of_block):
            detail = f"{judgement.fault}; it counts, since most updates of this block look like it"
            add_event(tx, self.run.clock(), "checked", lease, detail)
            return Judgement("", "", 0.0)
        return judgement

    def _base_is_at_fault(self, tx: Transaction, recent: Sequence[ScoredUpdate]) -> bool:
        workers = {name: tx.members.worker(name) for name in {row.worker for row in recent}}
        return base_is_at_fault(
            [
                (row.worker, row.state != "refused")
                for row in recent
                if (worker := workers[row.worker]) and not reputation.is_newcomer(worker)
            ]
        )

    def _scored(self, row: ScoredUpdate) -> Scored:
        return Scored(
            row.worker,
            row.block,
            row.steps,
            self._rate(row),
            row.gain,
            row.own_gain,
            row.state != "refused",
        )

    def _rate(self, lease: LeaseSchedule) -> float:
        """The learning rate in the middle of a lease."""
        middle = lease.schedule_start + lease.schedule_stride * lease.steps // 2
        return self.run.config.learning_rate(lease.block, middle)

    # Concluding

    def _conclude(
        self, tx: Transaction, update: UpdateRow, lease: LeaseRow, judgement: Judgement
    ) -> None:
        assert update.committed is not None, "a pending update was committed"
        seconds = max(0.0, update.committed - lease.created)
        tx.members.count_times(update.worker, train_seconds=seconds)
        if judgement.fault:
            refuse_update(tx, lease, judgement.fault, self.run.clock(), give_back=True)
            standing.update_refused(self.run, tx, lease, judgement.fault)
            self._on_refused(tx, update)
        else:
            tx.checks.pass_update(update.lease)
            evidence = judgement.evidence
            standing.update_passed(self.run, tx, lease, update.committed, evidence)

    def _pass_unscored(self, tx: Transaction, update: UpdateRow, lease: LeaseRow) -> None:
        detail = "no validator could score it; it counts without a score"
        add_event(tx, self.run.clock(), "checked", lease, detail)
        self._conclude(tx, update, lease, Judgement("", "", 0.0))


def add_check(
    run: Run,
    tx: Transaction,
    lease: str,
    method: CheckMethod,
    state: CheckStatus = "waiting",
    segment: int | None = None,
) -> None:
    now = run.clock()
    tx.checks.add(
        CheckRow(
            id=identity.identifier_of(now), lease=lease, method=method, state=state,
            segment=segment, created=now,
        )
    )  # fmt: skip


def _measured(row: CheckRow) -> Measured | None:
    """A score as numbers; None if the check has none."""
    result = RESULT.validate_json(row.result) if row.result else None
    if not isinstance(result, ScoreResult) or result.hidden.before is None:
        return None
    hidden, own = result.hidden, result.own
    return Measured(
        result.hidden.before, _gain(hidden), hidden.error or 0.0, _gain(own), own.error or 0.0
    )


def hidden_loss(result: str) -> float | None:
    """The loss on hidden text of the version that an update was compared with; infinite if it is
    not finite, None if it was not measured."""
    score = RESULT.validate_json(result)
    if not isinstance(score, ScoreResult):
        return None
    return math.inf if score.hidden.before is None else score.hidden.before


def _gain(losses: Losses) -> float:
    if losses.before is None or losses.after is None:
        return float("-inf")
    return losses.before - losses.after


def _of_longest_standing(tx: Transaction, scores: Sequence[tuple[str, Measured]]) -> Measured:
    """The score of the validator that joined first."""

    def joined(name: str) -> float:
        worker = tx.members.worker(name)
        return worker.joined if worker else float("inf")

    return min(scores, key=lambda each: joined(each[0]))[1]
