"""What becomes of a request for work, from the request to the terms of the lease.

The order of these decisions is shared by the coordinator, which carries them out in its ledger,
and the simulation, which carries them out in memory.
"""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple

from blocktrain.config import SwarmConfig
from blocktrain.swarm import assignment, lease_terms
from blocktrain.swarm.assignment import Block, WorkRequest
from blocktrain.swarm.attendance import Attendance, Speeds
from blocktrain.swarm.state import BlockView


class LeasePlan(NamedTuple, Generic[Block]):
    """A lease to be created. The block may have fewer steps in one piece than it asks for."""

    block: Block
    steps: int
    continues: str | None  # the lease from whose end it goes on; None: from the current version
    schedule_start: int
    schedule_stride: int


class LeaseTerms(NamedTuple):
    deadline: float
    expected: float | None  # when its update should arrive; None: nothing is known of its worker


class Dispatcher:
    """Decides on requests for work, and remembers which workers make them."""

    def __init__(self, swarm: SwarmConfig, speeds: Speeds, lead: float = 0.0) -> None:
        self.swarm, self.lead = swarm, lead
        self.attendance, self._speeds = Attendance(swarm), speeds

    def trusted(self, request: WorkRequest) -> WorkRequest:
        """The request with no more of its claims than can be believed."""
        return request._replace(
            steps_per_second=self._speeds.trusted(request.worker, request.steps_per_second),
            transfer_seconds=lease_terms.trusted_transfer(self.swarm, request.transfer_seconds),
            # Without a codec an update consists of weights, which have one base: a version.
            trained_lease=None if self.swarm.codec == "none" else request.trained_lease,
        )

    def plan(
        self, request: WorkRequest, blocks: Sequence[Block], now: float
    ) -> LeasePlan[Block] | None:
        """The lease a worker gets; None if it has to wait. `request`: a trusted one, of a worker
        without an open lease."""
        swarm, worker = self.swarm, request.worker
        others = self.attendance.others(worker, now)
        block = assignment.choose_block(swarm, blocks, request, now, lead=self.lead, others=others)
        # A worker restricted to some blocks does not count when remaining text is shared out.
        speed = request.steps_per_second if request.allowed_blocks is None else None
        self.attendance.record(worker, block.index if block else None, speed, now)
        if block is None:
            return None
        other_speeds = self.attendance.other_speeds(worker)
        run_seconds = lease_terms.run_seconds_left(swarm, blocks, now, speed, other_speeds)
        seconds = lease_terms.training_seconds(
            swarm, block, now, request.transfer_seconds, run_seconds
        )
        steps = lease_terms.lease_steps(swarm, seconds, request.steps_per_second, block.to_hand_out)
        continues = assignment.may_continue(swarm, block, request, now)
        start, stride = assignment.place_in_schedule(block, worker, continuing=continues)
        return LeasePlan(block, steps, request.trained_lease if continues else None, start, stride)

    def has_work(self, request: WorkRequest, blocks: Sequence[Block], now: float) -> bool:
        """Whether a worker would get a lease if it asked now. Other workers decide which one it
        would get, not whether there is one."""
        return assignment.choose_block(self.swarm, blocks, request, now, lead=self.lead) is not None

    def terms(
        self, request: WorkRequest, block: BlockView[Any], steps: int, now: float
    ) -> LeaseTerms:
        """`block`: as it was before this lease."""
        speed, transfer = request.steps_per_second, request.transfer_seconds
        return LeaseTerms(
            now + lease_terms.deadline_seconds(self.swarm, steps, speed, transfer),
            lease_terms.expected_arrival(block, now, steps, speed, transfer),
        )
