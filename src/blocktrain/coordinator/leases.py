"""Handing out leases, extending them by heartbeats, and taking them back.

Deadlines, and when a worker was last heard of, are in the ledger. Measured speeds and the last
reported steps are in memory: a coordinator that was restarted gives first leases again, and extends
a deadline from the second report on.
"""

import asyncio
import logging
from dataclasses import replace
from typing import NamedTuple

from blocktrain.config import SwarmConfig
from blocktrain.coordinator import reports
from blocktrain.coordinator.executor import LedgerExecutor, Notifier
from blocktrain.coordinator.limits import BoundedCache
from blocktrain.coordinator.members import Caller, Members
from blocktrain.coordinator.run import Run
from blocktrain.errors import RefusedError
from blocktrain.ledger.rows import LeaseRow, Version, WorkerRow
from blocktrain.ledger.schema import HELD
from blocktrain.ledger.transaction import Transaction
from blocktrain.protocol import tokens
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
from blocktrain.swarm import plan
from blocktrain.swarm.attendance import Attendance
from blocktrain.swarm.state import BlockState

log = logging.getLogger(__name__)

MAX_CACHED_GRANTS = 4096  # any other is looked up in the ledger
MAX_CACHED_REPORTS = 16_384
LONG_POLL_SECONDS = 1.0  # the longest that an answer "ask again soon" is delayed
CHUNK_RECORD_SECONDS = 5.0  # chunks of a lease are recorded in the ledger at most this often
SHORTEST_LEASE = 1e-3  # seconds, of a clock that has not moved


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


class Speeds:
    """How fast workers are by the coordinator's clock, which bounds what they claim."""

    def __init__(self, swarm: SwarmConfig) -> None:
        self._swarm = swarm
        self._measured: dict[str, float] = {}  # by worker, the fastest lease in steps per second

    def completed(self, worker: str, steps: int, seconds: float) -> None:
        """An update of this many steps was accepted, this long after its lease was handed out."""
        speed = steps / max(SHORTEST_LEASE, seconds)
        self._measured[worker] = max(speed, self._measured.get(worker, 0.0))

    def trusted(self, worker: str, claimed: float | None) -> float | None:
        return plan.trusted_speed(self._swarm, claimed, self._measured.get(worker))


