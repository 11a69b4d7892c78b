"""Handing out leases, extending them by heartbeats, and taking them back.

Deadlines, and when a worker was last heard of, are in the ledger. Measured speeds and the last
reported steps are in memory: a coordinator that was restarted gives first leases again, and extends
a deadline from the second report on.
"""

import asyncio
import logging
from dataclasses import replace
from typing import NamedTuple

from blocktrain.coordinator import reports
from blocktrain.coordinator.executor import LedgerExecutor, Notifier
from blocktrain.coordinator.limits import BoundedCache
from blocktrain.coordinator.members import Caller, Members
from blocktrain.coordinator.run import Run
from blocktrain.errors import RefusedError
from blocktrain.ledger.rows import LeaseRow, Version, WorkerRow
from blocktrain.ledger.schema import HELD
from blocktrain.ledger.transaction import Transaction
from blocktrain.protocol import identity
from blocktrain.protocol.messages import (
    Finished,
    Lease,
    LeaseAnswer,
    LeaseProgress,
    LeaseRequest,
    LeaseReturn,
    LeaseState,
    Predecessor,
    Wait,
)
from blocktrain.swarm import assignment, lease_terms
from blocktrain.swarm.assignment import WorkRequest
from blocktrain.swarm.attendance import Speeds
from blocktrain.swarm.dispatcher import Dispatcher, LeasePlan
from blocktrain.swarm.state import BlockState

log = logging.getLogger(__name__)

MAX_CACHED_GRANTS = 4096  # any other is looked up in the ledger
MAX_CACHED_REPORTS = 16_384
LONG_POLL_SECONDS = 1.0  # the longest that an answer "ask again soon" is delayed
CHUNK_RECORD_SECONDS = 5.0  # chunks of a lease are recorded in the ledger at most this often


class LeaseGrant(NamedTuple):
    """What of a lease decides whether an update may be sent, and whether it fits."""

    worker: str
    public_key: str
    fence: int
    steps: int
    base: Version


class _Report(NamedTuple):
    """The last heartbeat with more steps than the one before, or the last chunk of an update."""

    steps_done: int
    at: float
    lease: LeaseRow  # as it was then
    recorded: float  # when the ledger last noted that the worker is there


