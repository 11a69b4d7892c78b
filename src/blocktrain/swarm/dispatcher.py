"""Decides on requests for work, from the request to the terms of the lease.

The coordinator and the simulation share these decisions; one carries them out in its ledger, the
other in memory. Remembers which workers ask for work, and their speeds.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from blocktrain.config import SwarmConfig
from blocktrain.swarm import assignment, lease_terms
from blocktrain.swarm.assignment import AT_ONCE, Block, WorkRequest
from blocktrain.swarm.lease_terms import MICROSTEP, SHORTEST_SHARE, trusted_speed
from blocktrain.swarm.order import Order
from blocktrain.swarm.state import BlockView, LeaseView

Lease = TypeVar("Lease", bound=LeaseView)

ABSENT_LEASES = 2.0  # lease times without a request after which a worker counts as absent
SHORTEST_MEASURED = 1e-3  # seconds; avoids a division by zero


class _Worker(NamedTuple):
    block: int | None  # of its lease; None: it is waiting
    last_block: int | None  # of its lease or, while it waits, of its last lease
    microsteps: int  # per second


class Attendance:
    """Which workers are present, and how fast they are. This decides how workers spread over the
    blocks and share a run's last batches. The ledger only knows the workers with a lease, not those
    that are about to ask for one. Of several coordinators, each knows only the workers that send it
    requests."""

    def __init__(self, swarm: SwarmConfig) -> None:
        self._absent_after = ABSENT_LEASES * swarm.lease_seconds
        # A higher speed would change nothing: no lease has more steps or is shorter.
        self._fastest = swarm.most_steps / (SHORTEST_SHARE * swarm.lease_seconds)
        self._present: dict[str, _Worker] = {}
        # Oldest first. Not a dict, which finds its first key slowly after many deletions.
        self._last_requests: OrderedDict[str, float] = OrderedDict()
        self._cleaned_at: float | None = None
        # Kept as sums, since there may be many workers.
        self._microsteps: Counter[int | None] = Counter()  # by block
        self._workers: Counter[int | None] = Counter()  # by last block

    def record(
        self, worker: str, block: int | None, steps_per_second: float | None, now: float
    ) -> None:
        """Record that a worker asked for a lease, and got one of this block or must wait (None). A
        worker of unknown speed counts as speed 0."""
        self._forget_absent(now)
        before = self._forget(worker)
        last_block = before.last_block if before and block is None else block
        microsteps = round(min(steps_per_second or 0.0, self._fastest) / MICROSTEP)
        self._present[worker] = _Worker(block, last_block, microsteps)
        self._last_requests[worker] = now
        self._microsteps[block] += microsteps
        self._workers[last_block] += 1

    def stays(self, worker: str) -> None:
        """Record that a worker waits and keeps asking, although its requests are not recorded one
        by one. It counts as present until the next `record` or `left`."""
        self._last_requests.pop(worker, None)

    def left(self, worker: str, now: float) -> None:
        """Record that a worker that has counted as present since `stays` no longer asks for
        leases."""
        if worker in self._present and worker not in self._last_requests:
            self._last_requests[worker] = now

    def others(self, worker: str, now: float) -> Mapping[int | None, int]:
        """How many other workers are present, by the block of their last lease. A worker that waits
        for its update to be merged will continue with the same block."""
        self._forget_absent(now)
        workers = dict(self._workers)
        if own := self._present.get(worker):
            workers[own.last_block] -= 1
        return workers

    def other_speeds(self, worker: str) -> Mapping[int | None, int]:
        """The summed speed of all other workers, by the block they train (None: they wait). It is a
        whole number of microsteps (MICROSTEP) per second, so that sums are exact."""
        microsteps = dict(self._microsteps)
        if own := self._present.get(worker):
            microsteps[own.block] -= own.microsteps
        return microsteps

    def _forget_absent(self, now: float) -> None:
        if now == self._cleaned_at:
            return
        self._cleaned_at = now
        while (
            self._last_requests
            and now - next(iter(self._last_requests.values())) > self._absent_after
        ):
            self._forget(next(iter(self._last_requests)))

    def _forget(self, worker: str) -> _Worker | None:
        self._last_requests.pop(worker, None)
        if before := self._present.pop(worker, None):
            self._microsteps[before.block] -= before.microsteps
            self._workers[before.last_block] -= 1
        return before


class Speeds:
    """Workers' speeds by the coordinator's clock, which bound the speeds that workers claim. After
    a restart none is known, and workers get first leases again."""

    def __init__(self, swarm: SwarmConfig) -> None:
        self._swarm = swarm
        self._measured: dict[str, float] = {}  # by worker, steps per second of its fastest lease

    def completed(self, worker: str, steps: int, seconds: float) -> None:
        """Record that a worker's update of this many steps was accepted, `seconds` after its lease
        began."""
        self.measured_as(worker, steps / max(SHORTEST_MEASURED, seconds))

    def measured_as(self, worker: str, steps_per_second: float) -> None:
        """Record a speed that was measured before, perhaps by another coordinator."""
        self._measured[worker] = max(steps_per_second, self._measured.get(worker, 0.0))

    def measured(self, worker: str) -> float | None:
        return self._measured.get(worker)

    def trusted(self, worker: str, claimed: float | None) -> float | None:
        return trusted_speed(self._swarm, claimed, self._measured.get(worker))


class LeasePlan(NamedTuple, Generic[Block]):
    """A lease to create. It may get fewer steps if the block has no range of so many batches."""

    block: Block
    steps: int
    continues: str | None  # the lease whose end it starts from; None: from the current version
    schedule_start: int
    schedule_stride: int


class LeaseTerms(NamedTuple):
    deadline: float
    expected: float | None  # when its update should arrive; None: its worker's speed is unknown


class Dispatcher:
    """Decides on requests for work, and remembers which workers make them."""

    def __init__(self, swarm: SwarmConfig, speeds: Speeds, order: Order = AT_ONCE) -> None:
        self.swarm, self.order = swarm, order
        self.attendance, self._speeds = Attendance(swarm), speeds

    def trusted(self, request: WorkRequest) -> WorkRequest:
        """The request, with its claims limited to what can be trusted."""
        proven = self._speeds.measured(request.worker) is not None
        return request._replace(
            steps_per_second=self._speeds.trusted(request.worker, request.steps_per_second),
            transfer_seconds=lease_terms.trusted_transfer(
                self.swarm, request.transfer_seconds, proven=proven
            ),
            # Without a codec an update consists of weights, which have one base: a version.
            trained_lease=None if self.swarm.codec == "none" else request.trained_lease,
        )

    def plan(
        self, request: WorkRequest, blocks: Sequence[Block], now: float
    ) -> LeasePlan[Block] | None:
        """The lease that a worker gets; None if it must wait. `request` comes from `trusted`, and
        its worker has no open lease."""
        swarm, worker = self.swarm, request.worker
        others = self.attendance.others(worker, now)
        block = assignment.choose_block(
            swarm, blocks, request, now, order=self.order, others=others
        )
        # A worker restricted to some blocks does not count when the last batches are shared.
        speed = request.steps_per_second if request.allowed_blocks is None else None
        self.attendance.record(worker, block.index if block else None, speed, now)
        if block is None:
            return None
        other_speeds = self.attendance.other_speeds(worker)
        run_seconds = lease_terms.run_seconds_left(
            swarm, blocks, now, speed, other_speeds, self.order.steps_left(blocks)
        )
        seconds = lease_terms.training_seconds(
            swarm, block, now, request.transfer_seconds, run_seconds
        )
        available = self.order.available(block)
        steps = lease_terms.lease_steps(swarm, seconds, request.steps_per_second, available)
        continues = assignment.may_continue(swarm, block, request, now)
        start, stride = assignment.place_in_schedule(block, worker, continuing=continues)
        return LeasePlan(block, steps, request.trained_lease if continues else None, start, stride)

    def take_over(
        self,
        request: WorkRequest,
        blocks: Sequence[BlockView[Any]],
        open_leases: Callable[[Collection[int]], Iterable[tuple[Lease, bool]]],
        now: float,
    ) -> Lease | None:
        """The lease to end so that this worker, for which `plan` has nothing, trains its batches.
        Near the end of a run, idle workers thus do not wait for slow ones. `open_leases` reads the
        open leases of some blocks, and whether their workers are newcomers, which have not had an
        update merged."""
        measured, claimed = self._speeds.measured(request.worker), request.steps_per_second
        trainable = assignment.trainable_blocks(blocks, request, self.order)
        if not self.swarm.take_over or any(map(self.order.available, trainable)):
            return None
        if measured is None:
            return None  # a claim alone must not end leases
        speed = min(measured, claimed or measured)
        indices = {
            block.index
            for block in trainable
            if not assignment.own_update_is_pending(block, request.worker, request.trained_lease)
        }
        slow = [
            lease
            for lease, is_newcomer in (open_leases(indices) if indices else ())
            if lease_terms.may_take_over(
                self.swarm,
                lease,
                speed,
                now,
                measured=self._speeds.measured(lease.worker),
                is_newcomer=is_newcomer,
            )
        ]
        return max(slow, key=lambda lease: lease.deadline, default=None)

    def has_work(self, request: WorkRequest, blocks: Sequence[Block], now: float) -> bool:
        """Whether a worker would get a lease now. Other workers influence which one it would get,
        but not whether."""
        choice = assignment.choose_block(self.swarm, blocks, request, now, order=self.order)
        return choice is not None

    def terms(
        self, request: WorkRequest, block: BlockView[Any], steps: int, now: float
    ) -> LeaseTerms:
        """The deadline and expected arrival of a lease. `block`: its state before the lease."""
        speed, transfer = request.steps_per_second, request.transfer_seconds
        return LeaseTerms(
            now + lease_terms.deadline_seconds(self.swarm, steps, speed, transfer),
            lease_terms.expected_arrival(block, now, steps, speed, transfer),
        )
