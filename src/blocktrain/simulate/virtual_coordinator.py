"""A coordinator in memory, without files or messages, on the virtual clock.

All decisions are those of `swarm/`. This carries them out, where the real coordinator
(coordinator/leases.py, updates.py, merger.py) writes rows to its ledger; a test sends every request
of a simulation to both and compares the answers and the states of the blocks.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Protocol

from blocktrain.config import SwarmConfig
from blocktrain.simulate.event_queue import EventQueue
from blocktrain.simulate.scenario import encoded_share
from blocktrain.simulate.virtual_block import VirtualBlock, VirtualLease, count_down
from blocktrain.swarm import assignment, lease_terms, merging_rules
from blocktrain.swarm.assignment import WorkRequest
from blocktrain.swarm.attendance import Speeds
from blocktrain.swarm.dispatcher import Dispatcher
from blocktrain.swarm.merging_rules import UpdateRefusal

BECAME_STALE = "too many versions behind once it was to be merged"


class Learner(Protocol):
    """Trains what is simulated: a coordinator tells it which lease starts from what, and which
    updates make a version."""

    def started(self, lease: VirtualLease) -> None:
        """A worker starts a lease, for the first time or again after a restart."""
        ...

    def lost_memory(self, worker: str, block: int) -> None:
        """A worker that had this block in memory has lost its optimizer state."""
        ...

    def merged(self, block: VirtualBlock, leases: Sequence[VirtualLease]) -> None:
        """These updates make the block's next version; `block` still has the current one."""
        ...

    def score(self) -> float | None:
        """Cross entropy of the current model, in nats per byte."""
        ...


class NoLearner:
    """Simulates time and traffic only."""

    def started(self, lease: VirtualLease) -> None:
        pass

    def lost_memory(self, worker: str, block: int) -> None:
        pass

    def merged(self, block: VirtualBlock, leases: Sequence[VirtualLease]) -> None:
        pass

    def score(self) -> None:
        return None


