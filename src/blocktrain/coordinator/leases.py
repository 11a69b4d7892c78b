"""Handing out work: which block, which text, until when; and taking it back.

Deadlines, and when a worker was last heard of, are in the ledger. How fast workers are and how many
steps they last reported is in memory: a coordinator that does not know begins with first leases,
and extends no deadline before a second report.
"""

from typing import NamedTuple

from blocktrain.coordinator import traffic
from blocktrain.coordinator.limits import LruCache
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
from blocktrain.swarm import assignment, lease_terms
from blocktrain.swarm.assignment import WorkRequest
from blocktrain.swarm.attendance import Speeds
from blocktrain.swarm.dispatcher import Dispatcher, LeasePlan
from blocktrain.swarm.state import BlockState

MOST_REPORTED = 65_536  # leases whose last report is in memory


class LeaseGrant(NamedTuple):
    """Enough of a lease to tell whether an update is its worker's to send, and fits."""

    worker: str
    public_key: str
    fence: int
    steps: int
    base: Version


class _Report(NamedTuple):
    """The last heartbeat that told of more steps than the one before, or chunk that came in."""

    steps_done: int
    at: float


class Leases:
    def __init__(
        self, run: Run, members: Members, handed_out: LruCache[LeaseGrant], speeds: Speeds
    ) -> None:
        self.run, self.members, self._handed_out = run, members, handed_out
        self.dispatcher = Dispatcher(run.config.swarm, speeds, run.config.lead)
        self._reports: LruCache[_Report] = LruCache(MOST_REPORTED)  # by lease
        self._looked_at = self._listening_since = run.clock()

    def claim(self, caller: Caller, asked: LeaseRequest) -> LeaseAnswer:
        """Work for a worker. One that already holds some gets the same again: its answer was lost
        on the way, or it was restarted."""
        if caller.role != "train":
            raise RefusedError("forbidden", f"leases are for training, this role is {caller.role}")
        now = self.run.clock()
        request = self.dispatcher.trusted(_work_request(caller, asked))
        with self.run.ledger.write() as tx:
            tx.blocks.lock()
            if request.trained_lease:
                tx.leases.mark_trained(request.trained_lease, caller.worker)
            elif _begins_anew(asked):
                tx.leases.reopen_unsent(caller.worker)
            worker = self.members.seen(tx, caller, now)
            held, blocks = tx.leases.open_of(caller.worker), tx.blocks.states()
            last_words = _nothing_left(blocks, request)
            answer = (
                self._described(tx, held, worker, now)
                if held
                else self._answer(tx, worker, blocks, request, now)
            )
            return LeaseAnswer(answer=answer, final_update=last_words)

    def _answer(
        self,
        tx: Transaction,
        worker: WorkerRow,
        blocks: list[BlockState],
        request: WorkRequest,
        now: float,
    ) -> Lease | Wait | Finished:
        if all(block.finished for block in blocks):
            return Finished()
        plan = self.dispatcher.plan(request, blocks, now)
        if plan is None:
            return _wait(blocks, request)
        lease = self._hand_out(tx, request, plan, now)
        return self._described(tx, lease, worker, now)

    def progress(self, caller: Caller, lease: str, told: LeaseProgress) -> LeaseState:
        """A heartbeat; whether the lease is still the worker's."""
        now, swarm = self.run.clock(), self.run.config.swarm
        with self.run.ledger.write() as tx:
            self.members.seen(tx, caller, now)
            held = own_lease(tx, caller, lease, told.fence)
            expected = lease_terms.arrival_after_progress(swarm, held, told.steps_done, now)
            if expected is not None and expected != held.expected:
                tx.leases.set_expected(lease, expected)
            deadline = self._deadline(held, told.steps_done, now)
            self._extend(tx, held, deadline)
        if held.state in HELD:
            return LeaseState(open=True, seconds_left=deadline - now)
        return LeaseState(open=False, seconds_left=0.0, reason=f"this lease is {held.state}")

    def chunk_came(self, caller: Caller, lease: str) -> None:
        """A part of its update has come in: as good as a heartbeat."""
        now, swarm = self.run.clock(), self.run.config.swarm
        with self.run.ledger.write() as tx:
            self.members.seen(tx, caller, now)
            held = tx.leases.get(lease)
            if held and held.worker == caller.worker:
                before = self._reports.get(lease) or _Report(0, now)
                self._reports.remember(lease, before._replace(at=now))
                self._extend(
                    tx, held, lease_terms.deadline_after_chunk(swarm, held, before.at, now)
                )

    def give_back(self, caller: Caller, lease: str, told: LeaseReturn) -> LeaseState:
        traffic.check_downloads(told.downloads, self.run.config.block_count)
        now = self.run.clock()
        with self.run.ledger.write() as tx:
            tx.blocks.lock()
            self.members.seen(tx, caller, now)
            held = own_lease(tx, caller, lease, told.fence)
            in_time = tx.leases.move(lease, "returned")
            if in_time or _is_heard_late(tx, lease):
                traffic.count_traffic(tx, caller.worker, {}, told.downloads)
            if in_time:
                tx.blocks.give_back_range(held.block, held.first_batch, held.steps)
                tx.events.add(now, "returned", caller.worker, held.block, told.reason)
        return LeaseState(open=False, seconds_left=0.0, reason="given back")

    def expire(self) -> None:
        """Take back what is overdue, or whose worker is silent: its text is handed out again."""
        now = self.run.clock()
        self._notice_pause(now)
        with self.run.ledger.read() as tx:
            if not self._over(tx, now):
                return
        with self.run.ledger.write() as tx:
            tx.blocks.lock()
            for lease in self._over(tx, now):
                if tx.leases.move(lease.id, "expired"):
                    tx.leases.set_deadline(lease.id, min(lease.deadline, now))
                    tx.blocks.give_back_range(lease.block, lease.first_batch, lease.steps)
                    tx.blocks.count_lease(lease.block, met=False)
                    tx.events.add(now, "lost", lease.worker, lease.block, f"{lease.steps} steps")

    def _over(self, tx: Transaction, now: float) -> list[LeaseRow]:
        """Leases that are held and must not be any longer."""
        swarm, over = self.run.config.swarm, tx.leases.overdue(now)
        if lease_terms.silence_deadline(swarm, self._listening_since) < now:
            over += tx.leases.silent(now - swarm.heartbeat_timeout)
        return list({lease.id: lease for lease in over}.values())

    def _notice_pause(self, now: float) -> None:
        """A coordinator that was suspended, or had no ledger, has heard nobody meanwhile: it gives
        all of them the time to be heard again."""
        if now - self._looked_at > 0.5 * self.run.config.swarm.heartbeat_timeout:
            self._listening_since = now
        self._looked_at = now

    def _deadline(self, held: LeaseRow, steps_done: int, now: float) -> float:
        """By what its worker reports. In a bucket chunks come in unseen: there a heartbeat tells
        that they do."""
        swarm, before = self.run.config.swarm, self._reports.get(held.id)
        if before is None or steps_done > before.steps_done:
            self._reports.remember(held.id, _Report(steps_done, now))
            if before:
                return lease_terms.deadline_after_steps(swarm, held, steps_done, before.at, now)
        if held.state == "sending" and self.run.chunks.has_presigned_urls:
            return lease_terms.deadline_after_chunk(swarm, held, now, now)
        return float(held.deadline)

    def _extend(self, tx: Transaction, held: LeaseRow, deadline: float) -> None:
        if held.state in HELD and deadline > held.deadline:
            tx.leases.set_deadline(held.id, deadline)

    def _hand_out(
        self, tx: Transaction, request: WorkRequest, plan: LeasePlan[BlockState], now: float
    ) -> LeaseRow:
        block = plan.block
        first_batch, steps, fence = tx.blocks.take_range(block.index, plan.steps)
        terms = self.dispatcher.terms(request, block, steps, now)
        lease = LeaseRow(
            id=tokens.identifier_of(now),
            worker=request.worker,
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
        self._reports.remember(lease.id, _Report(0, now))
        detail = f"{steps} steps from batch {first_batch}"
        tx.events.add(now, "leased", request.worker, block.index, detail)
        return lease

    def _described(self, tx: Transaction, lease: LeaseRow, worker: WorkerRow, now: float) -> Lease:
        base = tx.versions.get(lease.block, lease.base_version)
        held = LeaseGrant(worker.id, worker.public_key, lease.fence, lease.steps, base)
        self._handed_out.remember(lease.id, held)
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
        """The current versions of the blocks whose features the block reads."""
        if not self.run.config.kind.reads_predecessors:
            return ()
        current = [tx.versions.get(before) for before in range(block)]
        return tuple(
            Predecessor(block=held.block, version=held.version, weights=held.weights)
            for held in current
        )


def own_lease(tx: Transaction, caller: Caller, lease: str, fence: int) -> LeaseRow:
    """The caller's lease; a fencing token that is not its own means somebody else's, or a past."""
    held = tx.leases.get(lease)
    if held is None or held.worker != caller.worker:
        raise RefusedError("not_found", "this worker holds no such lease")
    if held.fence != fence:
        raise RefusedError("conflict", "the fencing token is not this lease's")
    return held


def _is_heard_late(tx: Transaction, lease: str) -> bool:
    """Whether a lease that ran out is now given back, for the first time, and no update of it has
    told what was downloaded."""
    sent = tx.updates.get(lease)
    return tx.leases.return_expired(lease) and (sent is None or sent.state == "offered")


def _begins_anew(asked: LeaseRequest) -> bool:
    """Whether a worker has trained nothing yet since it was started."""
    return asked.held_block is None and asked.steps_per_second is None


def _work_request(caller: Caller, asked: LeaseRequest) -> WorkRequest:
    return WorkRequest(
        worker=caller.worker,
        loaded_block=asked.held_block,
        allowed_blocks=asked.blocks,
        trained_lease=asked.trained,
        steps_per_second=asked.steps_per_second,
        transfer_seconds=asked.transfer_seconds,
    )


def _nothing_left(blocks: list[BlockState], request: WorkRequest) -> bool:
    """Whether the block whose lease a worker has trained is all handed out; looked at before it
    gets the next."""
    return any(
        request.trained_lease in block.unmerged(request.worker) and not block.to_hand_out
        for block in blocks
    )


def _wait(blocks: list[BlockState], request: WorkRequest) -> Wait:
    seconds, allowed = assignment.wait_seconds(blocks, request.worker), request.allowed_blocks
    left = [block for block in blocks if block.to_hand_out]
    if seconds == assignment.MERGE_WAIT:
        reason = "the last update is about to become a version"
    elif any(allowed is None or block.index in allowed for block in left):
        reason = "what is left for this worker builds on blocks that are not far enough yet"
    else:
        reason = "everything this worker could do is handed out"
    return Wait(seconds=seconds, reason=reason)
