import os

import pytest
from tests.support.turned_clock import TurnedClock

from blocktrain.errors import ConfigError
from blocktrain.worker.machine import Idleness, idleness_of_this_machine


class Machine:
    def __init__(self, processors: int) -> None:
        self.turned = TurnedClock()
        self.load, self.used = 0.0, 0.0
        self.idleness = Idleness(
            lambda: self.load, lambda: self.used, self.turned.clock, processors
        )

    def passes(self, seconds: float, own: float) -> None:
        """Time in which this process uses `own` processors."""
        self.turned.now += seconds
        self.used += own * seconds


@pytest.mark.parametrize(("processors", "limit"), [(1, 1.0), (4, 1.0), (16, 4.0)])
def test_others_may_use_a_quarter(processors: int, limit: float):
    machine = Machine(processors)
    machine.load = limit
    assert not machine.idleness.busy()
    machine.load = limit + 0.01
    assert machine.idleness.busy()


def test_what_this_process_adds_does_not_count():
    machine = Machine(processors=4)
    machine.passes(600.0, own=4.0)
    machine.load = 4.0
    assert not machine.idleness.busy()
    machine.load = 5.1
    assert machine.idleness.busy()


def test_its_own_share_fades_as_the_systems_average_does():
    machine = Machine(processors=4)
    machine.passes(600.0, own=4.0)
    assert not machine.idleness.busy()
    machine.load = 4.0  # it paused, and others took over
    machine.passes(60.0, own=0.0)
    assert machine.idleness.busy()  # 4 - 4/e > 1


def test_this_machine_is_busy_or_not():
    if not hasattr(os, "getloadavg"):
        pytest.skip("this system reports no load average")
    assert idleness_of_this_machine(TurnedClock().clock).busy() in (True, False)


def test_a_system_without_load_average_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "getloadavg", raising=False)
    with pytest.raises(ConfigError, match="reports no load average"):
        idleness_of_this_machine(TurnedClock().clock)
