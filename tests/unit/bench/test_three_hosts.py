"""What the three-host bench makes of a worker's own words."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "bench"))


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


def test_a_table_tells_what_is_lost_in_every_lease_and_saved_on_every_line(bench):
    run = {
        "waits": {"a": [{"joined": 1.0, "leased": 3.0}, {"joined": 2.0}], "b": [{"leased": 2.0}]},
        "leases": {"a": 3, "b": 1},
    }
    assert bench.waited_per_lease(run) == 2.0
    moved = {"up": 10, "up_raw": 40, "down_whole": 40, "down_differences": 10, "down_raw": 75}
    assert bench.times_smaller(moved) == "4.0 / 1.5"


def test_runs_with_other_settings_are_not_written_over(bench, tmp_path):
    config = bench.load_config(ROOT / "configs" / "tiny.toml", [])
    asked = ["--out", str(tmp_path), "--config", "tiny"]
    args = bench.parsed(asked)
    kept = tmp_path / "three-hosts.json"
    report = bench.opened(kept, config, args)
    assert report["runs"] == []
    kept.write_text(json.dumps({**report, "home": 1.0}))
    assert bench.opened(kept, config, args)["home"] == 1.0
    with pytest.raises(SystemExit, match="another mbit"):
        bench.opened(kept, config, bench.parsed([*asked, "--mbit", "10"]))
