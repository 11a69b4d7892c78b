import subprocess
import sys

import pytest

from blocktrain import faults
from blocktrain.errors import ConfigError
from blocktrain.faults import POINTS, VARIABLE, Faults, parse


def test_a_plan_is_read():
    assert parse("") == set()
    assert parse("claimed@2=kill") == {("claimed", 2)}
    assert parse(" step@1=kill, sent@12=kill ,") == {("step", 1), ("sent", 12)}


@pytest.mark.parametrize(
    "plan", ["claimed", "claimed@2", "claimed=kill", "claimed@=kill", "claimed@0=kill",
             "claimed@-1=kill", "claimed@x=kill", "claimed@²=kill", "claimed@2kill"],
)  # fmt: skip
def test_what_is_no_plan_is_an_error(plan: str):
    with pytest.raises(ConfigError, match="is malformed; write POINT@NUMBER=kill"):
        parse(plan)


def test_an_unknown_point_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ConfigError, match="unknown point 'lunch'") as failure:
        parse("lunch@1=kill")
    assert all(point in str(failure.value) for point in POINTS)


def test_an_unknown_action_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ConfigError, match="unknown action 'eat'; the only one is kill"):
        parse("step@1=eat")


def test_a_fault_happens_at_its_time_and_only_then(monkeypatch: pytest.MonkeyPatch):
    happened: list[str] = []
    monkeypatch.setattr(faults, "die", lambda: happened.append("died"))
    plan = Faults("step@3=kill")
    seen = []
    for point in ("step", "sent", "step", "sent", "sent", "step", "step"):
        plan.reached(point)
        seen.append(len(happened))
    assert seen == [0, 0, 0, 0, 0, 1, 1]


def run(plan: str) -> "subprocess.CompletedProcess[str]":
    program = (
        "import os\n"
        f"os.environ[{VARIABLE!r}] = {plan!r}\n"
        "from blocktrain import faults\n"
        "for step in range(5): print(step, flush=True); faults.reached('step')\n"
    )
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )


def test_kill_ends_the_process_at_once():
    ended = run("step@2=kill")
    assert ended.returncode in (-9, 137)
    assert ended.stdout.split() == ["0", "1"]


def test_a_plan_that_is_none_is_an_error_at_start():
    ended = run("stepp@2=kill")
    assert ended.returncode == 1
    assert "unknown point 'stepp'" in ended.stderr
    assert not ended.stdout
