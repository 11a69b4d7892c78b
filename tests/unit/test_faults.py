import subprocess
import sys

import pytest

from blocktrain import faults
from blocktrain.errors import ConfigError
from blocktrain.faults import ACTIONS, POINTS, VARIABLE, Fault, Faults, parse


@pytest.mark.parametrize(
    ("plan", "meant"),
    [
        ("", ()),
        ("claimed@2=kill", (Fault("claimed", 2, "kill"),)),
        (
            " step@1=kill, sent@12=kill ,",
            (Fault("step", 1, "kill"), Fault("sent", 12, "kill")),
        ),
    ],
)
def test_a_plan_is_read(plan: str, meant: tuple[Fault, ...]):
    assert parse(plan) == meant


@pytest.mark.parametrize(
    "plan", ["claimed", "claimed@2", "claimed=kill", "claimed@=kill", "claimed@0=kill",
             "claimed@-1=kill", "claimed@x=kill", "claimed@²=kill", "claimed@2kill"],
)  # fmt: skip
def test_what_is_no_plan_is_an_error(plan: str):
    with pytest.raises(ConfigError, match="is not POINT@NUMBER=ACTION"):
        parse(plan)


def test_an_unknown_point_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ConfigError, match="no point 'lunch'") as failure:
        parse("lunch@1=kill")
    assert all(point in str(failure.value) for point in POINTS)


def test_an_unknown_action_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ConfigError, match="no action 'eat'; there are kill"):
        parse("step@1=eat")


def test_a_fault_happens_at_its_time_and_only_then(monkeypatch: pytest.MonkeyPatch):
    happened: list[str] = []
    monkeypatch.setitem(ACTIONS, "kill", lambda: happened.append("died"))
    plan = Faults((Fault("step", 3, "kill"),))
    seen = []
    for point in ("step", "sent", "step", "sent", "sent", "step", "step"):
        plan.reached(point)
        seen.append(len(happened))
    assert seen == [0, 0, 0, 0, 0, 1, 1]


def test_without_a_plan_nothing_is_counted():
    plan = Faults(())
    plan.reached("step")
    assert not plan._reached
    faults.reached("step")  # this process has no plan


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
    assert "no point 'stepp'" in ended.stderr
    assert not ended.stdout
