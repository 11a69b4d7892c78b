"""Grants leases, extends them on heartbeats, and takes them back.

The ledger stores deadlines and when each worker was last seen. Measured speeds and the last
reported steps are in memory only: after a restart, a coordinator grants small first leases again,
and extends a deadline from the second heartbeat on.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import NamedTuple

from blocktrain.config import Config
from blocktrain.coordinator import control, reports
from blocktrain.coordinator.executor import BoundedCache, LedgerExecutor, Notifier
from blocktrain.coordinator.members import LONGEST_PAUSE, Caller, Members
from blocktrain.coordinator.run import Run
from blocktrain.errors import RefusedError
from blocktrain.ledger.ledger import Transaction
from blocktrain.ledger.schema import ACTIVE, LeaseRow, Version, WorkerRow
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
    Reveal,
    Wait,
)
from blocktrain.swarm import assignment, lease_terms
from blocktrain.swarm.assignment import WorkRequest
from blocktrain.swarm.dispatcher import Dispatcher, Speeds
from blocktrain.swarm.order import Order
from blocktrain.swarm.reputation import MOST_OWING
from blocktrain.swarm.state import BlockState

MAX_CACHED_GRANTS = 4096  # by lease; the ledger has the others
MAX_CACHED_REPORTS = 16_384
LONG_POLL_SECONDS = 1.0  # longest delay of an answer "ask again soon"
OWING_SECONDS = 5.0  # until the next request of a worker that has to send files first
CHUNK_RECORD_SECONDS = 5.0  # least time between two ledger writes for the chunks of a lease


class LeaseGrant(NamedTuple):
    """What an update is checked against: the worker, its lease and the base version."""

    worker: WorkerRow
    lease: LeaseRow
    base: Version


class _Report(NamedTuple):
    """A lease's last progress: a heartbeat that reported new steps, or a chunk of its update."""

    steps_done: int
    at: float
    lease: LeaseRow  # as of the report
    recorded: float  # when the ledger last recorded the worker as seen


