"""What a coordinator logs of its run."""

import logging
from pathlib import Path

import pytest
from tests.support.coordinator import SetClock, join, running

from blocktrain.cli.coordinator_command import EventLog
from blocktrain.protocol.messages import LeaseReturn


@pytest.fixture(autouse=True)
def _at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "blocktrain.cli")


def test_joins_versions_returns_and_bans_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with running(tmp_path, SetClock()) as service, EventLog(service) as events:
        ann = join(service, name="ann")
        ann.work(blocks=(0,))
        service.round()
        lease = ann.lease(blocks=(0,))
        given_back = LeaseReturn(fence=lease.fence, reason="tired")
        service.leases.give_back(ann.caller, lease.lease, given_back)
        service.operator.ban("ann")
        events.log_new()
    joined, merged, returned, banned = caplog.messages
    assert joined == "worker ann joined"
    assert merged.startswith("block 0: version 1: ")
    assert returned == "worker ann returned a lease of block 0: tired"
    assert banned == "banned worker ann"
    fields = [(vars(record)["event"], vars(record).get("block")) for record in caplog.records]
    assert fields == [("joined", None), ("merged", 0), ("returned", 0), ("banned", None)]
    assert {vars(r)["worker"] for r in caplog.records if "worker" in vars(r)} == {ann.id}


def test_a_lost_lease_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    clock = SetClock()
    with running(tmp_path, clock) as service, EventLog(service) as events:
        join(service, name="ann").lease(blocks=(0,))
        clock.forward(1000)
        service.round()
        events.log_new()
    assert caplog.messages[1] == (
        "lost a lease of block 0: no heartbeat from worker ann; its 10 steps will be leased again"
    )


def test_every_lease_and_upload_is_logged_at_debug_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with running(tmp_path, SetClock()) as service, EventLog(service) as events:
        caplog.set_level(logging.DEBUG, "blocktrain.cli")
        join(service, name="ann").work(blocks=(0,))
        events.log_new()
    levels = [(record.levelname, record.message.split()[0]) for record in caplog.records]
    assert levels == [("INFO", "worker"), ("DEBUG", "leased"), ("DEBUG", "received")]
