"""The lives of the workers: come, ask, fetch, train, send, wait, leave.

As in worker/agent.py: while an update goes up the next lease is asked for and begun, which may go
on from where the last one ended; one update goes up at a time; speed is what the last lease
measured; a lease that is lost is noticed at the next sign of life; a worker that starts again gets
the lease it had, if that is still open. Its disk keeps the weights it last fetched and made, as
worker/held_block.py does.

Who is told to wait asks again and again. Only the asking that finds work is played: whatever may
give somebody work that had none is looked at when it happens, and who gets some asks within the
time it waits. Of n that wait `seconds` each, the first asks within seconds / (n + 1).
"""

import math
from collections.abc import Sequence

from blocktrain.simulate.agenda import Agenda
from blocktrain.simulate.idle_workers import IdleWorkers
from blocktrain.simulate.population import Chance
from blocktrain.simulate.rounds import VirtualRounds
from blocktrain.simulate.scenario import Scenario
from blocktrain.simulate.tally import Tally
from blocktrain.simulate.virtual_block import VirtualBlock, VirtualLease
from blocktrain.simulate.virtual_coordinator import VirtualCoordinator
from blocktrain.simulate.virtual_worker import Activity, VirtualWorker
from blocktrain.swarm import assignment, lease_terms

CHUNK_BYTES = 8 * 2**20  # in which an update goes up