class Leases:
    def __init__(
        self,
        run: Run,
        members: Members,
        executor: LedgerExecutor,
        new_versions: Notifier,
        reveal_of: Callable[[Transaction, str, float], Reveal | None],
    ) -> None:
        """`reveal_of`: the files that a worker has to send now."""
        self.run, self.members, self._reveal_of = run, members, reveal_of
        self._executor, self._new_versions = executor, new_versions
        self.speeds = Speeds(run.config.swarm)
        self.dispatcher = Dispatcher(run.config.swarm, self.speeds, Order.of(run.config))
        self.grants: BoundedCache[LeaseGrant] = BoundedCache(MAX_CACHED_GRANTS)  # by lease
        self._reports: BoundedCache[_Report] = BoundedCache(MAX_CACHED_REPORTS)  # by lease
        self._last_expiry = self._listening_since = run.clock()

    # Handing out

    async def request(self, caller: Caller, request: LeaseRequest) -> LeaseAnswer:
        """Grant a lease, or tell the worker to wait. A short wait is spent here (long polling) and
        ends when there is a new version, so that workers start from it as soon as it exists."""
        until = time.monotonic() + (0.0 if request.at_once else LONG_POLL_SECONDS)
        while True:
            new_version = self._new_versions.next()  # before the query, to miss no version
            try:
                answer = await self._executor.run(self.claim, caller, request)
                wait, left = answer.answer, until - time.monotonic()
                if not isinstance(wait, Wait) or wait.seconds > LONG_POLL_SECONDS or left <= 0:
                    return answer
                await asyncio.wait([new_version], timeout=min(wait.seconds, left))
            finally:
                new_version.cancel()

    def claim(self, caller: Caller, request: LeaseRequest) -> LeaseAnswer:
        """Grant a lease. A worker with an open lease gets it again: it has restarted, or the answer
        was lost."""
        if caller.role != "train":
            reason = f"role {caller.role} gets no leases; join with an invite for training"
            raise RefusedError("forbidden", reason)
        now = self.run.clock()
        speed, transfer = request.steps_per_second, request.transfer_seconds
        claims = WorkRequest(
            caller.worker, request.held_block, request.blocks, request.trained, speed, transfer
        )
        with self.run.ledger.write() as tx:
            tx.blocks.lock()
            worker = self.members.touch(tx, caller, now)
            if worker.speed:  # measured by updates that passed their checks
                self.speeds.measured_as(caller.worker, worker.speed)
            work = self.dispatcher.trusted(claims)
            if work.trained_lease:
                tx.leases.mark_trained(work.trained_lease, caller.worker)
            elif request.held_block is None and request.steps_per_second is None:
                tx.leases.reopen_unsent(caller.worker)  # the worker has just started
            lease, blocks = tx.leases.open_of(caller.worker), tx.blocks.states()
            control.require_current(blocks[0].total_batches, self.run.config, request.run_steps)
            is_final = _trained_last_lease(blocks, work)
            reveal = self._reveal_of(tx, caller.worker, now)
            reason_to_wait = _pause(worker, now) or _owes_files(tx, caller.worker, reveal)
            choice = lease or reason_to_wait or self._choose(tx, blocks, work, now)
            answer = (
                self._message(tx, choice, worker, now) if isinstance(choice, LeaseRow) else choice
            )
            return LeaseAnswer(answer=answer, final_update=is_final, reveal=reveal)

    def _choose(
        self, tx: Transaction, blocks: list[BlockState], work: WorkRequest, now: float
    ) -> LeaseRow | Wait | Finished:
        if all(block.finished for block in blocks):
            return Finished()
        if reason := control.reason_to_wait(tx):
            return Wait(seconds=control.WAIT_SECONDS, reason=reason)
        sending = sum(sender == work.worker for b in blocks for sender, *_ in b.sending)
        work = work._replace(sending=sending)
        plan = self.dispatcher.plan(work, blocks, now)
        if plan is None and self._take_over(tx, blocks, work, now):
            plan = self.dispatcher.plan(work, blocks := tx.blocks.states(), now)
        if plan is None:
            return _wait(blocks, work)
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
        add_event(tx, now, "leased", lease, f"{steps} steps from batch {first_batch}")
        return lease

    def _take_over(
        self, tx: Transaction, blocks: list[BlockState], work: WorkRequest, now: float
    ) -> bool:
        """End a slow lease whose batches this idle worker trains sooner. Returns whether there was
        one. The update of its own worker still counts if the batches are not leased again."""

        def open_leases(indices: Collection[int]) -> Iterator[tuple[LeaseRow, bool]]:
            for row in tx.leases.active():
                if row.state == "open" and row.block in indices:
                    worker = tx.members.worker(row.worker)
                    yield row, worker is None or worker.updates_merged == 0

        lease = self.dispatcher.take_over(work, blocks, open_leases, now)
        if lease is None:
            return False
        tx.leases.move(lease.id, "expired")
        give_back_batches(tx, lease)
        add_event(tx, now, "lost", lease, f"{lease.steps} steps, which a faster worker takes over")
        return True

    def _message(self, tx: Transaction, lease: LeaseRow, worker: WorkerRow, now: float) -> Lease:
        base = tx.versions.get(lease.block, lease.base_version)
        self.grants.put(lease.id, LeaseGrant(worker, lease, base))
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
            predecessors=newest_predecessors(tx, self.run.config, lease.block),
        )

    def cached_grant(self, caller: Caller, lease_id: str, fence: int) -> LeaseGrant | None:
        """The grant of a lease that this coordinator handed out, without a ledger query; None if it
        is no longer cached."""
        grant = self.grants.get(lease_id)
        is_own = grant and (grant.worker.id, grant.lease.fence) == (caller.worker, fence)
        return grant if is_own else None

    # Extending

    def progress(self, caller: Caller, lease_id: str, progress: LeaseProgress) -> LeaseState:
        """Process a heartbeat. Returns whether the worker still holds the lease."""
        now, swarm = self.run.clock(), self.run.config.swarm
        with self.run.ledger.write() as tx:
            self.members.touch(tx, caller, now)
            lease = own_lease(tx, caller, lease_id, progress.fence)
            expected = lease_terms.arrival_after_progress(swarm, lease, progress.steps_done, now)
            if expected is not None and expected != lease.expected:
                tx.leases.set_expected(lease_id, expected)
            deadline = self._deadline_after_heartbeat(lease, progress.steps_done, now)
            _extend(tx, lease, deadline)
            if progress.ends:
                self._shorten(tx, lease, progress.steps_done, now)
            if lease.state in ACTIVE:
                return LeaseState(open=True, seconds_left=deadline - now)
            reason = control.reason_to_wait(tx) or self._end_reason(lease)
            return LeaseState(open=False, seconds_left=0.0, reason=reason)

    def _shorten(self, tx: Transaction, lease: LeaseRow, steps: int, now: float) -> None:
        """End a lease after these steps, and let the other batches be leased again."""
        tx.blocks.lock()
        left = lease.steps - steps
        if steps < 1 or left < 1 or not tx.leases.shorten(lease.id, steps):
            return
        tx.blocks.give_back_range(lease.block, lease.first_batch + steps, left)
        self.grants.pop(lease.id)  # it still has all steps
        add_event(tx, now, "returned", lease, f"the last {left} steps, since its time ran out")

    def _deadline_after_heartbeat(self, lease: LeaseRow, steps_done: int, now: float) -> float:
        swarm, report = self.run.config.swarm, self._reports.get(lease.id)
        if report is None or steps_done > report.steps_done:
            self._reports.put(lease.id, _Report(steps_done, now, lease, recorded=now))
            if report:
                return lease_terms.deadline_after_steps(swarm, lease, steps_done, report.at, now)
        # A coordinator does not see chunks that go to a bucket, so a heartbeat counts as one.
        if lease.state == "sending" and self.run.chunks.has_presigned_urls:
            return lease_terms.deadline_after_chunk(swarm, lease, now, now)
        return lease.deadline

    async def chunk_received(self, caller: Caller, lease_id: str) -> None:
        """Count a chunk of an update as a heartbeat. The ledger records the chunk if it moves the
        deadline, or if the last record is some seconds old."""
        report, now = self._reports.get(lease_id), self.run.clock()
        if report and now - report.recorded < CHUNK_RECORD_SECONDS:
            swarm, lease = self.run.config.swarm, report.lease
            if lease_terms.deadline_after_chunk(swarm, lease, report.at, now) <= lease.deadline:
                self._reports.put(lease_id, report._replace(at=now))
                return
        await self._executor.run(self.record_chunk, caller, lease_id)

    def record_chunk(self, caller: Caller, lease_id: str) -> None:
        now, swarm = self.run.clock(), self.run.config.swarm
        with self.run.ledger.write() as tx:
            self.members.touch(tx, caller, now)
            lease = tx.leases.get(lease_id)
            if lease is None or lease.worker != caller.worker:
                return
            report = self._reports.get(lease_id) or _Report(0, now, lease, recorded=now)
            deadline = lease_terms.deadline_after_chunk(swarm, lease, report.at, now)
            lease = _extend(tx, lease, deadline)
            self._reports.put(lease_id, _Report(report.steps_done, now, lease, recorded=now))

    # Ending

    def give_back(self, caller: Caller, lease_id: str, message: LeaseReturn) -> LeaseState:
        reports.check_downloads(message.downloads, self.run.config.block_count)
        now = self.run.clock()
        with self.run.ledger.write() as tx:
            tx.blocks.lock()
            self.members.touch(tx, caller, now)
            lease = own_lease(tx, caller, lease_id, message.fence)
            in_time = tx.leases.move(lease_id, "returned")
            if in_time or _returns_expired(tx, lease_id):
                reports.count_traffic(tx, caller.worker, {}, message.downloads)
            if in_time:
                give_back_batches(tx, lease)
                add_event(tx, now, "returned", lease, message.reason)
        return LeaseState(open=False, seconds_left=0.0, reason="the lease was returned")

    def expire(self) -> None:
        """Expire leases that are overdue or whose worker is silent, and let their batches be handed
        out again."""
        now = self.run.clock()
        self._notice_pause(now)
        with self.run.ledger.read() as tx:
            if not self._expired(tx, now):
                return
        with self.run.ledger.write() as tx:
            tx.blocks.lock()
            for lease in self._expired(tx, now):
                tx.leases.move(lease.id, "expired")
                tx.leases.set_deadline(lease.id, min(lease.deadline, now))
                give_back_batches(tx, lease)
                tx.blocks.count_lease(lease.block, met=False)
                add_event(tx, now, "lost", lease, f"{lease.steps} steps; {_cause(lease, now)}")

    def _expired(self, tx: Transaction, now: float) -> list[LeaseRow]:
        swarm, expired = self.run.config.swarm, tx.leases.overdue(now)
        if lease_terms.silence_deadline(swarm, self._listening_since) < now:
            expired += tx.leases.silent(now - swarm.heartbeat_timeout)
        return list({lease.id: lease for lease in expired}.values())

    def _notice_pause(self, now: float) -> None:
        """Restart the silence timeout of all workers if this coordinator was suspended or had no
        ledger: it has missed heartbeats."""
        if now - self._last_expiry > 0.5 * self.run.config.swarm.heartbeat_timeout:
            self._listening_since = now
        self._last_expiry = now

    def _end_reason(self, lease: LeaseRow) -> str:
        cause, timeout = "", self.run.config.swarm.heartbeat_timeout
        if lease.state == "expired":
            cause = (
                f": its deadline passed, the worker sent nothing for {timeout:g} s, or a faster"
                " worker took over its batches"
            )
        return f"this lease is {lease.state}{cause}; request a new one"


