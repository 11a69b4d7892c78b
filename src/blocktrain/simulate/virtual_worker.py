"""Virtual workers: their properties and state, random draws, and the life of a lease at its worker.

Like the real worker (worker/lease_loop.py), a virtual one claims and trains the next lease while it
sends an update, and may continue from where the last lease ended. It sends one update at a time,
reports the speed of its last lease, and learns of a lost lease from the next heartbeat.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from blocktrain.simulate.scenario import MEGABYTE, Scenario
from blocktrain.simulate.virtual_block import VirtualLease
from blocktrain.swarm.assignment import WorkRequest
from blocktrain.swarm.lease_terms import heartbeat_interval

if TYPE_CHECKING:
    from blocktrain.simulate.simulation import Simulation

Draws = npt.NDArray[np.float64]
DRAWN_AT_ONCE = 4096
CHUNK_BYTES = 8 * 2**20  # size of an update's chunks


class Activity(IntEnum):
    """What a worker spends its time on. An upload during the training of the next lease counts as
    training."""

    TRAINING = 0
    TRANSFERRING = 1
    WAITING = 2
    GONE = 3


@dataclass(slots=True, eq=False)
class VirtualWorker:
    name: str
    speed: float
    down: float  # bytes per second
    up: float
    latency: float
    starts_at: float
    never_returns: bool  # after it has left
    straggles: bool

    slowdown: float = 1.0
    activity: Activity | None = None  # None: it has not joined yet
    activity_since: float = 0.0
    session: int = 0  # events from an earlier session are ignored

    # On its disk
    fetched: dict[int, int] = field(default_factory=dict)  # downloaded versions, by block
    saved_lease: VirtualLease | None = None  # the lease whose result is saved

    # In its memory
    loaded_block: int | None = None
    loaded_lease: VirtualLease | None = None  # the lease whose result is in memory
    measured_speed: float | None = None
    fetch_seconds: float = 0.0  # of the last download
    send_seconds: float = 0.0  # of the last upload
    lease: VirtualLease | None = None  # being downloaded or trained
    claimed_at: float = 0.0
    heartbeat_seconds: float = 0.0  # interval of the lease's heartbeats
    training_since: float = 0.0
    steps_left: float = 0.0
    queued: VirtualLease | None = None  # trained; will be sent after `sending`
    sending: VirtualLease | None = None

    def restart(self) -> None:
        """Lose everything in memory."""
        self.loaded_block = self.loaded_lease = self.measured_speed = None
        self.fetch_seconds = self.send_seconds = 0.0
        self.lease = self.queued = self.sending = None
        self.session += 1

    @property
    def transfer_seconds(self) -> float:
        return self.fetch_seconds + self.send_seconds

    @property
    def steps_per_second(self) -> float:
        return self.speed / self.slowdown

    @property
    def request(self) -> WorkRequest:
        """This worker's request for a lease."""
        return WorkRequest(
            self.name,
            self.loaded_block,
            None,
            self.loaded_lease.lease if self.loaded_lease else None,
            self.measured_speed,
            self.fetch_seconds + self.send_seconds,
        )


def draw_workers(scenario: Scenario) -> list[VirtualWorker]:
    """Draw all workers. Each property has its own random stream, so that changing one setting does
    not change the draws of the others."""
    settings = scenario.simulate

    def normal(stream: int) -> Draws:
        return np.random.default_rng([settings.seed, stream]).normal(size=settings.workers)

    def uniform(stream: int) -> Draws:
        return np.random.default_rng([settings.seed, stream]).random(settings.workers)

    network = settings.network_spread
    properties = (
        scenario.steps_per_second * np.exp(settings.speed_spread * normal(0)),
        settings.down_megabytes * MEGABYTE * np.exp(network * normal(1)),
        settings.up_megabytes * MEGABYTE * np.exp(network * normal(2)),
        settings.latency_seconds * np.exp(network * normal(3)),
        settings.join_seconds * uniform(4),
        uniform(5) < settings.lost_share,
        uniform(6) < settings.straggler_share,
    )
    columns = (values.tolist() for values in properties)
    return [
        VirtualWorker(str(number), *row) for number, row in enumerate(zip(*columns, strict=True))
    ]