class VirtualWorkers:
    def __init__(
        self,
        scenario: Scenario,
        agenda: Agenda,
        coordinator: VirtualCoordinator,
        workers: Sequence[VirtualWorker],
        tally: Tally,
    ) -> None:
        self.settings = scenario.simulate
        self._block_bytes, self._update_bytes = scenario.block_bytes, scenario.update_bytes
        self._encodes = scenario.swarm.codec != "none"
        self._needs_all_before = scenario.kind.reads_predecessors
        self._agenda, self._coordinator, self._tally = agenda, coordinator, tally
        self._chance = Chance(self.settings.seed)
        self._workers = {worker.name: worker for worker in workers}
        self._parked = IdleWorkers()
        self._rounds = VirtualRounds(
            agenda,
            coordinator,
            scenario.merge_seconds,
            self.settings.coordinators,
            on_expired=self._expired,
            on_given_up=self._given_up,
            on_version=self._version_came,
        )
        for worker in workers:
            self._agenda.at(worker.joins, self._join, worker)

    # Coming and going

    def _join(self, worker: VirtualWorker) -> None:
        """It may be one of its absences in which its time begins."""
        worker.since = self._agenda.now
        if worker.straggles:
            self._plan_slow_spell(worker)
        if self._chance.happens(self.settings.availability):
            self._come(worker)
        else:
            worker.activity = Activity.GONE
            self._plan_return(worker)

    def _come(self, worker: VirtualWorker) -> None:
        self._tally.present += 1
        self._begin(worker, Activity.WAITING)
        self._ask_soon(worker)
        if worker.lost or self.settings.availability < 1.0:
            stay = self._chance.seconds(self.settings.stay_seconds)
            self._agenda.at(self._agenda.now + stay, self._leave, worker)

    def _leave(self, worker: VirtualWorker) -> None:
        held = (worker.lease, worker.ready, worker.sending)
        self._begin(worker, Activity.GONE)
        self._tally.present -= 1
        self._coordinator.left(worker.name, worker.held_block, self._agenda.now)
        worker.restart()
        self._parked.leave(worker.name)
        if self._chance.happens(self.settings.goodbye_share):
            for lease in held:
                if lease and self._coordinator.give_back(lease, self._agenda.now):
                    self._text_came_back(lease.block, lease.steps)
                    self._rounds.look(lease.block)
        for lease in held:
            if lease and lease.held:
                self._rounds.watch(lease)
        if not worker.lost:
            self._plan_return(worker)

    def _plan_return(self, worker: VirtualWorker) -> None:
        share = self.settings.availability
        absence = self._chance.seconds(self.settings.stay_seconds * (1.0 - share) / share)
        self._agenda.at(self._agenda.now + absence, self._come, worker)

    def _plan_slow_spell(self, worker: VirtualWorker) -> None:
        begins = self._agenda.now + self._chance.seconds(self.settings.straggler_every)
        ends = begins + self._chance.seconds(self.settings.straggler_seconds)
        self._agenda.at(begins, self._change_speed, worker, self.settings.straggler_factor)
        self._agenda.at(ends, self._end_slow_spell, worker)

    def _end_slow_spell(self, worker: VirtualWorker) -> None:
        self._change_speed(worker, 1.0)
        self._plan_slow_spell(worker)

    def _change_speed(self, worker: VirtualWorker, slow: float) -> None:
        lease = worker.lease
        training = lease is not None and worker.activity is Activity.TRAINING
        if training:
            self._begin(worker, Activity.TRAINING)  # again: what is done was done at the old speed
        worker.slow = slow
        if training:
            worker.turn += 1
            self._plan_end_of_training(worker)

    # A lease

    def _ask_soon(self, worker: VirtualWorker) -> None:
        self._agenda.at(self._agenda.now + worker.latency, self._ask, worker, worker.turn)

    def _ask(self, worker: VirtualWorker, turn: int) -> None:
        if worker.turn != turn:
            return
        given = self._coordinator.given
        lease = self._coordinator.claim(
            worker.name,
            worker.held_block,
            worker.measured,
            worker.transfer_seconds,
            self._agenda.now,
            worker.ended,
        )
        if lease is None:
            self._park(worker)
            return
        worker.ended = None
        if self._coordinator.given > given:
            self._rounds.watch(lease)
            self._text_went(lease.block)
            if self._encodes:
                self._end_moved(lease)
        worker.lease, worker.asked = lease, self._agenda.now
        worker.interval = lease_terms.heartbeat_interval(lease.deadline - worker.asked)
        worker.steps_left = float(lease.steps)
        self._fetch(worker, lease)

    def _fetch(self, worker: VirtualWorker, lease: VirtualLease) -> None:
        """The weights to start from, and in a cascade those of the blocks before."""
        needed = {lease.block.index: lease.base_version}
        if self._needs_all_before:
            before = self._coordinator.blocks[: lease.block.index]
            needed |= {block.index: block.version for block in before}
        missing = [weights for weights in needed.items() if not self._has(worker, *weights)]
        if not missing:
            self._train(worker, needed)
            return
        self._begin(worker, Activity.TRANSFERRING)
        shares = [self._missing_share(worker, *weights) for weights in missing]
        size = sum(shares) * self._block_bytes
        worker.fetch_seconds = worker.latency + size / worker.down
        arrival = self._agenda.now + worker.fetch_seconds
        self._agenda.at(arrival, self._fetched, worker, worker.turn, needed, size)

    def _has(self, worker: VirtualWorker, index: int, version: int) -> bool:
        """Whether weights lie on its disk: fetched for its last lease, or made by itself."""
        if worker.fetched.get(index) == version:
            return True
        block = self._coordinator.blocks[index]
        is_own = block.author is not None and block.author is worker.made
        return is_own and version == block.version

    def _missing_share(self, worker: VirtualWorker, index: int, version: int) -> float:
        held = worker.fetched.get(index)
        return 1.0 if held is None else self._coordinator.blocks[index].share_after(held, version)

    def _fetched(
        self, worker: VirtualWorker, turn: int, needed: dict[int, int], size: float
    ) -> None:
        if worker.turn == turn:
            self._tally.bytes_down += size
            self._train(worker, needed)

    def _train(self, worker: VirtualWorker, weights: dict[int, int]) -> None:
        assert worker.lease is not None
        worker.fetched, worker.held_block = weights, worker.lease.block.index
        worker.began = self._agenda.now
        self._begin(worker, Activity.TRAINING)
        self._plan_end_of_training(worker)
        if worker.straggles or worker.measured is None:
            self._plan_sign_of_life(worker, worker.lease)

    def _plan_sign_of_life(self, worker: VirtualWorker, lease: VirtualLease) -> None:
        """Only of those is it played who may go otherwise than their last lease did."""
        signs = self._agenda.now + worker.interval
        self._agenda.at(signs, self._give_sign_of_life, worker, lease)

    def _give_sign_of_life(self, worker: VirtualWorker, lease: VirtualLease) -> None:
        if worker.lease is lease and lease.state == "open":
            self._begin(worker, Activity.TRAINING)  # again: what is done is counted
            done = int(lease.steps - worker.steps_left)
            self._coordinator.progress(lease, done, self._agenda.now)
            if self._encodes:
                self._end_moved(lease)
            self._plan_sign_of_life(worker, lease)

    def _plan_end_of_training(self, worker: VirtualWorker) -> None:
        ends = self._agenda.now + worker.steps_left / worker.steps_per_second
        self._agenda.at(ends, self._trained, worker, worker.turn)

    def _trained(self, worker: VirtualWorker, turn: int) -> None:
        if worker.turn != turn:
            return
        self._begin(worker, Activity.TRANSFERRING)
        worker.steps_left = 0.0  # exactly, whatever the sum of its parts was rounded to
        lease = worker.made = worker.ended = self._put_down(worker)
        if worker.sending:
            worker.ready = lease
        else:
            self._send(worker, lease)

    def _put_down(self, worker: VirtualWorker) -> VirtualLease:
        """End the training of a lease, at its end or before, and remember how fast it went."""
        lease, worker.lease = worker.lease, None
        assert lease is not None
        done = lease.steps - worker.steps_left
        if done >= 1.0:
            worker.measured = done / max(self._agenda.now - worker.began, 1e-6)
        worker.turn += 1
        return lease

    def _expired(self, lease: VirtualLease) -> None:
        """Its worker learns of it with its next sign of life, if it still trains then."""
        worker = self._workers[lease.worker]
        if worker.lease is lease:
            signs = math.ceil((self._agenda.now - worker.asked) / worker.interval)
            learns = worker.asked + signs * worker.interval + worker.latency
            self._agenda.at(learns, self._lose, worker, lease)
        self._given_up([lease])

    def _lose(self, worker: VirtualWorker, lease: VirtualLease) -> None:
        if worker.lease is lease:
            self._begin(worker, Activity.WAITING)
            self._put_down(worker)
            self._ask_soon(worker)

    # An update

    def _send(self, worker: VirtualWorker, lease: VirtualLease) -> None:
        offered = self._agenda.now + worker.latency
        self._agenda.at(offered, self._offered, worker, worker.turn, lease)

    def _offered(self, worker: VirtualWorker, turn: int, lease: VirtualLease) -> None:
        if worker.turn != turn:
            return
        self._coordinator.offer(lease, self._agenda.now)
        worker.sending = lease
        seconds = self._update_bytes / worker.up + worker.latency
        self._agenda.at(self._agenda.now + seconds, self._sent, worker, lease)
        if self._agenda.now + seconds > lease.deadline:
            self._plan_chunk(worker, lease)
        self._ask_soon(worker)

    def _plan_chunk(self, worker: VirtualWorker, lease: VirtualLease) -> None:
        """Only of those updates is it played that would come too late without."""
        self._agenda.at(self._agenda.now + CHUNK_BYTES / worker.up, self._chunk_sent, worker, lease)

    def _chunk_sent(self, worker: VirtualWorker, lease: VirtualLease) -> None:
        if worker.sending is lease and lease.held:
            self._coordinator.chunk_came(lease, self._agenda.now)
            self._plan_chunk(worker, lease)

    def _sent(self, worker: VirtualWorker, lease: VirtualLease) -> None:
        if worker.sending is not lease:
            return
        worker.sending = None
        is_first = worker.send_seconds == 0.0
        worker.send_seconds = self._update_bytes / worker.up + worker.latency
        self._tally.bytes_up += self._update_bytes
        had_text = lease.block.to_hand_out > 0
        refused = self._coordinator.settle(lease, self._agenda.now)
        if worker.ready:
            ready, worker.ready = worker.ready, None
            self._send(worker, ready)
        elif worker.name in self._parked:
            self._begin(worker, Activity.WAITING)
        if refused:
            self._given_up([lease])
        elif had_text:
            self._text_went(lease.block)
        if is_first:  # how slow its line is, is only known now: it may wait no longer
            self._parked.reconsider(worker.name, self._awaits)
            self._ask_again(worker.name)
        self._rounds.look(lease.block)

    # Waiting

    def _park(self, worker: VirtualWorker) -> None:
        self._begin(worker, Activity.TRANSFERRING if worker.sending else Activity.WAITING)
        awaited, seconds = self._awaits(worker.name), assignment.MERGE_WAIT
        if awaited is None:  # else it has something of a block, and the plan need not look for it
            seconds = assignment.wait_seconds(self._coordinator.blocks, worker.name)
        self._parked.park(worker.name, seconds, awaited)

    def _version_came(self, block: VirtualBlock, senders: Sequence[str]) -> None:
        """Those who waited for what their own updates become may go on from it. Where it has no
        more text they have looked for some elsewhere already."""
        if self._coordinator.finished:
            self._agenda.end()
        if block.to_hand_out:
            for name in senders:
                self._wake(name)
        self._parked.look_again(block.index, self._awaits)
        if self._coordinator.lead and block.index + 1 < len(self._coordinator.blocks):
            following = self._coordinator.blocks[block.index + 1]
            self._text_came_back(following, following.to_hand_out)

    def _text_went(self, block: VirtualBlock) -> None:
        """Nobody waits to go on with a block that has no more text, while others have some."""
        if not block.to_hand_out and self._coordinator.has_text:
            for name in self._parked.awaiting(block.index):
                self._ask_again(name)

    def _end_moved(self, lease: VirtualLease) -> None:
        """Those who wait for a version that will now take longer may train on until then."""
        if lease.block.ends_last(lease):
            self._let_train_on(lease.block)

    def _let_train_on(self, block: VirtualBlock) -> None:
        soon = lease_terms.earliest_useful_end(self._coordinator.swarm, self._agenda.now, 0.0)
        if block.busy_until > soon:
            for name in self._parked.awaiting(block.index):
                self._ask_again(name)

    def _given_up(self, leases: Sequence[VirtualLease]) -> None:
        """Updates of a block that will not count: their workers have nothing to wait for, and their
        text may be there again."""
        for lease in leases:
            self._ask_again(lease.worker)
        self._text_came_back(leases[0].block, sum(lease.steps for lease in leases))

    def _text_came_back(self, block: VirtualBlock, steps: int) -> None:
        """There is work again, for those who wait."""
        if not block.to_hand_out:
            return
        if self._encodes and len(block.workers) == 1:  # who is left alone waits for nobody
            self._ask_again(next(iter(block.workers)))
        if self._encodes and block.to_hand_out <= steps:  # there was none
            self._let_train_on(block)
        self._first_asks(self._agenda.now + assignment.IDLE_WAIT)

    def _first_asks(self, until: float) -> None:
        """The first of those who wait and may do what there is will find it. `until`: when all of
        them have asked."""
        if not self._coordinator.has_text:
            return
        waiting, now = len(self._parked), self._agenda.now
        name = self._parked.first(self._coordinator.holds_back, self._awaits, self._finds_work)
        if name is not None:
            worker, seconds = self._workers[name], self._parked.leave(name)
            assert seconds is not None
            asks = now + min(seconds, until - now) / (waiting + 1)
            self._agenda.at(asks, self._find_work, worker, worker.turn, until)

    def _find_work(self, worker: VirtualWorker, turn: int, until: float) -> None:
        """And then the next, while there is some left that it may do."""
        self._ask(worker, turn)
        self._first_asks(until)

    def _ask_again(self, name: str) -> None:
        if name in self._parked and self._finds_work(name):
            self._wake(name)

    def _wake(self, name: str) -> None:
        """One that waits asks when its time has come, which may be at once."""
        seconds = self._parked.leave(name)
        if seconds is not None:
            worker, asks = self._workers[name], self._chance.within(seconds)
            self._agenda.at(self._agenda.now + asks, self._ask, worker, worker.turn)

    def _finds_work(self, name: str) -> bool:
        """Whether one that waits would get something if it asked now."""
        worker = self._workers[name]
        return self._coordinator.has_work(
            name, worker.held_block, worker.transfer_seconds, self._agenda.now, worker.ended
        )

    def _awaits(self, name: str) -> int | None:
        """The block where a worker waits for its own update to become a version, while there is
        text."""
        worker, blocks = self._workers[name], self._coordinator.blocks
        patient = assignment.waits_for_own_update(self._coordinator.swarm, worker.transfer_seconds)
        waits_for = worker.held_block if patient else None
        trained = worker.ended.lease if worker.ended and self._encodes else None
        if waits_for is None or not assignment.own_update_is_pending(
            blocks[waits_for], name, trained
        ):
            return None
        return waits_for

    def _begin(self, worker: VirtualWorker, then: Activity) -> None:
        """Something else: the time and the steps until now are counted."""
        now = self._agenda.now
        if worker.activity is not None:
            self._tally.seconds[worker.activity] += now - worker.since
        if worker.activity is Activity.TRAINING:
            done = (now - worker.since) * worker.steps_per_second
            worker.steps_left = max(0.0, worker.steps_left - done)
            self._tally.steps_trained += done
        worker.activity, worker.since = then, now
