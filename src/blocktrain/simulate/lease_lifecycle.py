"""A lease at its worker: claim, fetch, train with heartbeats, send the update.

As the real worker (worker/agent.py): the next lease is claimed and trained while an update is being
sent, and may continue from where the last one ended; updates are sent one at a time; a worker's
speed is that of its last lease; it learns of a lost lease from the next heartbeat.
"""

import math
from typing import TYPE_CHECKING

from blocktrain.simulate.virtual_block import VirtualLease
from blocktrain.simulate.virtual_worker import Activity, VirtualWorker
from blocktrain.swarm.lease_terms import heartbeat_interval

if TYPE_CHECKING:
    from blocktrain.simulate.simulation import Simulation

CHUNK_BYTES = 8 * 2**20  # in which an update is sent


class Training:
    """From the claim of a lease to the end of its training."""

    def __init__(self, simulation: "Simulation") -> None:
        self._simulation, self._tally = simulation, simulation.tally
        self._events, self._coordinator = simulation.events, simulation.coordinator
        self._block_bytes = simulation.scenario.block_bytes
        self._fetches_predecessors = simulation.scenario.kind.reads_predecessors

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
        """Download the weights to start from and, in a cascade, those of the blocks before."""
        needed = {lease.block.index: lease.base_version}
        if self._fetches_predecessors:
            predecessors = self._coordinator.blocks[: lease.block.index]
            needed |= {block.index: block.version for block in predecessors}
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
        """Whether a version is on the worker's disk: fetched for its last lease, or made by it."""
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
        if worker.straggles or worker.measured_speed is None:  # others keep their expected time
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
            self._simulation.uploads.send(worker, lease)

    def _stop(self, worker: VirtualWorker) -> VirtualLease:
        """Stop training a lease, completed or not, and remember its speed."""
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
        """A heartbeat was answered that the lease has expired."""
        if worker.lease is lease:
            self._simulation.begin(worker, Activity.WAITING)
            self._stop(worker)
            self.ask_soon(worker)


class Uploads:
    """Sending a trained lease's update."""

    def __init__(self, simulation: "Simulation") -> None:
        self._simulation, self._tally = simulation, simulation.tally
        self._events, self._coordinator = simulation.events, simulation.coordinator
        self._update_bytes = simulation.scenario.update_bytes

    def send(self, worker: VirtualWorker, lease: VirtualLease) -> None:
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
        self._simulation.training.ask_soon(worker)

    def _schedule_chunk(self, worker: VirtualWorker, lease: VirtualLease) -> None:
        chunk_at = self._events.now + CHUNK_BYTES / worker.up
        self._events.at(chunk_at, self._send_chunk, worker, lease)

    def _send_chunk(self, worker: VirtualWorker, lease: VirtualLease) -> None:
        if worker.sending is lease and lease.held:
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
            self.send(worker, queued)
        elif worker.name in waiting.idle:
            self._simulation.begin(worker, Activity.WAITING)
        if refusal:
            waiting.leases_lost([lease])
        elif had_text:
            waiting.text_taken(lease.block)
        if is_first:
            waiting.measured(worker)
        self._simulation.rounds.check(lease.block)
