"""A run from its first lease to its last version, on a virtual clock."""

from collections.abc import Sequence

from blocktrain.simulate.event_queue import EventQueue
from blocktrain.simulate.lease_lifecycle import Training, Uploads
from blocktrain.simulate.report import Report, Tally, make_report
from blocktrain.simulate.scenario import Scenario
from blocktrain.simulate.virtual_block import VirtualBlock
from blocktrain.simulate.virtual_coordinator import CoordinatorRounds, Learner, VirtualCoordinator
from blocktrain.simulate.virtual_worker import Activity, Chance, VirtualWorker, draw_workers
from blocktrain.simulate.waiting import Waiting


def simulate(scenario: Scenario, coordinator: VirtualCoordinator | None = None) -> Report:
    """`coordinator`: one with a learner, or a subclass that watches what happens."""
    return Simulation(scenario, coordinator or new_coordinator(scenario), EventQueue()).run()


def new_coordinator(scenario: Scenario, learner: Learner | None = None) -> VirtualCoordinator:
    return VirtualCoordinator(
        scenario.swarm, scenario.block_count, scenario.train.steps, learner, scenario.lead
    )


class Simulation:
    """The parts of a simulation, which schedule events for each other."""

    def __init__(
        self, scenario: Scenario, coordinator: VirtualCoordinator, events: EventQueue
    ) -> None:
        settings = scenario.simulate
        self.scenario, self.coordinator, self.events = scenario, coordinator, events
        self.encodes = scenario.swarm.codec != "none"
        self.tally, self.chance = Tally(), Chance(settings.seed)
        self.workers = {worker.name: worker for worker in draw_workers(settings)}
        self.waiting = Waiting(self)
        self.training, self.uploads = Training(self), Uploads(self)
        self.rounds = CoordinatorRounds(
            events,
            coordinator,
            scenario.merge_seconds,
            settings.coordinators,
            on_expired=self.training.lease_expired,
            on_refused=self.waiting.leases_lost,
            on_version=self._version_published,
        )
        presence = Presence(self)
        for worker in self.workers.values():
            events.at(worker.starts_at, presence.start, worker)

    def run(self) -> Report:
        settings = self.scenario.simulate
        self._sample_again()
        self.events.run(settings.longest_seconds)
        self.tally.sample(self.coordinator, self.events.now)
        self.tally.close(self.workers.values(), self.events.now)
        return make_report(
            self.scenario, self.coordinator, self.tally, self.events.now, self.events.handled
        )

    def begin(self, worker: VirtualWorker, activity: Activity) -> None:
        """A worker does something else, or starts its activity anew, from now on."""
        self.tally.count(worker, self.events.now)
        worker.activity, worker.activity_since = activity, self.events.now

    def _sample_again(self) -> None:
        now = self.events.now
        self.tally.sample(self.coordinator, now)
        self.events.at(now + self.scenario.simulate.sample_seconds, self._sample_again)

    def _version_published(self, block: VirtualBlock, senders: Sequence[str]) -> None:
        if self.coordinator.finished:
            self.events.stop()
        self.waiting.version_published(block, senders)


class Presence:
    """Workers come, leave, come back, and are slow for a while."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation, self._settings = simulation, simulation.scenario.simulate
        self._events, self._chance = simulation.events, simulation.chance

    def start(self, worker: VirtualWorker) -> None:
        """A worker's time begins, present or absent."""
        worker.activity_since = self._events.now
        if worker.straggles:
            self._schedule_slow_spell(worker)
        if self._chance.happens(self._settings.availability):
            self._come(worker)
        else:
            worker.activity = Activity.GONE
            self._schedule_return(worker)

    def _come(self, worker: VirtualWorker) -> None:
        self._simulation.tally.present += 1
        self._simulation.begin(worker, Activity.WAITING)
        self._simulation.training.ask_soon(worker)
        if worker.never_returns or self._settings.availability < 1.0:
            stay = self._chance.seconds(self._settings.stay_seconds)
            self._events.at(self._events.now + stay, self._leave, worker)

    def _leave(self, worker: VirtualWorker) -> None:
        """Either gives its leases back or just vanishes."""
        simulation, coordinator = self._simulation, self._simulation.coordinator
        now = self._events.now
        leases = [lease for lease in (worker.lease, worker.queued, worker.sending) if lease]
        simulation.begin(worker, Activity.GONE)
        simulation.tally.present -= 1
        coordinator.left(worker.name, worker.loaded_block, now)
        worker.restart()
        simulation.waiting.idle.remove(worker.name)
        if self._chance.happens(self._settings.goodbye_share):
            for lease in leases:
                if coordinator.give_back(lease, now):
                    simulation.waiting.text_returned(lease.block, lease.steps)
                    simulation.rounds.check(lease.block)
        for lease in leases:
            if lease.held:
                simulation.rounds.watch(lease)
        if not worker.never_returns:
            self._schedule_return(worker)

    def _schedule_return(self, worker: VirtualWorker) -> None:
        availability = self._settings.availability
        mean = self._settings.stay_seconds * (1.0 - availability) / availability
        self._events.at(self._events.now + self._chance.seconds(mean), self._come, worker)

    def _schedule_slow_spell(self, worker: VirtualWorker) -> None:
        begins_at = self._events.now + self._chance.seconds(self._settings.straggler_every)
        ends_at = begins_at + self._chance.seconds(self._settings.straggler_seconds)
        change_speed = self._simulation.training.change_speed
        self._events.at(begins_at, change_speed, worker, self._settings.straggler_factor)
        self._events.at(ends_at, self._end_slow_spell, worker)

    def _end_slow_spell(self, worker: VirtualWorker) -> None:
        self._simulation.training.change_speed(worker, 1.0)
        self._schedule_slow_spell(worker)
