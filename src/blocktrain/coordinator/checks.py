"""Checks of updates: queued, handed out to validators, and recorded. `verdicts` decides by them.

    state      how a check reaches it
    hidden     a replay that needs files of the update's worker (`replays`)
    waiting    its update has become pending, or another opinion on it is needed; or its validator
               did not answer in time
    assigned   a validator has asked for it; until a deadline no other one gets it
    done       the validator has reported

Everything is in the ledger, so any coordinator of a run answers any validator, and a coordinator
that was killed continues where it stopped.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence

from starlette.concurrency import run_in_threadpool

from blocktrain import faults
from blocktrain.coordinator import control, reports
from blocktrain.coordinator.executor import LedgerExecutor, Notifier
from blocktrain.coordinator.leases import newest_predecessors
from blocktrain.coordinator.members import VALIDATOR_SECONDS, Caller, Members
from blocktrain.coordinator.replays import MOST_FILES_SIZE, Replays
from blocktrain.coordinator.run import Run, secret_number
from blocktrain.coordinator.updates import signed_claim
from blocktrain.coordinator.verdicts import Verdicts
from blocktrain.errors import RefusedError
from blocktrain.ledger.ledger import Transaction
from blocktrain.ledger.schema import CheckRow, LeaseRow, UpdateRow, WorkerRow
from blocktrain.protocol.check_messages import (
    Check,
    CheckAnswer,
    CheckRequest,
    CheckResult,
    LeasedText,
    ReplayCheck,
    ScoreCheck,
    Unable,
)
from blocktrain.protocol.messages import Finished, Recipe, Wait
from blocktrain.storage.blobs import blob_of
from blocktrain.swarm import merging_rules, replay

LONG_POLL_SECONDS = 1.0
WAIT_SECONDS = 1.0  # until the next request of a validator without a check
CHECK_SECONDS = 60.0  # time for a check, and a second more for every megabyte of the block
CHECK_BYTES_PER_SECOND = 1e6
REPLAY_SLOWNESS = 10.0  # a validator may need so much longer than the worker for a whole lease
# A score costs four forward passes over its windows. Their number is chosen so that this is a small
# share of the lease's training (three passes over each window of each step).
SCORE_SHARE, FEWEST_WINDOWS, MOST_WINDOWS = 0.03, 32, 128


class Checks:
    """`on_decided` is called when updates may have become due for merging."""

    def __init__(
        self, run: Run, members: Members, executor: LedgerExecutor, on_decided: Callable[[], None]
    ) -> None:
        self.run, self.members = run, members
        self.replays = Replays(run, executor)
        self.verdicts, self.added = Verdicts(run, self.replays.add), Notifier()
        self._executor, self._on_decided = executor, on_decided
        self._looked_at = -math.inf  # when old checks were last looked through

    def queue(self, tx: Transaction, lease: str) -> None:
        """Queue the first check of an update that has become pending, and perhaps a replay."""
        self.verdicts.decide(tx, lease)
        self.replays.draw(tx, lease)

    # Handing out

    async def request(self, caller: Caller, request: CheckRequest) -> CheckAnswer:
        """Hand out a check by long polling."""
        until = time.monotonic() + LONG_POLL_SECONDS
        while True:
            added = self.added.next()  # before the query, to miss none
            try:
                answer, recipe = await self._executor.run(self.claim, caller, request)
                left = until - time.monotonic()
                if recipe:  # the validator fetches the update by its name
                    await run_in_threadpool(self.run.blobs.add_recipe, recipe)
                    faults.reached("check-assigned")
                if not isinstance(answer.answer, Wait) or left <= 0:
                    return answer
                await asyncio.wait([added], timeout=left)
            finally:
                added.cancel()

    def claim(self, caller: Caller, request: CheckRequest) -> tuple[CheckAnswer, Recipe | None]:
        """Assign a check to a validator, and return the recipe of its update. A validator with an
        assigned check gets it again: it has restarted, or the answer was lost."""
        _refuse_others(caller)
        now = self.run.clock()
        with self.run.ledger.write() as tx:
            tx.blocks.lock()
            control.require_current(tx.blocks.total(), self.run.config, request.run_steps)
            self.members.touch(tx, caller, now)
            run, due = tx.run(), tx.checks.due()
            own = next((row for row in due if row.validator == caller.worker), None)
            while row := own or self._choose(tx, due, caller.worker, request, now):
                update, lease = tx.updates.get(row.lease), tx.leases.get(row.lease)
                assert update is not None and lease is not None, "a check has an update and a lease"
                deadline = row.deadline if row is own else None
                deadline = deadline or now + self._seconds(tx, row, update, lease)
                check = self._message(tx, row, update, lease, deadline - now)
                if check:
                    if row is not own:
                        tx.checks.assign(row.id, caller.worker, check.version, deadline)
                    return CheckAnswer(answer=check), signed_claim(update).recipe
                tx.checks.drop(row.id)  # what it needs was deleted
                own, due = None, [each for each in due if each is not row]
            done = run is not None and run.finished is not None
            wait = Wait(seconds=WAIT_SECONDS, reason="no update waits for a check")
            return CheckAnswer(answer=Finished() if done else wait), None

    def _choose(
        self,
        tx: Transaction,
        due: Sequence[CheckRow],
        validator: str,
        request: CheckRequest,
        now: float,
    ) -> CheckRow | None:
        """The oldest check that this validator can do: a score before a replay, and one of the
        block in its memory first, unless another has waited for long."""
        waiting, own = [], tx.members.worker(validator)
        assert own is not None
        for row in due:
            update = tx.updates.get(row.lease) if row.state == "waiting" else None
            if update is None:
                continue
            allowed = request.blocks is None or update.block in request.blocks
            others = tx.checks.of_update(row.lease)
            earlier = {other.validator for other in others if other.method == row.method}
            if allowed and validator not in earlier and self._is_comparable(tx, row, update, own):
                is_new = now - row.created < CHECK_SECONDS
                is_held = update.block == request.held_block and is_new
                is_later = row.method == "replay" and is_new
                waiting.append((is_later, not is_held, row.created, row.id, row))
        return min(waiting, key=lambda each: each[:4])[-1] if waiting else None

    def _is_comparable(
        self, tx: Transaction, row: CheckRow, update: UpdateRow, validator: WorkerRow
    ) -> bool:
        """Whether this validator's device can do a check of an update."""
        if row.method == "score":
            return True
        worker, draws = tx.members.worker(update.worker), self.run.config.kind.denoises
        assert worker is not None
        draws = draws or self.run.config.model.dropout > 0
        return replay.comparable(worker.device, validator.device, draws_noise=draws)

    def _seconds(self, tx: Transaction, row: CheckRow, update: UpdateRow, lease: LeaseRow) -> float:
        size = tx.versions.get(update.block).weights.size
        if row.method == "score":
            return CHECK_SECONDS + size / CHECK_BYTES_PER_SECOND
        trained = (update.committed or lease.created) - lease.created
        files = MOST_FILES_SIZE * size / CHECK_BYTES_PER_SECOND
        return CHECK_SECONDS + files + REPLAY_SLOWNESS * max(0.0, trained)

    def _message(
        self, tx: Transaction, row: CheckRow, update: UpdateRow, lease: LeaseRow, left: float
    ) -> Check | None:
        """The check for a validator; None if what it needs was deleted."""
        current = tx.versions.get(update.block)
        predecessors = newest_predecessors(tx, self.run.config, update.block)
        task: ScoreCheck | ReplayCheck
        if row.method == "score":
            task = self._score(tx, update)
        elif found := self.replays.task(tx, row):
            task, predecessors = found
        else:
            return None
        return Check(
            check=row.id,
            block=update.block,
            version=current.version,
            text=LeasedText(
                first_batch=lease.first_batch,
                steps=lease.steps,
                schedule_start=lease.schedule_start,
                schedule_stride=lease.schedule_stride,
                predecessors=predecessors,
            ),
            task=task,
            seconds_left=max(0.0, left),
        )

    def _score(self, tx: Transaction, update: UpdateRow) -> ScoreCheck:
        """Compare with the newest version, as a merge would add the update to it."""
        config, claim = self.run.config, signed_claim(update)
        current = tx.versions.get(update.block)
        starts_elsewhere = claim.codec == "none" and update.base_version != current.version
        base = tx.versions.get(update.block, update.base_version) if starts_elsewhere else None
        weight = merging_rules.update_weight(config.swarm, current.version, update.base_version)
        windows = SCORE_SHARE * 3 / 4 * update.steps * config.train.batch
        return ScoreCheck(
            current=current.weights,
            update=blob_of(claim.recipe),
            base=base.weights if base else None,
            share=weight or 1.0,
            seed=secret_number(self.run, "windows", update.block, current.version),
            windows=max(FEWEST_WINDOWS, min(round(windows), MOST_WINDOWS)),
        )

    # Results

    def report(self, caller: Caller, check: str, message: CheckResult) -> None:
        """Record a result, and decide on the update if it was the last one. A result that is sent
        twice has the effect of one."""
        _refuse_others(caller)
        reports.check_downloads(message.downloads, self.run.config.block_count)
        now = self.run.clock()
        with self.run.ledger.write() as tx:
            tx.blocks.lock()
            self.members.touch(tx, caller, now)
            row = tx.checks.get(check)
            if row is None or row.validator not in (caller.worker, None):
                raise RefusedError("not_found", "this validator has no such check; request another")
            if row.state == "done":
                return
            if not isinstance(message.result, Unable) and message.result.method != row.method:
                raise RefusedError("malformed", f"this check is a {row.method}; send its result")
            seconds = min(message.seconds, max(0.0, now - row.created))
            found = message.result.model_dump_json()
            if not tx.checks.finish(check, caller.worker, seconds, found):
                raise RefusedError(
                    "gone", "the result is too late: another validator gets the check"
                )
            reports.count_traffic(tx, caller.worker, {}, message.downloads)
            tx.members.count_times(caller.worker, checks=1, check_seconds=seconds)
            if row.method == "score":
                self.verdicts.decide(tx, row.lease)
            else:
                self.replays.decide(tx, row.lease)

    def reported(self) -> None:
        """A report is on disk: merge what it made due, and hand out what it added."""
        faults.reached("check-reported")
        self._on_decided()
        self.added.notify()

    # Time

    def expire(self) -> None:
        """Hand checks out again whose validator did not answer in time, and queue those of updates
        that have none: before the run required checks, none were queued."""
        now = self.run.clock()
        with self.run.ledger.read() as tx:
            if not self._expired(tx, now):
                return
        with self.run.ledger.write() as tx:
            tx.blocks.lock()
            tx.checks.release_overdue(now)
            self.replays.expire(tx, now)
            for update in tx.checks.unchecked():
                self.verdicts.decide(tx, update.lease)
        self.reported()

    def _expired(self, tx: Transaction, now: float) -> bool:
        if not tx.checks.required():
            return False
        due = tx.checks.due()
        self.replays.noticed(due)
        if any((row.deadline or math.inf) < now for row in due):
            return True
        queued = {row.lease for row in due}
        if any(row.lease not in queued for row in tx.checks.unchecked()):
            return True
        # Validators leave without a word, and nobody else may be able to repeat a check.
        is_old = any(row.created < now - VALIDATOR_SECONDS for row in due)
        if is_old and now - self._looked_at > VALIDATOR_SECONDS:
            self._looked_at = now
            return True
        return False


def _refuse_others(caller: Caller) -> None:
    if caller.role != "validate":
        reason = f"role {caller.role} gets no checks; join with an invite for validators"
        raise RefusedError("forbidden", reason)