def _cause(lease: LeaseRow, now: float) -> str:
    """Why a lease expired."""
    if lease.deadline < now:
        return "it missed its deadline"
    return "its worker was silent"


def own_lease(tx: Transaction, caller: Caller, lease_id: str, fence: int) -> LeaseRow:
    """The caller's lease; refused unless the fencing token matches."""
    lease = tx.leases.get(lease_id)
    if lease is None or lease.worker != caller.worker:
        raise RefusedError("not_found", "this worker holds no such lease; request a new one")
    if lease.fence != fence:
        reason = "the fencing token does not match the lease; request a new lease"
        raise RefusedError("conflict", reason)
    return lease


def newest_predecessors(tx: Transaction, config: Config, block: int) -> tuple[Predecessor, ...]:
    """The newest versions of the frozen blocks that this block trains with."""
    newest = map(tx.versions.get, config.frozen_blocks(block))
    return tuple(
        Predecessor(block=version.block, version=version.version, weights=version.weights)
        for version in newest
    )


def give_back_batches(tx: Transaction, lease: LeaseRow) -> None:
    """Let the lease's batches be handed out again."""
    tx.blocks.give_back_range(lease.block, lease.first_batch, lease.steps)


def add_event(tx: Transaction, now: float, kind: str, lease: LeaseRow, detail: str) -> None:
    tx.events.add(now, kind, lease.worker, lease.block, f"{detail[:400]} (lease {lease.id})")


