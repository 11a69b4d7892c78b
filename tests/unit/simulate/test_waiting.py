"""A simulated worker waits no longer than a real one, which asks every few seconds."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.scenarios import scenario, scenes

from blocktrain.simulate.scenario import Scenario
from blocktrain.simulate.simulation import EventQueue, Simulation, new_coordinator
from blocktrain.swarm.assignment import IDLE_WAIT


class WatchedEvents(EventQueue):
    """Calls `look` whenever the clock is about to move on."""

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
    """The longest time that a waiting worker would have got a lease if it had asked."""

    def __init__(self, scene: Scenario) -> None:
        self.events, self.coordinator = WatchedEvents(), new_coordinator(scene)
        self.simulation = Simulation(scene, self.coordinator, self.events)
        self.since: dict[str, float] = {}
        self.longest = 0.0
        self.events.look = self.look

    def look(self) -> None:
        now, attendance = self.events.now, self.coordinator.dispatcher.attendance
        present = sum(attendance.others("no worker", now).values())
        for name, worker in self.simulation.workers.items():
            is_idle = name in self.simulation.waiting.idle
            if is_idle:
                assert sum(attendance.others(name, now).values()) == present - 1
            if is_idle and self.coordinator.has_work(worker.request, now):
                self.longest = max(self.longest, now - self.since.setdefault(name, now))
            else:
                self.since.pop(name, None)


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
def test_no_worker_waits_while_there_is_work_for_it(drawn: dict[str, Any], kind: dict[str, Any]):
    """For two waiting times at most: others may take the work, and other text be given back."""
    watch = Watch(scenario(**drawn, **kind))
    watch.events.run(drawn["simulate__longest_seconds"])
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
def test_a_worker_that_waits_for_a_version_moves_on_once_its_block_has_no_text_left(codec: str):
    """Few blocks with little text, and many workers that wait long for each other's updates."""
    for seed in range(150):
        drawn = {"train__steps": 60 + seed % 60, "simulate__seed": seed, "swarm__codec": codec}
        watch = Watch(scenario(**CROWDED, **drawn))
        watch.events.run(2000.0)
        assert watch.longest <= IDLE_WAIT + 1e-6
