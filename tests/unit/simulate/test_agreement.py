"""A simulation and a real coordinator give the same answers and have the same state.

Every request of the simulated workers is also sent to a real service, at the same virtual time.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.coordinator import (
    Made,
    Member,
    SetClock,
    commit,
    join,
    missing_chunks,
    put_chunk,
    running,
    tensors_of,
)
from tests.support.scenarios import scenario

from blocktrain.codec import update_codec
from blocktrain.codec.frames import encode
from blocktrain.config import SwarmConfig
from blocktrain.coordinator.service import Service
from blocktrain.protocol.messages import Lease, LeaseProgress, LeaseReturn, Wait
from blocktrain.simulate.scenario import Scenario
from blocktrain.simulate.simulation import simulate
from blocktrain.simulate.virtual_block import VirtualBlock, VirtualLease
from blocktrain.simulate.virtual_coordinator import VirtualCoordinator
from blocktrain.swarm import assignment, merging_rules
from blocktrain.swarm.assignment import WorkRequest
from blocktrain.swarm.order import Order
from blocktrain.swarm.state import BlockState

RUN = {
    "train__steps": 300,
    "swarm__quorum": 3,
    "swarm__take_over": False,  # not simulated
    "swarm__grace_seconds": 4.0,
    "swarm__most_stale": 1,
    "swarm__lease_seconds": 10.0,
    "swarm__shortest_deadline": 8.0,
    "swarm__deadline_factor": 1.0,
    "swarm__heartbeat_timeout": 30.0,
}
# A merge takes no time, because the real one takes none by its clock; each block has a coordinator
# of its own, so that none waits for the merge of another.
WORKERS = {
    "simulate__workers": 8,
    "simulate__coordinators": 2,
    "simulate__merge_megabytes": 1e12,
    "simulate__block_megabytes": 5.0,
    "simulate__speed_spread": 0.8,
    "simulate__network_spread": 0.5,
    "simulate__latency_seconds": 0.1,
    "simulate__join_seconds": 20.0,
    "simulate__longest_seconds": 20_000.0,
}
LIVES: dict[str, dict[str, Any]] = {
    "always there": {},
    "coming and going": {"simulate__availability": 0.6, "simulate__stay_seconds": 20.0},
    "vanishing": {
        "simulate__availability": 0.7,
        "simulate__stay_seconds": 20.0,
        "simulate__goodbye_share": 0.0,
    },
    "straggling": {
        "simulate__straggler_share": 0.5,
        "simulate__straggler_every": 20.0,
        "simulate__straggler_seconds": 30.0,
    },
    "on slow lines": {"simulate__up_megabytes": 0.5, "simulate__network_spread": 0.8},
}


def make_update(member: Member, lease: Lease, codec: str) -> Made:
    """An update that adds 1 to every number."""
    coder = update_codec(SwarmConfig(codec=codec))
    if coder is None:
        return member.make(lease)
    count = sum(array.size for array in tensors_of(member.service.run, lease.base).values())
    data = b"".join(encode(np.ones(count, np.float32), coder))
    return member.signer.update_of_bytes(lease, data, codec=codec)


class Mirrored(VirtualCoordinator):
    """Sends every request to a real service as well, and compares."""

    def __init__(self, scene: Scenario, service: Service, clock: SetClock) -> None:
        super().__init__(scene.swarm, scene.block_count, scene.train.steps, order=Order.of(scene))
        self.service, self.clock = service, clock
        self.members: dict[str, Member] = {}
        self.real: dict[str, tuple[Member, Lease]] = {}
        self.made: dict[str, Made] = {}
        self.waiting: dict[str, float | None] = {}  # the speed of each
        self.present: set[str] = set()

    def claim(
        self, request: WorkRequest, now: float, trained: VirtualLease | None = None
    ) -> VirtualLease | None:
        self.move_clock(now)
        lease, worker = super().claim(request, now, trained), request.worker
        if worker not in self.members:
            self.members[worker] = join(self.service)
        self.present.add(worker)
        member = self.members[worker]
        answer = member.ask(
            held_block=request.loaded_block,
            steps_per_second=request.steps_per_second,
            transfer_seconds=request.transfer_seconds,
            trained=self.real[trained.lease][1].lease if trained else None,
        ).answer
        self.waiting.pop(worker, None)
        if lease is None:
            self.waiting[worker] = self.dispatcher.trusted(request).steps_per_second
            assert isinstance(answer, Wait)
            assert answer.seconds == assignment.wait_seconds(self.blocks, worker)
            return None
        assert isinstance(answer, Lease)
        answered = (answer.block, answer.base_version, answer.first_batch, answer.steps)
        own = (lease.block.index, lease.base_version, lease.first_batch, lease.steps)
        assert answered == own
        assert answer.schedule_start == lease.schedule_start
        assert answer.schedule_stride == lease.schedule_stride
        assert answer.seconds_left == lease.deadline - now
        assert answer.continues == (
            self.real[lease.continues][1].lease if lease.continues else None
        )
        self.real[lease.lease] = (member, answer)
        self.compare()
        return lease

    def left(self, worker: str, loaded_block: int | None, now: float) -> None:
        self.move_clock(now)
        super().left(worker, loaded_block, now)
        self.waiting.pop(worker, None)
        self.keep_reporting()
        self.present.discard(worker)

    def progress(self, lease: VirtualLease, steps_done: int, now: float) -> None:
        self.move_clock(now)
        super().progress(lease, steps_done, now)
        member, given = self.real[lease.lease]
        progress = LeaseProgress(fence=given.fence, steps_done=steps_done)
        state = self.service.leases.progress(member.caller, given.lease, progress)
        assert state.open
        assert state.seconds_left == lease.deadline - now
        self.compare()

    def chunk_came(self, lease: VirtualLease, now: float) -> None:
        self.move_clock(now)
        super().chunk_came(lease, now)
        member, given = self.real[lease.lease]
        self.service.leases.record_chunk(member.caller, given.lease)
        self.compare()

    def offer(self, lease: VirtualLease, now: float) -> None:
        self.move_clock(now)
        super().offer(lease, now)
        member, given = self.real[lease.lease]
        self.made[lease.lease] = make_update(member, given, self.swarm.codec)
        self.service.updates.record_offer(member.caller, self.made[lease.lease].offer)
        self.compare()

    def settle(self, lease: VirtualLease, now: float) -> merging_rules.UpdateRefusal | None:
        self.move_clock(now)
        refusal = super().settle(lease, now)
        (member, given), made = self.real[lease.lease], self.made[lease.lease]
        for name in missing_chunks(self.service, member.caller, made.offer):
            put_chunk(self.service, member.caller, given.lease, name, made.chunks[name])
        receipt = commit(self.service, member.caller, given.lease)
        assert (receipt.state == "refused") == (refusal is not None)
        assert ("handed out again" in receipt.reason) == (
            refusal is merging_rules.UpdateRefusal.HANDED_OUT_AGAIN
        )
        self.compare()
        return refusal

    def give_back(self, lease: VirtualLease, now: float) -> bool:
        self.move_clock(now)
        was_held = super().give_back(lease, now)
        member, given = self.real[lease.lease]
        message = LeaseReturn(fence=given.fence, reason="leaving")
        self.service.leases.give_back(member.caller, given.lease, message)
        self.compare()
        return was_held

    def expire(self, lease: VirtualLease, now: float) -> bool:
        self.move_clock(now)
        was_held = super().expire(lease, now)
        self.service.leases.expire()
        self.compare()
        return was_held

    def begin_merge(self, block: VirtualBlock, now: float) -> Sequence[VirtualLease]:
        self.move_clock(now)
        merged = super().begin_merge(block, now)
        if not merged:
            assert self.service.merger.merge_due() == 0
            self.compare()
        return merged

    def publish(self, block: VirtualBlock, merged: Sequence[VirtualLease], now: float) -> None:
        self.move_clock(now)
        before = sum(each.version for each in self.blocks)
        super().publish(block, merged, now)
        assert self.service.merger.merge_due() == sum(b.version for b in self.blocks) - before
        self.compare()

    def states(self) -> list[BlockState]:
        with self.service.run.ledger.read() as tx:
            return tx.blocks.states()

    def move_clock(self, now: float) -> None:
        """Everything that was due or overdue before has been dealt with."""
        assert now >= self.clock.now
        if now > self.clock.now:
            with self.service.run.ledger.read() as tx:
                assert not tx.leases.overdue(self.clock.now)
            for state, block in zip(self.states(), self.blocks, strict=True):
                due = merging_rules.due_updates(state, self.swarm, self.clock.now)
                assert not due or block.merging
        self.keep_asking(now)
        self.clock.now = now

    def keep_asking(self, until: float) -> None:
        """Waiting workers ask a real coordinator every few seconds, so it knows they are present.
        All other present workers send heartbeats, and the coordinator expires leases."""
        asks, attendance = self.clock.now, self.service.leases.dispatcher.attendance
        while asks < until:
            self.keep_reporting()
            self.service.leases.expire()
            asks = min(asks + self.swarm.lease_seconds, until)
            self.clock.now = asks
            for worker, steps_per_second in self.waiting.items():
                attendance.record(self.members[worker].id, None, steps_per_second, asks)

    def keep_reporting(self) -> None:
        with self.service.run.ledger.write() as tx:
            for worker in self.present:
                tx.members.touch_worker(self.members[worker].id, self.clock.now)

    def compare(self) -> None:
        names = {member.id: name for name, member in self.members.items()}
        for state, block in zip(self.states(), self.blocks, strict=True):
            assert (state.version, state.merged_batches) == (block.version, block.merged_batches)
            assert (state.next_batch, state.to_hand_out) == (block.next_batch, block.to_hand_out)
            assert (state.under_way, state.open_leases) == (block.under_way, block.open_leases)
            assert state.busy_until == block.busy_until
            assert {names[worker] for worker in state.workers} == set(block.workers)
            assert {names[worker] for worker in state.finishing} == set(block.finishing)
            pending = sorted((u.committed, u.base_version, u.steps) for u in state.pending)
            assert pending == sorted((u.committed, u.base_version, u.steps) for u in block.pending)
            for worker, name in names.items():
                mirrored = sorted(block.unmerged(name).values())
                assert sorted(state.unmerged(worker).values()) == mirrored


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.replace(" ", "-"))
def test_the_real_coordinator_gives_the_same_answers(tmp_path: Path, life: str, codec: str):
    clock, settings = SetClock(now=0.0), {**RUN, "swarm__codec": codec}
    with running(tmp_path, clock, **settings) as service:
        scene = scenario(**{**settings, **WORKERS, **LIVES[life]})
        mirrored = Mirrored(scene, service, clock)
        report = simulate(scene, mirrored)
        assert report.finished
        assert report.merged_batches == (300, 300)
        assert (
            report.leases_missed and report.refused and report.staleness[1]
        )  # all of these happened
        with service.run.ledger.read() as tx:
            rows = [tx.blocks.get(index) for index in range(scene.block_count)]
        assert sum(row.fence for row in rows) == report.leases_given
        assert sum(row.leases_met for row in rows) == report.leases_met
        assert sum(row.leases_missed for row in rows) == report.leases_missed


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_both_take_the_leases_of_silent_workers_back_before_their_deadlines(
    tmp_path: Path, codec: str
):
    late = {"swarm__shortest_deadline": 100.0, "swarm__deadline_factor": 4.0}
    settings = {**RUN, **late, "swarm__codec": codec}
    clock = SetClock(now=0.0)
    with running(tmp_path, clock, **settings) as service:
        scene = scenario(**{**settings, **WORKERS, **LIVES["vanishing"]})
        report = simulate(scene, Mirrored(scene, service, clock))
        assert report.finished
        assert report.leases_missed


CASCADE = {"objective__kind": "cascade", "objective__tail": 1}


@pytest.mark.parametrize(
    ("codec", "order"),
    [
        ("none", CASCADE),
        ("int8", CASCADE),
        ("none", {**CASCADE, "objective__order": "relay"}),
        ("int8", {"objective__kind": "turns", "objective__turn_steps": 70}),
    ],
    ids=["lead", "lead with a codec", "relay", "turns with a codec"],
)
def test_both_open_blocks_in_the_same_order(tmp_path: Path, codec: str, order: dict[str, object]):
    settings = {**RUN, "swarm__codec": codec, **order}
    clock = SetClock(now=0.0)
    with running(tmp_path, clock, **settings) as service:
        scene = scenario(**{**settings, **WORKERS, **LIVES["coming and going"]})
        report = simulate(scene, Mirrored(scene, service, clock))
        assert Order.of(scene).waits
        assert report.finished
        assert report.merged_batches == (300, 300)