class Chance:
    """Random draws during the simulation, generated many at a time."""

    def __init__(self, seed: int) -> None:
        exponential, uniform = (np.random.default_rng([seed, stream]) for stream in (7, 8))
        self._exponential = _one_by_one(lambda: exponential.exponential(size=DRAWN_AT_ONCE))
        self._uniform = _one_by_one(lambda: uniform.random(DRAWN_AT_ONCE))

    def seconds(self, mean: float) -> float:
        """An exponentially distributed time with this mean."""
        return mean * next(self._exponential)

    def within(self, longest: float) -> float:
        return longest * next(self._uniform)

    def happens(self, probability: float) -> bool:
        return next(self._uniform) < probability


def _one_by_one(draw: Callable[[], Draws]) -> Iterator[float]:
    while True:
        yield from draw().tolist()


class LeaseLifecycle:
    def __init__(self, simulation: "Simulation") -> None:
        self._simulation, self._tally = simulation, simulation.tally
        self._events, self._coordinator = simulation.events, simulation.coordinator
        self._block_bytes = simulation.scenario.block_bytes
        self._update_bytes = simulation.scenario.update_bytes
        self._frozen_blocks = simulation.scenario.frozen_blocks

    def ask_soon(self, worker: VirtualWorker) -> None:
        self._events.at(self._events.now + worker.latency, self.ask, worker, worker.session)

    def ask(self, worker: VirtualWorker, session: int) -> None:
        if worker.session != session:
            return
        leases_before = self._coordinator.leases_given
        lease = self._coordinator.claim(worker.request, self._events.now, worker.loaded_lease)
        waiting = self._simulation.waiting
        if lease is None:
            waiting.begin(worker)
            return
        worker.loaded_lease = None
        if self._coordinator.leases_given > leases_before:
            self._simulation.rounds.watch(lease)
            waiting.text_taken(lease.block)
            if self._simulation.encodes:
                waiting.arrival_changed(lease)
        worker.lease, worker.claimed_at = lease, self._events.now
        worker.heartbeat_seconds = heartbeat_interval(lease.deadline - worker.claimed_at)
        worker.steps_left = float(lease.steps)
        self._fetch(worker, lease)

    def _fetch(self, worker: VirtualWorker, lease: VirtualLease) -> None:
        """Download the weights to start from, and those of the frozen blocks it trains with."""
        needed = {lease.block.index: lease.base_version}
        for index in self._frozen_blocks(lease.block.index):
            needed[index] = self._coordinator.blocks[index].version
        missing = [weights for weights in needed.items() if not self._has(worker, *weights)]
        if not missing:
            self._train(worker, needed)
            return
        self._simulation.begin(worker, Activity.TRANSFERRING)
        shares = [self._share_to_fetch(worker, *weights) for weights in missing]
        size = sum(shares) * self._block_bytes
        worker.fetch_seconds = worker.latency + size / worker.down
        fetched_at = self._events.now + worker.fetch_seconds
        self._events.at(fetched_at, self._fetched, worker, worker.session, needed, size)

    def _has(self, worker: VirtualWorker, index: int, version: int) -> bool:
        """Whether the worker has a version: downloaded for its last lease, or its own result."""
        if worker.fetched.get(index) == version:
            return True
        block = self._coordinator.blocks[index]
        is_own = block.made_from is not None and block.made_from is worker.saved_lease
        return is_own and version == block.version

    def _share_to_fetch(self, worker: VirtualWorker, index: int, version: int) -> float:
        cached = worker.fetched.get(index)
        if cached is None:
            return 1.0
        return self._coordinator.blocks[index].share_to_fetch(cached, version)

    def _fetched(
        self, worker: VirtualWorker, session: int, needed: dict[int, int], size: float
    ) -> None:
        if worker.session == session:
            self._tally.bytes_down += size
            self._train(worker, needed)

    def _train(self, worker: VirtualWorker, fetched: dict[int, int]) -> None:
        assert worker.lease is not None
        worker.fetched, worker.loaded_block = fetched, worker.lease.block.index
        worker.training_since = self._events.now
        self._simulation.begin(worker, Activity.TRAINING)
        self._schedule_end(worker)
        if (
            worker.straggles or worker.measured_speed is None
        ):  # the others' expected time does not change
            self._schedule_heartbeat(worker, worker.lease)

    def change_speed(self, worker: VirtualWorker, slowdown: float) -> None:
        is_training = worker.lease is not None and worker.activity is Activity.TRAINING
        if is_training:
            self._simulation.begin(worker, Activity.TRAINING)  # counts steps at the old speed
        worker.slowdown = slowdown
        if is_training:
            worker.session += 1
            self._schedule_end(worker)

    def _schedule_heartbeat(self, worker: VirtualWorker, lease: VirtualLease) -> None:
        heartbeat_at = self._events.now + worker.heartbeat_seconds
        self._events.at(heartbeat_at, self._send_heartbeat, worker, lease)

    def _send_heartbeat(self, worker: VirtualWorker, lease: VirtualLease) -> None:
        if worker.lease is lease and lease.state == "open":
            self._simulation.begin(worker, Activity.TRAINING)  # counts the steps so far
            steps_done = int(lease.steps - worker.steps_left)
            self._coordinator.progress(lease, steps_done, self._events.now)
            if self._simulation.encodes:
                self._simulation.waiting.arrival_changed(lease)
            self._schedule_heartbeat(worker, lease)

    def _schedule_end(self, worker: VirtualWorker) -> None:
        ends_at = self._events.now + worker.steps_left / worker.steps_per_second
        self._events.at(ends_at, self._complete, worker, worker.session)

    def _complete(self, worker: VirtualWorker, session: int) -> None:
        if worker.session != session:
            return
        self._simulation.begin(worker, Activity.TRANSFERRING)
        worker.steps_left = 0.0  # exactly, in spite of rounding
        lease = worker.saved_lease = worker.loaded_lease = self._stop(worker)
        if worker.sending:
            worker.queued = lease
        else:
            self._send(worker, lease)

    def _stop(self, worker: VirtualWorker) -> VirtualLease:
        """Stop training a lease, complete or not, and store its speed."""
        lease, worker.lease = worker.lease, None
        assert lease is not None
        steps_done = lease.steps - worker.steps_left
        if steps_done >= 1.0:
            seconds = max(self._events.now - worker.training_since, 1e-6)
            worker.measured_speed = steps_done / seconds
        worker.session += 1
        return lease

    def lease_expired(self, lease: VirtualLease) -> None:
        worker = self._simulation.workers[lease.worker]
        if worker.lease is lease:
            elapsed = self._events.now - worker.claimed_at
            heartbeats = math.ceil(elapsed / worker.heartbeat_seconds)
            heartbeat_at = worker.claimed_at + heartbeats * worker.heartbeat_seconds
            self._events.at(heartbeat_at + worker.latency, self._abandon, worker, lease)
        self._simulation.waiting.leases_lost([lease])

    def _abandon(self, worker: VirtualWorker, lease: VirtualLease) -> None:
        """Stop a lease after the answer to a heartbeat said that it has expired."""
        if worker.lease is lease:
            self._simulation.begin(worker, Activity.WAITING)
            self._stop(worker)
            self.ask_soon(worker)

    # Sending the update

    def _send(self, worker: VirtualWorker, lease: VirtualLease) -> None:
        offered_at = self._events.now + worker.latency
        self._events.at(offered_at, self._offer, worker, worker.session, lease)

    def _offer(self, worker: VirtualWorker, session: int, lease: VirtualLease) -> None:
        if worker.session != session:
            return
        self._coordinator.offer(lease, self._events.now)
        worker.sending = lease
        arrives_at = self._events.now + (self._update_bytes / worker.up + worker.latency)
        self._events.at(arrives_at, self._arrive, worker, lease)
        if arrives_at > lease.deadline:  # otherwise its chunks need not extend the deadline
            self._schedule_chunk(worker, lease)
        self.ask_soon(worker)

    def _schedule_chunk(self, worker: VirtualWorker, lease: VirtualLease) -> None:
        chunk_at = self._events.now + CHUNK_BYTES / worker.up
        self._events.at(chunk_at, self._send_chunk, worker, lease)

    def _send_chunk(self, worker: VirtualWorker, lease: VirtualLease) -> None:
        if worker.sending is lease and lease.is_active:
            self._coordinator.chunk_came(lease, self._events.now)
            self._schedule_chunk(worker, lease)

    def _arrive(self, worker: VirtualWorker, lease: VirtualLease) -> None:
        if worker.sending is not lease:
            return
        worker.sending = None
        is_first = worker.send_seconds == 0.0
        worker.send_seconds = self._update_bytes / worker.up + worker.latency
        self._tally.bytes_up += self._update_bytes
        had_text = lease.block.to_hand_out > 0
        refusal = self._coordinator.settle(lease, self._events.now)
        waiting = self._simulation.waiting
        if worker.queued:
            queued, worker.queued = worker.queued, None
            self._send(worker, queued)
        elif worker.name in waiting.idle:
            self._simulation.begin(worker, Activity.WAITING)
        if refusal:
            waiting.leases_lost([lease])
        elif had_text:
            waiting.text_taken(lease.block)
        if is_first:
            waiting.measured(worker)
        self._simulation.rounds.check(lease.block)