class Leases:
    def __init__(
        self, run: Run, members: Members, executor: LedgerExecutor, new_versions: Notifier
    ) -> None:
        self.run, self.members = run, members
        self._executor, self._new_versions = executor, new_versions
        self.speeds = Speeds(run.config.swarm)
        self.dispatcher = Dispatcher(run.config.swarm, self.speeds, run.config.lead)
        self._grants: BoundedCache[LeaseGrant] = BoundedCache(MAX_CACHED_GRANTS)  # by lease
        self._reports: BoundedCache[_Report] = BoundedCache(MAX_CACHED_REPORTS)  # by lease
        self._last_expiry = self._listening_since = run.clock()

    # Handing out

    async def request(self, caller: Caller, request: LeaseRequest) -> LeaseAnswer:
        """A lease, or a long poll for one: the answer "ask again soon" waits for a new version, so
        that workers start from it as soon as it is made."""
        now = asyncio.get_running_loop().time
        until = now() + (0.0 if request.at_once else LONG_POLL_SECONDS)
        while True:
            new_version = self._new_versions.next()  # before the ledger is asked
            try:
                answer = await self._executor.run(self.claim, caller, request)
                wait, left = answer.answer, until - now()
                if not isinstance(wait, Wait) or wait.seconds > LONG_POLL_SECONDS or left <= 0:
                    return answer
                await asyncio.wait([new_version], timeout=min(wait.seconds, left))
            finally:
                new_version.cancel()

    def claim(self, caller: Caller, request: LeaseRequest) -> LeaseAnswer:
        """A lease for a worker. If it has an open one it gets that again: either the answer was
        lost, or the worker was restarted."""
        if caller.role != "train":
            raise RefusedError("forbidden", f"leases are for training, this role is {caller.role}")
        now = self.run.clock()
        work = self.dispatcher.trusted(_work_request(caller, request))
        with self.run.ledger.write() as tx:
            tx.blocks.lock()
            if work.trained_lease:
                tx.leases.mark_trained(work.trained_lease, caller.worker)
            elif _was_restarted(request):
                tx.leases.reopen_unsent(caller.worker)
            worker = self.members.seen(tx, caller, now)
            lease, blocks = tx.leases.open_of(caller.worker), tx.blocks.states()
            is_final = _trained_last_lease(blocks, work)
            answer = (
                self._message(tx, lease, worker, now)
                if lease
                else self._choose(tx, worker, blocks, work, now)
            )
            return LeaseAnswer(answer=answer, final_update=is_final)

    def _choose(
        self,
        tx: Transaction,
        worker: WorkerRow,
        blocks: list[BlockState],
        work: WorkRequest,
        now: float,
    ) -> Lease | Wait | Finished:
        if all(block.finished for block in blocks):
            return Finished()
        plan = self.dispatcher.plan(work, blocks, now)
        if plan is None:
            return _wait(blocks, work)
        return self._message(tx, self._hand_out(tx, work, plan, now), worker, now)

    def _hand_out(
        self, tx: Transaction, work: WorkRequest, plan: LeasePlan[BlockState], now: float
    ) -> LeaseRow:
        block = plan.block
        first_batch, steps, fence = tx.blocks.take_range(block.index, plan.steps)
        terms = self.dispatcher.terms(work, block, steps, now)
        lease = LeaseRow(
            id=identity.identifier_of(now),
            worker=work.worker,
            block=block.index,
            base_version=block.version,
            first_batch=first_batch,
            steps=steps,
            schedule_start=plan.schedule_start,
            schedule_stride=plan.schedule_stride,
            continues=plan.continues,
            fence=fence,
            deadline=terms.deadline,
            expected=terms.expected,
            created=now,
        )
        tx.leases.add(lease)
        self._reports.put(lease.id, _Report(0, now, lease, recorded=now))
        detail = f"{steps} steps from batch {first_batch}"
        tx.events.add(now, "leased", work.worker, block.index, detail)
        return lease

    def _message(self, tx: Transaction, lease: LeaseRow, worker: WorkerRow, now: float) -> Lease:
        base = tx.versions.get(lease.block, lease.base_version)
        grant = LeaseGrant(worker.id, worker.public_key, lease.fence, lease.steps, base)
        self._grants.put(lease.id, grant)
        return Lease(
            lease=lease.id,
            fence=lease.fence,
            block=lease.block,
            base_version=lease.base_version,
            base=base.weights,
            first_batch=lease.first_batch,
            steps=lease.steps,
            schedule_start=lease.schedule_start,
            schedule_stride=lease.schedule_stride,
            seconds_left=max(0.0, lease.deadline - now),
            continues=lease.continues,
            predecessors=self._predecessors(tx, lease.block),
        )

    def _predecessors(self, tx: Transaction, block: int) -> tuple[Predecessor, ...]:
        """The current versions of the blocks whose features this one reads."""
        if not self.run.config.kind.reads_predecessors:
            return ()
        current = [tx.versions.get(before) for before in range(block)]
        return tuple(
            Predecessor(block=version.block, version=version.version, weights=version.weights)
            for version in current
        )

    def cached_grant(self, caller: Caller, lease_id: str) -> LeaseGrant | None:
        """Of a lease that this coordinator handed out, without asking the ledger."""
        grant = self._grants.get(lease_id)
        return grant if grant and grant.worker == caller.worker else None

    def forget_grant(self, lease_id: str) -> None:
        self._grants.pop(lease_id)

    # Extending

    def progress(self, caller: Caller, lease_id: str, progress: LeaseProgress) -> LeaseState:
        """A heartbeat; whether the worker still holds the lease."""
        now, swarm = self.run.clock(), self.run.config.swarm
        with self.run.ledger.write() as tx:
            self.members.seen(tx, caller, now)
            lease = own_lease(tx, caller, lease_id, progress.fence)
            expected = lease_terms.arrival_after_progress(swarm, lease, progress.steps_done, now)
            if expected is not None and expected != lease.expected:
                tx.leases.set_expected(lease_id, expected)
            deadline = self._deadline_after_heartbeat(lease, progress.steps_done, now)
            _extend(tx, lease, deadline)
        if lease.state in HELD:
            return LeaseState(open=True, seconds_left=deadline - now)
        return LeaseState(open=False, seconds_left=0.0, reason=self._end_reason(lease))

    def _deadline_after_heartbeat(self, lease: LeaseRow, steps_done: int, now: float) -> float:
        swarm, report = self.run.config.swarm, self._reports.get(lease.id)
        if report is None or steps_done > report.steps_done:
            self._reports.put(lease.id, _Report(steps_done, now, lease, recorded=now))
            if report:
                return lease_terms.deadline_after_steps(swarm, lease, steps_done, report.at, now)
        # A coordinator does not see chunks that go to a bucket; the heartbeat stands for them.
        if lease.state == "sending" and self.run.chunks.has_presigned_urls:
            return lease_terms.deadline_after_chunk(swarm, lease, now, now)
        return lease.deadline

    async def chunk_received(self, caller: Caller, lease_id: str) -> None:
        """A chunk of a lease's update counts as a heartbeat."""
        if self._is_worth_recording(lease_id):
            await self._executor.run(self.record_chunk, caller, lease_id)

    def _is_worth_recording(self, lease_id: str) -> bool:
        """Whether a chunk moves the deadline, or the last record is some seconds old."""
        report, now = self._reports.get(lease_id), self.run.clock()
        if report is None or now - report.recorded >= CHUNK_RECORD_SECONDS:
            return True
        swarm, deadline = self.run.config.swarm, report.lease.deadline
        if lease_terms.deadline_after_chunk(swarm, report.lease, report.at, now) > deadline:
            return True
        self._reports.put(lease_id, report._replace(at=now))
        return False

    def record_chunk(self, caller: Caller, lease_id: str) -> None:
        now, swarm = self.run.clock(), self.run.config.swarm
        with self.run.ledger.write() as tx:
            self.members.seen(tx, caller, now)
            lease = tx.leases.get(lease_id)
            if lease is None or lease.worker != caller.worker:
                return
            report = self._reports.get(lease_id) or _Report(0, now, lease, recorded=now)
            lease = _extend(
                tx, lease, lease_terms.deadline_after_chunk(swarm, lease, report.at, now)
            )
            self._reports.put(lease_id, _Report(report.steps_done, now, lease, recorded=now))

    # Ending

    def give_back(self, caller: Caller, lease_id: str, message: LeaseReturn) -> LeaseState:
        reports.check_downloads(message.downloads, self.run.config.block_count)
        now = self.run.clock()
        with self.run.ledger.write() as tx:
            tx.blocks.lock()
            self.members.seen(tx, caller, now)
            lease = own_lease(tx, caller, lease_id, message.fence)
            in_time = tx.leases.move(lease_id, "returned")
            if in_time or _returns_expired(tx, lease_id):
                reports.count_traffic(tx, caller.worker, {}, message.downloads)
            if in_time:
                tx.blocks.give_back_range(lease.block, lease.first_batch, lease.steps)
                tx.events.add(now, "returned", caller.worker, lease.block, message.reason)
        return LeaseState(open=False, seconds_left=0.0, reason="the lease was returned")

    def expire(self) -> None:
        """Take back leases that are overdue or whose worker is silent; their text is handed out
        again."""
        now = self.run.clock()
        self._notice_pause(now)
        with self.run.ledger.read() as tx:
            if not self._expired(tx, now):
                return
        with self.run.ledger.write() as tx:
            tx.blocks.lock()
            for lease in self._expired(tx, now):
                if not tx.leases.move(lease.id, "expired"):
                    continue
                tx.leases.set_deadline(lease.id, min(lease.deadline, now))
                tx.blocks.give_back_range(lease.block, lease.first_batch, lease.steps)
                tx.blocks.count_lease(lease.block, met=False)
                tx.events.add(now, "lost", lease.worker, lease.block, f"{lease.steps} steps")
                fields = {"lease": lease.id, "worker": lease.worker, "block": lease.block}
                log.info("lease lost: %d steps are handed out again", lease.steps, extra=fields)

    def _expired(self, tx: Transaction, now: float) -> list[LeaseRow]:
        swarm, expired = self.run.config.swarm, tx.leases.overdue(now)
        if lease_terms.silence_deadline(swarm, self._listening_since) < now:
            expired += tx.leases.silent(now - swarm.heartbeat_timeout)
        return list({lease.id: lease for lease in expired}.values())

    def _notice_pause(self, now: float) -> None:
        """A coordinator that was suspended, or had no ledger, could not hear its workers: it waits
        for all of them once more."""
        if now - self._last_expiry > 0.5 * self.run.config.swarm.heartbeat_timeout:
            self._listening_since = now
        self._last_expiry = now

    def _end_reason(self, lease: LeaseRow) -> str:
        if lease.state != "expired":
            return f"this lease is {lease.state}; request a new one"
        timeout = self.run.config.swarm.heartbeat_timeout
        return (
            "this lease is expired: its deadline passed, or the worker sent nothing for"
            f" {timeout:g} s; request a new one"
        )


