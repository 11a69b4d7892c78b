"""A coordinator in memory, without files or messages, on the virtual clock.

`swarm/` makes all decisions. This carries them out in memory, where the real coordinator
(coordinator/leases.py, updates.py, merger.py) writes to its ledger. A test sends every request of a
simulation to both, and compares the answers and the blocks' states.
"""

import math
from collections import Counter
from collections.abc import Sequence

from blocktrain.config import SwarmConfig
from blocktrain.simulate.scenario import encoded_share
from blocktrain.simulate.virtual_block import VirtualBlock, VirtualLease, count_down
from blocktrain.swarm import lease_terms, merging_rules
from blocktrain.swarm.assignment import AT_ONCE, WorkRequest
from blocktrain.swarm.dispatcher import Dispatcher, Speeds
from blocktrain.swarm.merging_rules import UpdateRefusal
from blocktrain.swarm.order import Order

BECAME_STALE = "too many versions behind when it was to be merged"


class Learner:
    """Trains the leases of a simulation, of which the coordinator notifies it. This base class
    trains nothing: only time and traffic are simulated."""

    def started(self, lease: VirtualLease) -> None:
        """Called when a worker starts a lease, for the first time or again after a restart."""

    def lost_memory(self, worker: str, block: int) -> None:
        """Called when a worker that had this block in memory has lost its optimizer state."""

    def merged(self, block: VirtualBlock, leases: Sequence[VirtualLease]) -> None:
        """Called when these updates are merged into the block's next version; `block` still has the
        current one."""

    def inherited(self, block: VirtualBlock) -> None:
        """Called when a block inherits from the block before it, which makes version 1 of it."""

    def score(self) -> float | None:
        """Cross entropy of the current model, in nats per byte; None if none is trained."""
        return None


