"""A coordinator without files, messages or a clock: who holds what, and what the plan says to it.

All decisions are `coordinator.plan`'s, by the real coordinator's `Attendance`. What surrounds them
follows it rule by rule, and a test drives both through the same events:

- leases.py: who already holds an open lease gets the same again; text that came back is handed out
  before text that was never out; a lease that is overdue, or whose worker is silent, or that is
  given back, puts its text back; progress moves its deadline.
- updates.py: an offer makes a lease "sending"; an update counts once; one whose lease is over
  counts only if nobody has had its text since; a refused one puts its text back.
- merger.py: what fell too far behind while it waited is refused when its block is merged; a version
  takes in all other updates that waited when its merge began.
"""

import math
from collections import Counter
from collections.abc import Sequence

from blocktrain.config import SwarmConfig
from blocktrain.simulate.learner import Learner, NothingLearned
from blocktrain.simulate.scenario import share_of
from blocktrain.simulate.virtual_block import VirtualBlock, VirtualLease, count_out
from blocktrain.swarm import assignment, lease_terms, merging_rules
from blocktrain.swarm.assignment import WorkRequest
from blocktrain.swarm.attendance import Speeds
from blocktrain.swarm.dispatcher import Dispatcher
from blocktrain.swarm.merging_rules import UpdateRefusal

FELL_BEHIND = "too many versions behind once it was to be merged"


