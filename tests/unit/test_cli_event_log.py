"""What a coordinator logs of its run."""

import logging
from pathlib import Path
from typing import get_args

import pytest
from tests.support.coordinator import SetClock, join, running

from blocktrain.cli.coordinator_commands import EventLog
from blocktrain.protocol.messages import LeaseReturn
from blocktrain.protocol.status_messages import Event


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
    assert returned == f"worker ann returned a lease of block 0: tired (lease {lease.lease})"
    assert banned == "banned worker ann"
    fields = [(vars(record)["event"], vars(record).get("block")) for record in caplog.records]
    assert fields == [("joined", None), ("merged", 0), ("returned", 0), ("banned", None)]
    assert {vars(r)["worker"] for r in caplog.records if "worker" in vars(r)} == {ann.id}


def test_a_lost_lease_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    clock = SetClock()
    with running(tmp_path, clock) as service, EventLog(service) as events:
        lease = join(service, name="ann").lease(blocks=(0,))
        clock.forward(1000)
        service.round()
        events.log_new()
    assert caplog.messages[1] == (
        "lost a lease of block 0 by worker ann: 10 steps; it missed its deadline"
        f" (lease {lease.lease}); these batches are leased again"
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


def test_each_event_is_logged_once_and_the_last_ones_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "blocktrain")
    with running(tmp_path, SetClock()) as service, EventLog(service):
        ann = join(service, name="ann")
        for block in (0, 1):
            for _ in range(4):
                ann.work(blocks=(block,))
                service.round()
        service.round()
        service.operator.ban("ann")
    messages = [message.split("`")[0] for message in caplog.messages]
    assert sum("finished" in message for message in messages) == 1
    assert sum("version" in message for message in messages) == 8
    assert sum("banned" in message for message in messages) == 1
    assert messages[0] == "worker ann joined"


def test_every_kind_of_event_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, "blocktrain.cli")
    kinds = get_args(Event.model_fields["kind"].annotation)
    with running(tmp_path, SetClock()) as service, EventLog(service) as events:
        with service.run.ledger.write() as tx:
            for kind in kinds:
                tx.events.add(0.0, kind, block=1, detail=f"why {kind}")
        events.log_new()
    assert [vars(record)["event"] for record in caplog.records] == list(kinds)
    assert "excluded worker why excluded" in caplog.messages
