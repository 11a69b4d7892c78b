"""Who waits in a simulation waits as a real worker would, who asks every few seconds."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.scenarios import scenario, scenes

from blocktrain.simulate.agenda import Agenda
from blocktrain.simulate.population import draw_workers
from blocktrain.simulate.scenario import Scenario
from blocktrain.simulate.simulation import new_coordinator
from blocktrain.simulate.tally import Tally
from blocktrain.simulate.virtual_coordinator import VirtualCoordinator
from blocktrain.simulate.virtual_worker import VirtualWorker
from blocktrain.simulate.virtual_workers import VirtualWorkers
from blocktrain.swarm.assignment import IDLE_WAIT


class WatchedAgenda(Agenda):
    """Has a look taken at everything before its clock moves on."""

    def __init__(self) -> None:
        self._now = 0.0
        self.look: Callable[[], None] = lambda: None
        super().__init__()

    @property
    def now(self) -> float:
        return self._now

    @now.setter
    def now(self, then: float) -> None:
        if then > self._now:
            self.look()
        self._now = then


class Watch:
    """Since when each of those who wait would get something, if it asked."""

    def __init__(self, scene: Scenario) -> None:
        self.agenda = WatchedAgenda()
        self.coordinator: VirtualCoordinator = new_coordinator(scene)
        self.workers = draw_workers(scene.simulate)
        self.lives = VirtualWorkers(scene, self.agenda, self.coordinator, self.workers, Tally())
        self.since: dict[str, float] = {}
        self.longest = 0.0
        self.agenda.look = self.look

    def look(self) -> None:
        now, attendance = self.agenda.now, self.coordinator.dispatcher.attendance
        everybody = sum(attendance.others("nobody", now).values())
        for worker in self.workers:
            name = worker.name
            is_parked = name in self.lives._parked
            if is_parked:
                assert sum(attendance.others(name, now).values()) == everybody - 1
            if not is_parked or not self.has_work(worker):
                self.since.pop(name, None)
            else:
                self.longest = max(self.longest, now - self.since.setdefault(name, now))

    def has_work(self, worker: VirtualWorker) -> bool:
        return self.coordinator.has_work(
            worker.name,
            worker.held_block,
            worker.transfer_seconds,
            self.agenda.now,
            worker.ended,
        )


kinds = st.sampled_from(
    [
        {"swarm__codec": "none"},
        {"swarm__codec": "int8"},
        {"swarm__codec": "none", "objective__kind": "cascade", "objective__tail": 1},
        {"swarm__codec": "int8", "objective__kind": "cascade", "objective__tail": 1},
    ]
)


@settings(deadline=None, max_examples=100)
@given(scenes, kinds)
def test_nobody_is_left_waiting_while_there_is_something_for_it(
    drawn: dict[str, Any], kind: dict[str, Any]
):
    """Twice as long as it waits: others may take what was there, and other text come back."""
    watch = Watch(scenario(**drawn, **kind))
    watch.agenda.run(drawn["simulate__longest_seconds"])
    assert watch.longest <= 2 * IDLE_WAIT


CROWDED = {
    "model__layers": 6,
    "model__blocks": 3,
    "swarm__lease_seconds": 10.0,
    "swarm__quorum": 4,
    "swarm__grace_seconds": 8.0,
    "simulate__workers": 8,
    "simulate__speed_spread": 1.0,
    "simulate__network_spread": 0.8,
    "simulate__block_megabytes": 4.0,
    "simulate__latency_seconds": 0.1,
    "simulate__straggler_share": 0.3,
    "simulate__straggler_every": 20.0,
    "simulate__straggler_seconds": 20.0,
}


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_who_waits_for_a_version_moves_on_once_others_have_taken_the_rest_of_its_block(codec: str):
    """Few blocks with little text, and many who wait long for each other's updates."""
    for seed in range(150):
        drawn = {"train__steps": 60 + seed % 60, "simulate__seed": seed, "swarm__codec": codec}
        watch = Watch(scenario(**CROWDED, **drawn))
        watch.agenda.run(2000.0)
        assert watch.longest <= IDLE_WAIT + 1e-6