class VirtualCoordinator:
    """Every method is told the time, also where this one does not need it: one that watches over
    it, beside a real coordinator, does."""

    def __init__(
        self,
        swarm: SwarmConfig,
        blocks: int,
        batches: int,
        learner: Learner | None = None,
        lead: float = 0.0,
    ) -> None:
        self.swarm, self.learner, self.lead = swarm, learner or NothingLearned(), lead
        self.blocks = [VirtualBlock(index, batches) for index in range(blocks)]
        self.given = self.returned = 0
        self.refused: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()  # of merged updates, by versions behind
        self._open: dict[str, VirtualLease] = {}  # by worker
        self._speeds = Speeds(swarm)
        self.dispatcher = Dispatcher(swarm, self._speeds, lead)
        self._silent_since: dict[str, float] = {}  # workers that have left
        self._unfinished = blocks

    @property
    def finished(self) -> bool:
        return self._unfinished == 0

    @property
    def met(self) -> int:
        return sum(block.met for block in self.blocks)

    @property
    def missed(self) -> int:
        return sum(block.missed for block in self.blocks)

    @property
    def has_text(self) -> bool:
        return any(block.to_hand_out for block in self.blocks)

    def claim(
        self,
        worker: str,
        held: int | None,
        steps_per_second: float | None,
        transfer_seconds: float,
        now: float,
        trained: VirtualLease | None = None,
    ) -> VirtualLease | None:
        """Work for a worker; None: it has to wait, and is taken to ask again and again until it
        gets some or has `left`."""
        self._silent_since.pop(worker, None)
        request = self.dispatcher.trusted(
            WorkRequest(
                worker,
                loaded_block=held,
                trained_lease=trained.lease if trained else None,
                steps_per_second=steps_per_second,
                transfer_seconds=transfer_seconds,
            )
        )
        if trained and request.trained_lease and trained.state == "open":
            self.offer(trained, now)
        if already := self._open.get(worker):
            self.learner.taken(already)
            return already
        plan = self.dispatcher.plan(request, self.blocks, now)
        if plan is None:
            self.dispatcher.attendance.stays(worker)
            return None
        block = plan.block
        first_batch, steps = block.take(plan.steps)
        terms = self.dispatcher.terms(request, block, steps, now)
        self.given += 1
        lease = VirtualLease(
            f"{self.given:012}",
            worker,
            block,
            first_batch,
            steps,
            terms.deadline,
            trained if plan.continues else None,
        )
        lease.schedule_start, lease.schedule_stride = plan.schedule_start, plan.schedule_stride
        lease.created = lease.reported = now
        block.open_leases += 1
        block.workers[worker] += 1
        block.expect(lease, terms.expected)
        self._open[worker] = lease
        self.learner.taken(lease)
        return lease

    def has_work(
        self,
        worker: str,
        held: int | None,
        transfer_seconds: float,
        now: float,
        trained: VirtualLease | None,
    ) -> bool:
        """Whether a worker that holds no lease would get one if it asked."""
        request = WorkRequest(
            worker,
            loaded_block=held,
            trained_lease=trained.lease if trained and self.swarm.codec != "none" else None,
            transfer_seconds=lease_terms.trusted_transfer(self.swarm, transfer_seconds),
        )
        return self.dispatcher.has_work(request, self.blocks, now)

    def holds_back(self, index: int) -> bool:
        """Whether whoever waits there for what its own update becomes could not go on elsewhere:
        the block has text, and it may be trained by those who hold it."""
        block = self.blocks[index]
        if not block.to_hand_out or not self.lead:
            return block.to_hand_out > 0
        return block in assignment.blocks_behind_lead(self.blocks, self.lead, index)

    def left(self, worker: str, held: int | None, now: float) -> None:
        """It asks no more, and is not heard of, until it comes back."""
        self._silent_since[worker] = now
        self.dispatcher.attendance.left(worker, now)
        if held is not None:
            self.learner.left(worker, held)

    def progress(self, lease: VirtualLease, steps_done: int, now: float) -> None:
        """A heartbeat."""
        lease.block.expect(
            lease, lease_terms.arrival_after_progress(self.swarm, lease, steps_done, now)
        )
        if steps_done > lease.steps_done:
            before, lease.steps_done, lease.reported = lease.reported, steps_done, now
            lease.deadline = lease_terms.deadline_after_steps(
                self.swarm, lease, steps_done, before, now
            )

    def chunk_came(self, lease: VirtualLease, now: float) -> None:
        """A part of its update has come in."""
        before, lease.reported = lease.reported, now
        lease.deadline = lease_terms.deadline_after_chunk(self.swarm, lease, before, now)

    def ends_at(self, lease: VirtualLease) -> float:
        """When it expires, if nothing else is heard of it."""
        silent_since = self._silent_since.get(lease.worker, math.inf)
        return min(lease.deadline, lease_terms.silence_deadline(self.swarm, silent_since))

    def offer(self, lease: VirtualLease, now: float) -> None:
        """An update is about to be sent."""
        if lease.state == "open":
            self._ended(lease)
            lease.state = "sending"
            lease.block.trained(lease)
            if lease.base_version == lease.block.version:
                lease.block.finishing[lease.worker] += 1

    def settle(self, lease: VirtualLease, now: float) -> UpdateRefusal | None:
        """Count an update that has arrived, or say why not."""
        block, in_time = lease.block, self._close(lease, "submitted")
        if lease.before:
            lease.base_version = merging_rules.effective_base(
                lease.base_version, lease.before.merged_into
            )
        reason = merging_rules.judge_update(
            self.swarm,
            block.version,
            lease.base_version,
            in_time=in_time,
            reclaim=lambda: block.reclaim(lease.first_batch, lease.steps),
        ).refusal
        if in_time:
            block.met += not reason
            block.missed += bool(reason)
        if reason:
            self._refuse(lease, reason, put_back=in_time)
            return reason
        lease.committed = now
        self._speeds.completed(lease.worker, lease.steps, now - lease.created)
        block.trained(lease)
        block.wait(lease)
        block.workers[lease.worker] += 1
        if lease.base_version == block.version:
            block.finishing[lease.worker] += 1
        return None

    def give_back(self, lease: VirtualLease, now: float) -> bool:
        """Whether that put text back."""
        if not self._close(lease, "returned"):
            return False
        self.returned += 1
        lease.block.give_back(lease.first_batch, lease.steps)
        return True

    def expire(self, lease: VirtualLease, now: float) -> bool:
        """Take back what is overdue, or whose worker is silent; whether it was still held."""
        if self.ends_at(lease) >= now or not self._close(lease, "expired"):
            return False
        lease.block.missed += 1
        lease.block.give_back(lease.first_batch, lease.steps)
        return True

    def begin_merge(self, block: VirtualBlock, now: float) -> Sequence[VirtualLease]:
        """What the next version is made of; none where it is better to wait."""
        due = merging_rules.due_updates(block, self.swarm, now)
        fresh, stale = merging_rules.split_stale(self.swarm, block.version, due)
        if stale:
            block.pending = list(fresh)
        for lease in stale:
            count_out(block.workers, lease.worker)
            block.settled(lease)
            self._refuse(lease, FELL_BEHIND, put_back=True)
        block.merging = bool(fresh)
        return fresh

    def publish(self, block: VirtualBlock, merged: Sequence[VirtualLease], now: float) -> None:
        """The next version. What arrived while it was made waits for the one after."""
        self.learner.merged(block, merged)
        waiting, in_it = block.pending[len(merged) :], set(merged)
        for lease in waiting:
            if lease.before in in_it:
                lease.base_version = block.version + 1
        for lease in merged:
            count_out(block.workers, lease.worker)
            block.settled(lease)
            lease.before, lease.merged_into = None, block.version + 1
            self.staleness[block.version - lease.base_version] += 1
            block.merged_batches += lease.steps
        block.author = merged[0] if self._is_the_update(block, merged) else None
        block.follow(waiting, share_of(merging_rules.delta_codec(self.swarm, block, len(merged))))
        block.finishing.clear()
        block.merging = False
        self._unfinished -= block.merged_batches == block.total_batches

    def _close(self, lease: VirtualLease, state: str) -> bool:
        """Move a lease on for good; False where it is nobody's any more."""
        if not lease.held:
            return False
        block = lease.block
        if lease.state == "open":
            self._ended(lease)
        elif lease.base_version == block.version:
            count_out(block.finishing, lease.worker)
        lease.state = state
        block.settled(lease)
        block.open_leases -= 1
        count_out(block.workers, lease.worker)
        return True

    def _ended(self, lease: VirtualLease) -> None:
        """Nobody trains it any more."""
        del self._open[lease.worker]
        lease.block.expect_no_more(lease)

    def _refuse(self, lease: VirtualLease, reason: str, *, put_back: bool) -> None:
        self.refused[str(reason)] += 1
        if put_back:
            lease.block.give_back(lease.first_batch, lease.steps)

    def _is_the_update(self, block: VirtualBlock, merged: Sequence[VirtualLease]) -> bool:
        """Whoever made a version's only update has its weights already, if nothing is added."""
        alone = len(merged) == 1 and merged[0].base_version == block.version
        return alone and self.swarm.outer_rate == 1.0 and self.swarm.outer_momentum == 0.0