def own_lease(tx: Transaction, caller: Caller, lease_id: str, fence: int) -> LeaseRow:
    """The caller's lease, if this is its fencing token."""
    lease = tx.leases.get(lease_id)
    if lease is None or lease.worker != caller.worker:
        raise RefusedError("not_found", "this worker holds no such lease; request a new one")
    if lease.fence != fence:
        raise RefusedError("conflict", "the fencing token is not this lease's")
    return lease


def _extend(tx: Transaction, lease: LeaseRow, deadline: float) -> LeaseRow:
    """Move a held lease's deadline, never to an earlier time."""
    if lease.state not in HELD or deadline <= lease.deadline:
        return lease
    tx.leases.set_deadline(lease.id, deadline)
    return replace(lease, deadline=deadline)


def _returns_expired(tx: Transaction, lease_id: str) -> bool:
    """Mark an expired lease returned; False if its downloads were counted before, with an earlier
    return or with its update."""
    update = tx.updates.get(lease_id)
    return tx.leases.return_expired(lease_id) and (update is None or update.state == "offered")


def _was_restarted(request: LeaseRequest) -> bool:
    """Whether the worker has trained nothing since it was started."""
    return request.held_block is None and request.steps_per_second is None


def _work_request(caller: Caller, request: LeaseRequest) -> WorkRequest:
    return WorkRequest(
        worker=caller.worker,
        loaded_block=request.held_block,
        allowed_blocks=request.blocks,
        trained_lease=request.trained,
        steps_per_second=request.steps_per_second,
        transfer_seconds=request.transfer_seconds,
    )


def _trained_last_lease(blocks: list[BlockState], work: WorkRequest) -> bool:
    """Whether all text of the block that the worker has trained is handed out, which makes its
    update there a final one. To be called before the worker gets its next lease."""
    return any(
        work.trained_lease in block.unmerged(work.worker) and not block.to_hand_out
        for block in blocks
    )


def _wait(blocks: list[BlockState], work: WorkRequest) -> Wait:
    seconds, allowed = assignment.wait_seconds(blocks, work.worker), work.allowed_blocks
    left = [block for block in blocks if block.to_hand_out]
    if seconds == assignment.MERGE_WAIT:
        reason = "your last update is about to become a version"
    elif any(allowed is None or block.index in allowed for block in left):
        reason = "the blocks left for this worker build on blocks that are not far enough yet"
    else:
        reason = "all work that this worker can do is handed out"
    return Wait(seconds=seconds, reason=reason)