class VirtualCoordinator:
    """Every method takes the time, even if it makes no use of it: subclasses do that pass all
    requests on to a real coordinator."""

    def __init__(
        self,
        swarm: SwarmConfig,
        blocks: int,
        batches: int,
        learner: Learner | None = None,
        lead: float = 0.0,
    ) -> None:
        self.swarm, self.learner, self.lead = swarm, learner or NoLearner(), lead
        self.blocks = [VirtualBlock(index, batches) for index in range(blocks)]
        self.leases_given = self.leases_returned = 0
        self.refused: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()  # merged updates by versions behind
        self._open: dict[str, VirtualLease] = {}  # by worker
        self._speeds = Speeds(swarm)
        self.dispatcher = Dispatcher(swarm, self._speeds, lead)
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
        """A lease for a worker. None: it has to wait, and counts as asking again and again until
        it gets a lease or has `left`. `trained`: the lease that its request names."""
        worker = request.worker
        self._silent_since.pop(worker, None)
        request = self.dispatcher.trusted(request)
        if trained and request.trained_lease and trained.state == "open":
            self.offer(trained, now)
        if current := self._open.get(worker):
            self.learner.started(current)
            return current
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
            deadline,
            trained if plan.continues else None,
        )
        lease.schedule_start, lease.schedule_stride = plan.schedule_start, plan.schedule_stride
        lease.created = lease.reported_at = now
        block.open_leases += 1
        block.workers[worker] += 1
        block.expect(lease, expected)
        self._open[worker] = lease
        self.learner.started(lease)
        return lease

    def has_work(self, request: WorkRequest, now: float) -> bool:
        """Whether a worker without a lease would get one if it asked."""
        return self.dispatcher.has_work(self.dispatcher.trusted(request), self.blocks, now)

    def is_open(self, index: int) -> bool:
        """Whether the workers that have this block loaded could get a lease of it if their own
        updates were merged."""
        block = self.blocks[index]
        if not block.to_hand_out or not self.lead:
            return block.to_hand_out > 0
        return block in assignment.blocks_behind_lead(self.blocks, self.lead, index)

    def left(self, worker: str, loaded_block: int | None, now: float) -> None:
        """A worker sends nothing more until it comes back."""
        self._silent_since[worker] = now
        self.dispatcher.attendance.left(worker, now)
        if loaded_block is not None:
            self.learner.lost_memory(worker, loaded_block)

    def progress(self, lease: VirtualLease, steps_done: int, now: float) -> None:
        """A heartbeat."""
        arrival = lease_terms.arrival_after_progress(self.swarm, lease, steps_done, now)
        lease.block.expect(lease, arrival)
        if steps_done > lease.steps_done:
            last_report, lease.steps_done, lease.reported_at = lease.reported_at, steps_done, now
            lease.deadline = lease_terms.deadline_after_steps(
                self.swarm, lease, steps_done, last_report, now
            )

    def chunk_came(self, lease: VirtualLease, now: float) -> None:
        """A chunk of the lease's update has arrived."""
        last_report, lease.reported_at = lease.reported_at, now
        lease.deadline = lease_terms.deadline_after_chunk(self.swarm, lease, last_report, now)

    def expires_at(self, lease: VirtualLease) -> float:
        """When a lease expires if nothing more is heard of it."""
        silent_since = self._silent_since.get(lease.worker, math.inf)
        return min(lease.deadline, lease_terms.silence_deadline(self.swarm, silent_since))

    def expire(self, lease: VirtualLease, now: float) -> bool:
        """Take a lease back if it is overdue or its worker is silent; whether it was taken."""
        if self.expires_at(lease) >= now or not self._close(lease, "expired"):
            return False
        lease.block.leases_missed += 1
        lease.block.give_back(lease.first_batch, lease.steps)
        return True

    def give_back(self, lease: VirtualLease, now: float) -> bool:
        """Whether the lease was still held, so that its text can be handed out again."""
        if not self._close(lease, "returned"):
            return False
        self.leases_returned += 1
        lease.block.give_back(lease.first_batch, lease.steps)
        return True

    # Updates

    def offer(self, lease: VirtualLease, now: float) -> None:
        """An update is about to be sent."""
        if lease.state == "open":
            self._end_training(lease)
            lease.state = "sending"
            lease.block.add_unmerged(lease)
            if lease.base_version == lease.block.version:
                lease.block.finishing[lease.worker] += 1

    def settle(self, lease: VirtualLease, now: float) -> UpdateRefusal | None:
        """An update has arrived; why it does not count, or None if it does."""
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
        """The updates that the next version is made of; none if it is better to wait."""
        due = merging_rules.due_updates(block, self.swarm, now)
        fresh, stale = merging_rules.split_stale(self.swarm, block.version, due)
        if stale:  # `due` may be a part of what is pending
            refused = set(stale)
            block.pending = [lease for lease in block.pending if lease not in refused]
        for lease in stale:
            count_down(block.workers, lease.worker)
            block.remove_unmerged(lease)
            self._refuse(lease, BECAME_STALE, give_back=True)
        block.merging = bool(fresh)
        return fresh

    def publish(self, block: VirtualBlock, merged: Sequence[VirtualLease], now: float) -> None:
        """The next version is complete. Updates that arrived during the merge wait for the one
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

    def _close(self, lease: VirtualLease, state: str) -> bool:
        """End a lease for good; False if it has ended before."""
        if not lease.held:
            return False
        block = lease.block
        if lease.state == "open":
            self._end_training(lease)
        elif lease.base_version == block.version:
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
        """Whether the new version is exactly the weights of its only update, so that the update's
        worker need not download it."""
        is_only = len(merged) == 1 and merged[0].base_version == block.version
        return is_only and self.swarm.outer_rate == 1.0 and self.swarm.outer_momentum == 0.0


class CoordinatorRounds:
    """What a coordinator does unasked: it takes back leases and merges updates. The real one checks
    four times a second; this one is scheduled for the moment when there is something to do."""

    def __init__(
        self,
        events: EventQueue,
        coordinator: VirtualCoordinator,
        merge_seconds: Callable[[int], float],
        mergers: int,
        on_expired: Callable[[VirtualLease], None],
        on_refused: Callable[[Sequence[VirtualLease]], None],
        on_version: Callable[[VirtualBlock, Sequence[str]], None],
    ) -> None:
        """`merge_seconds`: by the number of updates. `on_version`: gets the workers with unmerged
        leases before the version."""
        self._events, self._coordinator = events, coordinator
        self._merge_seconds, self._free_mergers = merge_seconds, mergers
        self._on_expired, self._on_refused = on_expired, on_refused
        self._on_version = on_version
        self._due: deque[VirtualBlock] = deque()
        self._checks: dict[int, float] = {}  # by block, when it will be checked again

    def watch(self, lease: VirtualLease) -> None:
        """Schedule the end of a lease."""
        expires_at = self._coordinator.expires_at(lease)
        self._events.at(math.nextafter(expires_at, math.inf), self._expire, lease)

    def check(self, block: VirtualBlock) -> None:
        """A block has changed: merge its updates, or schedule that for when they are due."""
        if block.merging or block in self._due or self._is_scheduled(block):
            return
        due_at = merging_rules.due_at(block, self._coordinator.swarm)
        if due_at <= self._events.now:
            self._checks.pop(block.index, None)
            self._due.append(block)
            self._merge_next()
        elif due_at < math.inf and self._checks.get(block.index) != due_at:
            self._checks[block.index] = due_at
            self._events.at(due_at, self._check_scheduled, block, due_at)

    def _is_scheduled(self, block: VirtualBlock) -> bool:
        """Whether a merge is scheduled that further updates cannot bring forward, since the quorum
        has been reached. Saves a decision for every update."""
        quorum = self._coordinator.swarm.quorum
        if block.index not in self._checks or len(block.workers) < quorum:
            return False
        return block.open_leases > 0 and len(block.fresh_since) > quorum

    def _check_scheduled(self, block: VirtualBlock, scheduled: float) -> None:
        if self._checks.get(block.index) == scheduled:
            del self._checks[block.index]
            self.check(block)

    def _expire(self, lease: VirtualLease) -> None:
        if not lease.held:
            return
        if self._coordinator.expire(lease, self._events.now):
            self._on_expired(lease)
            self.check(lease.block)
        else:  # it was extended, or its worker came back
            self.watch(lease)

    def _merge_next(self) -> None:
        while self._free_mergers and self._due:
            block = self._due.popleft()
            before = block.pending
            merged = self._coordinator.begin_merge(block, self._events.now)
            if len(block.pending) < len(before):
                still_pending = set(block.pending)
                self._on_refused([lease for lease in before if lease not in still_pending])
            if merged:
                self._free_mergers -= 1
                published_at = self._events.now + self._merge_seconds(len(merged))
                self._events.at(published_at, self._publish, block, merged)

    def _publish(self, block: VirtualBlock, merged: Sequence[VirtualLease]) -> None:
        senders = tuple(block.senders)
        self._coordinator.publish(block, merged, self._events.now)
        self._free_mergers += 1
        self._on_version(block, senders)
        self.check(block)
        self._merge_next()
