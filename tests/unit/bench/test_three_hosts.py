"""What the three-host bench makes of a worker's own words."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench"))


@pytest.fixture(scope="module")
def bench():
    return importlib.import_module("three_hosts")


def told(kind: str, seconds: float, training: float = 0.0, given: int = 0) -> dict[str, Any]:
    times = {"seconds": seconds, "training_seconds": training}
    return {"kind": kind, "contribution": given, **times}


FIRST = [
    told("joined", 1.0),
    told("leased", 2.0),
    told("training", 14.0, 10.0),
    told("trained", 14.5, 10.0),
    told("accepted", 14.8, 10.0, 5),
    told("leased", 15.0, 10.0, 5),
    told("training", 17.0, 11.0, 5),
]
SECOND = [told("joined", 3.0), told("finished", 7.0, 3.0, 2)]


def test_a_log_is_read_from_joining_to_its_last_whole_line(bench):
    early = told("unreachable", 0.5)
    log = "".join(json.dumps(event) + "\n" for event in (early, *FIRST))
    assert bench.told(log) == FIRST
    assert bench.told(log + '{"kind": "accep') == FIRST, "being written, or cut off by a kill"
    assert bench.told(log.splitlines()[0]) == [] == bench.told("")


def test_every_life_of_a_worker_counts(bench):
    assert bench.contributed([FIRST, SECOND]) == 7


def test_waiting_is_all_time_without_a_step_by_what_came_before_it(bench):
    waits = bench.waits(FIRST)
    assert waits == pytest.approx({"joined": 1.0, "leased": 3.0, "training": 1.0})
    assert sum(waits.values()) == pytest.approx(16.0 - 11.0)
    assert bench.waiting_share([FIRST, SECOND]) == pytest.approx(1 - 14.0 / 20.0)
