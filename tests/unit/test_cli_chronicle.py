"""What the coordinator's own terminal shows of a run."""

from pathlib import Path

import pytest
from tests.support.coordinator import SetClock, join, running

from blocktrain.cli.display import Chronicle
from blocktrain.protocol.messages import LeaseReturn


def test_joins_versions_returns_and_bans_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with running(tmp_path, SetClock()) as service:
        chronicle = Chronicle(service)
        with chronicle:
            ann = join(service, name="ann")
            ann.work(blocks=(0,))
            service.round()
            lease = ann.lease(blocks=(0,))
            told = LeaseReturn(fence=lease.fence, reason="tired")
            service.leases.give_back(ann.caller, lease.lease, told)
            service.operator.ban("ann")
            chronicle._look()
        lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"joined  ann ({ann.id})"
    assert lines[1].startswith("block 0 version 1: ")
    assert lines[2] == f"back    block 0 from ann ({ann.id}): tired"
    assert lines[3] == f"banned  ann ({ann.id})"
    assert len(lines) == 4


def test_a_lease_that_ran_out_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    clock = SetClock()
    with running(tmp_path, clock) as service:
        chronicle = Chronicle(service)
        with chronicle:
            ann = join(service, name="ann")
            ann.lease(blocks=(0,))
            clock.forward(1000)
            service.round()
            chronicle._look()
        lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(f"lost    ann ({ann.id}) was not heard of; its 10 steps of block 0")


def test_what_strangers_say_does_not_command_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with running(tmp_path, SetClock()) as service:
        chronicle = Chronicle(service)
        with chronicle:
            ann = join(service)
            lease = ann.lease()
            reason = "\x1b[2J\x9b31m\nblock 0 version 9\u202e"
            told = LeaseReturn(fence=lease.fence, reason=reason)
            service.leases.give_back(ann.caller, lease.lease, told)
            chronicle._look()
        lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[1].isprintable()
    assert lines[1].endswith(" [2J 31m block 0 version 9 ")