class VirtualCoordinator:
    """The coordinator of a simulation. Every method has the parameter `now`, even if it does not
    use it: subclasses that forward requests to a real coordinator need it."""

    def __init__(
        self,
        swarm: SwarmConfig,
        blocks: int,
        batches: int,
        learner: Learner | None = None,
        order: Order = AT_ONCE,
    ) -> None:
        self.swarm, self.learner, self.order = swarm, learner or Learner(), order
        self.blocks = [VirtualBlock(index, batches) for index in range(blocks)]
        self.leases_given = self.leases_returned = 0
        self.refused: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()  # merged updates by versions behind
        self._open: dict[str, VirtualLease] = {}  # by worker
        self._sending: Counter[str] = Counter()  # updates that are being sent, by worker
        self._speeds = Speeds(swarm)
        self.dispatcher = Dispatcher(swarm, self._speeds, order)
        self._silent_since: dict[str, float] = {}  # by worker that has left
        self._unfinished = blocks

    @property
    def finished(self) -> bool:
        return self._unfinished == 0

    @property
    def leases_met(self) -> int:
        return sum(block.leases_met for block in self.blocks)

    @property
    def leases_missed(self) -> int:
        return sum(block.leases_missed for block in self.blocks)

    @property
    def has_text(self) -> bool:
        return any(block.to_hand_out for block in self.blocks)

    # Leases

    def claim(
        self, request: WorkRequest, now: float, trained: VirtualLease | None = None
    ) -> VirtualLease | None:
        """A lease for a worker. None: it must wait, and counts as asking again and again until it
        gets a lease or has `left`. `trained`: the lease in `request.trained_lease`."""
        worker = request.worker
        self._silent_since.pop(worker, None)
        request = self.dispatcher.trusted(request)
        if trained and request.trained_lease and trained.state == "open":
            self.offer(trained, now)
        if current := self._open.get(worker):
            self.learner.started(current)
            return current
        request = request._replace(sending=self._sending[worker])
        plan = self.dispatcher.plan(request, self.blocks, now)
        if plan is None:
            self.dispatcher.attendance.stays(worker)
            return None
        block = plan.block
        first_batch, steps = block.take(plan.steps)
        deadline, expected = self.dispatcher.terms(request, block, steps, now)
        self.leases_given += 1
        lease = VirtualLease(
            f"{self.leases_given:012}",
            worker,
            block,
            first_batch,
            steps,
            block.version,
            deadline,
            created=now,
            continued=trained if plan.continues else None,
            schedule_start=plan.schedule_start,
            schedule_stride=plan.schedule_stride,
            reported_at=now,
        )
        block.open_leases += 1
        block.workers[worker] += 1
        block.expect(lease, expected)
        self._open[worker] = lease
        self.learner.started(lease)
        return lease

    def has_work(self, request: WorkRequest, now: float) -> bool:
        """Whether a worker without a lease would get one if it asked."""
        request = self.dispatcher.trusted(request)._replace(sending=self._sending[request.worker])
        return self.dispatcher.has_work(request, self.blocks, now)

    def is_open(self, index: int) -> bool:
        """Whether the workers that have this block loaded could get a lease of it if their own
        updates were merged."""
        block = self.blocks[index]
        if not block.to_hand_out or not self.order.waits:
            return block.to_hand_out > 0
        is_open = block in self.order.open_blocks(self.blocks, index)
        return is_open and self.order.available(block) > 0

    def left(self, worker: str, loaded_block: int | None, now: float) -> None:
        """Record that a worker has left and sends nothing until it returns."""
        self._silent_since[worker] = now
        self.dispatcher.attendance.left(worker, now)
        if loaded_block is not None:
            self.learner.lost_memory(worker, loaded_block)

    def progress(self, lease: VirtualLease, steps_done: int, now: float) -> None:
        """Process a heartbeat that reports progress."""
        arrival = lease_terms.arrival_after_progress(self.swarm, lease, steps_done, now)
        lease.block.expect(lease, arrival)
        if steps_done > lease.steps_done:
            last_report, lease.steps_done, lease.reported_at = lease.reported_at, steps_done, now
            lease.deadline = lease_terms.deadline_after_steps(
                self.swarm, lease, steps_done, last_report, now
            )

    def chunk_came(self, lease: VirtualLease, now: float) -> None:
        """Process a chunk of the lease's update."""
        last_report, lease.reported_at = lease.reported_at, now
        lease.deadline = lease_terms.deadline_after_chunk(self.swarm, lease, last_report, now)

    def expires_at(self, lease: VirtualLease) -> float:
        """When a lease expires if its worker reports nothing more."""
        silent_since = self._silent_since.get(lease.worker, math.inf)
        return min(lease.deadline, lease_terms.silence_deadline(self.swarm, silent_since))

    def expire(self, lease: VirtualLease, now: float) -> bool:
        """End a lease if it is overdue or its worker is silent. Returns whether it was ended."""
        if self.expires_at(lease) >= now or not self._close(lease, "expired"):
            return False
        lease.block.leases_missed += 1
        lease.block.give_back(lease.first_batch, lease.steps)
        return True

    def give_back(self, lease: VirtualLease, now: float) -> bool:
        """Return a lease, so that its batches can be leased again; False if it was not active."""
        if not self._close(lease, "returned"):
            return False
        self.leases_returned += 1
        lease.block.give_back(lease.first_batch, lease.steps)
        return True

    # Updates

    def offer(self, lease: VirtualLease, now: float) -> None:
        """Record that an update is about to be sent."""
        if lease.state == "open":
            self._end_training(lease)
            lease.state = "sending"
            self._sending[lease.worker] += 1
            lease.block.add_unmerged(lease)
            if lease.base_version == lease.block.version:
                lease.block.finishing[lease.worker] += 1

    def settle(self, lease: VirtualLease, now: float) -> UpdateRefusal | None:
        """Settle an update that has arrived. Returns why it is refused, or None if it counts."""
        block, in_time = lease.block, self._close(lease, "submitted")
        if lease.continued:
            lease.base_version = merging_rules.effective_base(
                lease.base_version, lease.continued.merged_into
            )
        refusal = merging_rules.judge_update(
            self.swarm,
            block.version,
            lease.base_version,
            in_time=in_time,
            reclaim=lambda: block.reclaim(lease.first_batch, lease.steps),
        ).refusal
        if in_time:
            block.leases_met += not refusal
            block.leases_missed += bool(refusal)
        if refusal:
            self._refuse(lease, refusal, give_back=in_time)
            return refusal
        lease.committed = now
        self._speeds.completed(lease.worker, lease.steps, now - lease.created)
        block.add_unmerged(lease)
        block.add_pending(lease)
        block.workers[lease.worker] += 1
        if lease.base_version == block.version:
            block.finishing[lease.worker] += 1
        return None

    def begin_merge(self, block: VirtualBlock, now: float) -> Sequence[VirtualLease]:
        """The updates to merge into the next version; none if it is better to wait."""
        due = merging_rules.due_updates(block, self.swarm, now)
        fresh, stale = merging_rules.split_stale(self.swarm, block.version, due)
        if stale:
            block.pending = list(fresh)
        for lease in stale:
            count_down(block.workers, lease.worker)
            block.remove_unmerged(lease)
            self._refuse(lease, BECAME_STALE, give_back=True)
        block.merging = bool(fresh)
        return fresh

    def publish(self, block: VirtualBlock, merged: Sequence[VirtualLease], now: float) -> None:
        """Publish the next version. Updates that arrived during the merge wait for the version
        after it."""
        self.learner.merged(block, merged)
        waiting, merged_leases = block.pending[len(merged) :], set(merged)
        for lease in waiting:
            if lease.continued in merged_leases:
                lease.base_version = block.version + 1
        for lease in merged:
            count_down(block.workers, lease.worker)
            block.remove_unmerged(lease)
            lease.continued, lease.merged_into = None, block.version + 1
            self.staleness[block.version - lease.base_version] += 1
            block.merged_batches += lease.steps
        block.made_from = merged[0] if self._is_copy(block, merged) else None
        delta_codec = merging_rules.delta_codec(self.swarm, block, len(merged))
        block.publish(waiting, encoded_share(delta_codec))
        block.finishing.clear()
        block.merging = False
        self._unfinished -= block.merged_batches == block.total_batches
        for heir in self.order.heirs(self.blocks):
            self.learner.inherited(heir)
            heir.publish([], delta_share=1.0)

    def _close(self, lease: VirtualLease, state: str) -> bool:
        """End a lease. Returns False if it had ended already."""
        if not lease.is_active:
            return False
        block = lease.block
        if lease.state == "open":
            self._end_training(lease)
        else:
            count_down(self._sending, lease.worker)
            if lease.base_version == block.version:
                count_down(block.finishing, lease.worker)
        lease.state = state
        block.remove_unmerged(lease)
        block.open_leases -= 1
        count_down(block.workers, lease.worker)
        return True

    def _end_training(self, lease: VirtualLease) -> None:
        del self._open[lease.worker]
        lease.block.expect_no_more(lease)

    def _refuse(self, lease: VirtualLease, reason: str, *, give_back: bool) -> None:
        self.refused[str(reason)] += 1
        if give_back:
            lease.block.give_back(lease.first_batch, lease.steps)

    def _is_copy(self, block: VirtualBlock, merged: Sequence[VirtualLease]) -> bool:
        """Whether the new version has exactly the weights of its only update, so that the update's
        worker need not download it."""
        is_only = len(merged) == 1 and merged[0].base_version == block.version
        return is_only and self.swarm.outer_rate == 1.0 and self.swarm.outer_momentum == 0.0
