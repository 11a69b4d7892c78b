"""A run from its first lease to its last version, on a virtual clock."""

import gc
import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from blocktrain.simulate.report import Report, Tally, make_report
from blocktrain.simulate.scenario import Scenario
from blocktrain.simulate.virtual_block import VirtualBlock, VirtualLease
from blocktrain.simulate.virtual_coordinator import Learner, VirtualCoordinator
from blocktrain.simulate.virtual_worker import (
    Activity,
    Chance,
    LeaseLifecycle,
    VirtualWorker,
    draw_workers,
)
from blocktrain.simulate.waiting import Waiting
from blocktrain.swarm import merging_rules
from blocktrain.swarm.order import Order

PAGE_SECONDS = 1.0

Event = tuple[float, int, Callable[..., None], tuple[Any, ...]]


class EventQueue:
    """The virtual clock: runs scheduled events in the order of time, without sleeping.

    Events are kept in pages of one second. Only the current page is sorted, which is several
    times as fast as one heap of all future events."""

    def __init__(self) -> None:
        self.now = 0.0
        self.handled = 0
        self._scheduled = 0  # keeps events of equal time in the order in which they were scheduled
        self._page: list[Event] = []  # a heap
        self._page_number = -1
        self._later_pages: dict[int, list[Event]] = {}
        self._later_numbers: list[int] = []  # a heap
        self._stopped = False

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        self._scheduled += 1
        event = (time, self._scheduled, action, arguments)
        number = int(time / PAGE_SECONDS)
        if number <= self._page_number:
            heapq.heappush(self._page, event)
        elif number in self._later_pages:
            self._later_pages[number].append(event)
        else:
            self._later_pages[number] = [event]
            heapq.heappush(self._later_numbers, number)

    def stop(self) -> None:
        """Discard all later events."""
        self._stopped = True

    def run(self, until: float) -> None:
        """Handle events until the clock reaches `until` or the queue is stopped."""
        with _without_garbage_collection():
            while not self._stopped and self._open_page() and self._page[0][0] <= until:
                self._handle_page(until)
        if not self._stopped:
            self.now = until

    def _handle_page(self, until: float) -> None:
        page = self._page
        while page and page[0][0] <= until and not self._stopped:
            self.now, _, action, arguments = heapq.heappop(page)
            self.handled += 1
            action(*arguments)

    def _open_page(self) -> bool:
        """Open the page of the next event. Returns False if no events are left."""
        if not self._page and self._later_numbers:
            self._page_number = heapq.heappop(self._later_numbers)
            self._page = self._later_pages.pop(self._page_number)
            heapq.heapify(self._page)
        return bool(self._page)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: a simulation creates no reference cycles, and a search of its
    millions of events takes a fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def simulate(scenario: Scenario, coordinator: VirtualCoordinator | None = None) -> Report:
    """Run a scenario. `coordinator`: one with a learner, or a subclass that records requests."""
    return Simulation(scenario, coordinator or new_coordinator(scenario), EventQueue()).run()


def new_coordinator(scenario: Scenario, learner: Learner | None = None) -> VirtualCoordinator:
    return VirtualCoordinator(
        scenario.swarm, scenario.block_count, scenario.train.steps, learner, Order.of(scenario)
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
        self.workers = {worker.name: worker for worker in draw_workers(scenario)}
        self.waiting = Waiting(self)
        self.lifecycle = LeaseLifecycle(self)
        self.rounds = Rounds(self)
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
        """Count a worker's activity until now, and begin a new one or the same again."""
        self.tally.count(worker, self.events.now)
        worker.activity, worker.activity_since = activity, self.events.now

    def _sample_again(self) -> None:
        now = self.events.now
        self.tally.sample(self.coordinator, now)
        self.events.at(now + self.scenario.simulate.sample_seconds, self._sample_again)


class Rounds:
    """The coordinator's periodic work: expiring leases and merging updates. The real coordinator
    checks four times a second; this one schedules an event for when there is something to do."""

    def __init__(self, simulation: "Simulation") -> None:
        self._simulation = simulation
        self._events, self._coordinator = simulation.events, simulation.coordinator
        self._free_mergers = simulation.scenario.simulate.coordinators
        self._due: deque[VirtualBlock] = deque()
        self._checks: dict[int, float] = {}  # by block, when it will be checked again

    def watch(self, lease: VirtualLease) -> None:
        """Schedule the check whether a lease has expired. A lease that was extended is checked
        again later."""
        expires_at = self._coordinator.expires_at(lease)
        self._events.at(math.nextafter(expires_at, math.inf), self._expire, lease)

    def check(self, block: VirtualBlock) -> None:
        """After a block's change: merge its updates, or schedule the merge for when it is due."""
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
        """Whether a merge is scheduled that no further update can make earlier, since there is a
        quorum. Saves a decision per update."""
        quorum = self._coordinator.swarm.quorum
        if block.index not in self._checks or len(block.workers) < quorum:
            return False
        return block.open_leases > 0 and len(block.fresh_since) > quorum

    def _check_scheduled(self, block: VirtualBlock, scheduled: float) -> None:
        if self._checks.get(block.index) == scheduled:
            del self._checks[block.index]
            self.check(block)

    def _expire(self, lease: VirtualLease) -> None:
        if not lease.is_active:
            return
        if self._coordinator.expire(lease, self._events.now):
            self._simulation.lifecycle.lease_expired(lease)
            self.check(lease.block)
        else:  # it was extended, or its worker returned
            self.watch(lease)

    def _merge_next(self) -> None:
        while self._free_mergers and self._due:
            block = self._due.popleft()
            before = block.pending
            merged = self._coordinator.begin_merge(block, self._events.now)
            if len(block.pending) < len(before):
                still_pending = set(block.pending)
                refused = [lease for lease in before if lease not in still_pending]
                self._simulation.waiting.leases_lost(refused)
            if merged:
                self._free_mergers -= 1
                seconds = self._simulation.scenario.merge_seconds(len(merged))
                published_at = self._events.now + seconds
                self._events.at(published_at, self._publish, block, merged)

    def _publish(self, block: VirtualBlock, merged: Sequence[VirtualLease]) -> None:
        senders = tuple(block.senders)
        self._coordinator.publish(block, merged, self._events.now)
        self._free_mergers += 1
        if self._coordinator.finished:
            self._events.stop()
        self._simulation.waiting.version_published(block, senders)
        self.check(block)
        self._merge_next()


class Presence:
    """Makes workers come, leave, return, and be slow for a while."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation, self._settings = simulation, simulation.scenario.simulate
        self._events, self._chance = simulation.events, simulation.chance

    def start(self, worker: VirtualWorker) -> None:
        """Start a worker, present or absent."""
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
        self._simulation.lifecycle.ask_soon(worker)
        if worker.never_returns or self._settings.availability < 1.0:
            stay = self._chance.seconds(self._settings.stay_seconds)
            self._events.at(self._events.now + stay, self._leave, worker)

    def _leave(self, worker: VirtualWorker) -> None:
        """Let a worker leave: it returns its leases or just disappears."""
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
            if lease.is_active:
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
        change_speed = self._simulation.lifecycle.change_speed
        self._events.at(begins_at, change_speed, worker, self._settings.straggler_factor)
        self._events.at(ends_at, self._end_slow_spell, worker)

    def _end_slow_spell(self, worker: VirtualWorker) -> None:
        self._simulation.lifecycle.change_speed(worker, 1.0)
        self._schedule_slow_spell(worker)