def _pause(worker: WorkerRow, now: float) -> Wait | None:
    """The pause of a worker after an update of it, or of its invite's workers, was refused."""
    left = (worker.excluded_until or now) - now
    if left <= 0:
        return None
    reason = f"updates of this worker or of its invite failed checks; it pauses for {left:.0f} s"
    return Wait(seconds=min(left, LONGEST_PAUSE), reason=reason)


def _owes_files(tx: Transaction, worker: str, reveal: Reveal | None) -> Wait | None:
    """A wait for the files of an old lease. Without it a worker that never sends any would go on
    for as long as a slow one needs to send them."""
    if reveal is None or tx.leases.count_since(worker, reveal.lease) < MOST_OWING:
        return None
    reason = f"first send the files of lease {reveal.lease}, of which a part is trained again"
    return Wait(seconds=OWING_SECONDS, reason=reason)


def _extend(tx: Transaction, lease: LeaseRow, deadline: float) -> LeaseRow:
    """Move an open lease's deadline, but never to an earlier time."""
    if lease.state not in ACTIVE or deadline <= lease.deadline:
        return lease
    tx.leases.set_deadline(lease.id, deadline)
    return replace(lease, deadline=deadline)


def _returns_expired(tx: Transaction, lease_id: str) -> bool:
    """Mark the lease as returned if it has expired. Returns whether to count the downloads that the
    return reports: not if an earlier return or the update has reported them."""
    update = tx.updates.get(lease_id)
    return tx.leases.return_expired(lease_id) and (update is None or update.state == "offered")


def _trained_last_lease(blocks: list[BlockState], work: WorkRequest) -> bool:
    """Whether the worker's update is its final one: its block has no batches left to hand out. Call
    this before granting the next lease."""
    return any(
        work.trained_lease in block.unmerged(work.worker) and not block.to_hand_out
        for block in blocks
    )


def _wait(blocks: list[BlockState], work: WorkRequest) -> Wait:
    """How long a worker waits before its next request, and why."""
    seconds, allowed = assignment.wait_seconds(blocks, work.worker), work.allowed_blocks
    left = [block for block in blocks if block.to_hand_out]
    if work.sending > assignment.MOST_SENDING:
        reason = "your last updates are still being sent; send them before you train more"
    elif seconds == assignment.MERGE_WAIT:
        reason = "your last update is waiting to be merged"
    elif any(allowed is None or block.index in allowed for block in left):
        reason = "the remaining blocks wait until earlier blocks are trained further"
    else:
        reason = "all batches that this worker can train are leased"
    return Wait(seconds=seconds, reason=reason)