class Leases:
    def __init__(
        self, run: Run, members: Members, executor: LedgerExecutor, new_versions: Notifier
    ) -> None:
        self.run, self.members = run, members
        self._executor, self._new_versions = executor, new_versions
        self.speeds = Speeds(run.config.swarm)
        self._attendance = Attendance(run.config.swarm)
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
        request = self._bounded(caller, request)
        with self.run.ledger.write() as tx:
            tx.blocks.lock()
            if request.trained:
                tx.leases.mark_trained(request.trained, caller.worker)
            elif _was_restarted(request):
                tx.leases.reopen_unsent(caller.worker)
            worker = self.members.seen(tx, caller, now)
            lease, blocks = tx.leases.open_of(caller.worker), tx.blocks.states()
            is_final = _trained_last_lease(blocks, caller, request)
            answer = (
                self._message(tx, lease, worker, now)
                if lease
                else self._choose(tx, worker, blocks, request, now)
            )
            return LeaseAnswer(answer=answer, last_words=is_final)

    def _bounded(self, caller: Caller, request: LeaseRequest) -> LeaseRequest:
        """The request with its claims cut to what may be believed."""
        swarm = self.run.config.swarm
        bounded = {
            "steps_per_second": self.speeds.trusted(caller.worker, request.steps_per_second),
            "transfer_seconds": plan.trusted_transfer(swarm, request.transfer_seconds),
            # Updates that are whole weights start from a version, never from another update.
            "trained": None if swarm.codec == "none" else request.trained,
        }
        return request.model_copy(update=bounded)

    def _choose(
        self,
        tx: Transaction,
        worker: WorkerRow,
        blocks: list[BlockState],
        request: LeaseRequest,
        now: float,
    ) -> Lease | Wait | Finished:
        if all(block.finished for block in blocks):
            return Finished()
        swarm, transfer = self.run.config.swarm, request.transfer_seconds
        block = plan.choose_block(
            blocks,
            worker.id,
            request.held_block,
            request.blocks,
            patient=plan.is_patient(swarm, transfer),
            trained=request.trained,
            soon=plan.soon(swarm, now, transfer),
            lead=self.run.config.lead,
            others=self._attendance.others(worker.id, now),
        )
        # Workers restricted to some blocks do not count when the remaining work is shared out.
        speed = request.steps_per_second if request.blocks is None else None
        self._attendance.note(worker.id, block.index if block else None, speed, now)
        if block is None:
            return _wait(blocks, worker.id, request)
        left = plan.seconds_left(swarm, blocks, now, speed, self._attendance.speeds(worker.id))
        lease = self._hand_out(tx, worker.id, block, request, now, left)
        return self._message(tx, lease, worker, now)

    def _hand_out(
        self,
        tx: Transaction,
        worker: str,
        block: BlockState,
        request: LeaseRequest,
        now: float,
        left: float,
    ) -> LeaseRow:
        """`left`: seconds until the run ends, if its last text is being shared out."""
        swarm, continues = self.run.config.swarm, request.trained
        speed, transfer = request.steps_per_second, request.transfer_seconds
        patient, soon = plan.is_patient(swarm, transfer), plan.soon(swarm, now, transfer)
        if not plan.may_continue(block, worker, continues, patient=patient, soon=soon):
            continues = None
        start, stride = plan.place_in_schedule(block, worker, continuing=continues is not None)
        seconds = plan.training_seconds(swarm, block, now, transfer, left)
        fitting = plan.lease_steps(swarm, seconds, speed, block.to_hand_out)
        first_batch, steps, fence = tx.blocks.take_range(block.index, fitting)
        lease = LeaseRow(
            id=tokens.identifier_of(now),
            worker=worker,
            block=block.index,
            base_version=block.version,
            first_batch=first_batch,
            steps=steps,
            schedule_start=start,
            schedule_stride=stride,
            continues=continues,
            fence=fence,
            deadline=now + plan.lease_seconds(swarm, steps, speed, transfer),
            expected=plan.expected_at(block, now, steps, speed, transfer),
            created=now,
        )
        tx.leases.add(lease)
        self._reports.put(lease.id, _Report(0, now, lease, recorded=now))
        tx.events.add(now, "leased", worker, block.index, f"{steps} steps from batch {first_batch}")
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
            expected = plan.expected_now(swarm, lease, progress.steps_done, now)
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
                return plan.deadline_after_steps(swarm, lease, steps_done, report.at, now)
        # A coordinator does not see chunks that go to a bucket; the heartbeat stands for them.
        if lease.state == "sending" and self.run.chunks.takes_from_anyone:
            return plan.deadline_after_chunk(swarm, lease, now, now)
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
        if plan.deadline_after_chunk(swarm, report.lease, report.at, now) > deadline:
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
            lease = _extend(tx, lease, plan.deadline_after_chunk(swarm, lease, report.at, now))
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
        if plan.silent_at(swarm, self._listening_since) < now:
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


def _trained_last_lease(blocks: list[BlockState], caller: Caller, request: LeaseRequest) -> bool:
    """Whether all text of the block that the worker has trained is handed out, which makes its
    update there a final one. To be called before the worker gets its next lease."""
    return any(
        request.trained in block.unmerged(caller.worker) and not block.to_hand_out
        for block in blocks
    )


def _wait(blocks: list[BlockState], worker: str, request: LeaseRequest) -> Wait:
    seconds = plan.wait_seconds(blocks, worker)
    left = [block for block in blocks if block.to_hand_out]
    if seconds == plan.MERGE_WAIT:
        reason = "your last update is about to become a version"
    elif any(request.blocks is None or block.index in request.blocks for block in left):
        reason = "the blocks left for this worker build on blocks that are not far enough yet"
    else:
        reason = "all work that this worker can do is handed out"
    return Wait(seconds=seconds, reason=reason)
