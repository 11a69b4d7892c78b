import time
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
from tests.support.fault_server import Fault, FaultServer
from tests.support.waiting import wait_for

from blocktrain.errors import RefusedError
from blocktrain.protocol.messages import (
    Blob,
    Downloaded,
    Lease,
    LeaseProgress,
    LeaseReturn,
    LeaseState,
)
from blocktrain.worker.client import Client
from blocktrain.worker.lease_work import LeaseHeartbeat, LeaseWork

LEASE = Lease(
    lease="lease000", fence=3, block=0, base_version=0, base=Blob(name="0" * 64, size=1),
    first_batch=0, steps=5, schedule_start=0, schedule_stride=1, seconds_left=0.4,
)  # fmt: skip
DOWNLOADS = (Downloaded(block=0, whole=7, differences=0, raw=7),)
OPEN = LeaseState(open=True, seconds_left=10.0)


@pytest.fixture
def told(server: FaultServer) -> list[LeaseProgress]:
    told: list[LeaseProgress] = []

    def progress(body: bytes) -> LeaseState:
        told.append(LeaseProgress.model_validate_json(body))
        return OPEN

    server.on("POST /v1/lease/lease000/progress", progress)
    return told


@pytest.fixture
def heartbeat(client: Client) -> Iterator[LeaseHeartbeat]:
    client.join("name", "cpu")
    heartbeat = LeaseHeartbeat(client, LEASE)
    yield heartbeat
    heartbeat.release()


def test_it_reports_progress_regularly(told: list[LeaseProgress], heartbeat: LeaseHeartbeat):
    heartbeat.progress = LeaseProgress(fence=3, steps_done=2, loss=1.5)
    wait_for(lambda: len(told) >= 2)
    heartbeat.progress = LeaseProgress(fence=3, steps_done=4)
    wait_for(lambda: told[-1].steps_done == 4)
    assert told[0] == LeaseProgress(fence=3, steps_done=2, loss=1.5)
    heartbeat.release()
    time.sleep(0.1)  # for what is under way
    count = len(told)
    time.sleep(0.3)
    assert len(told) == count
    assert heartbeat.lost is None


def test_it_notices_that_the_lease_is_lost(server: FaultServer, heartbeat: LeaseHeartbeat):
    lost = LeaseState(open=False, seconds_left=0.0, reason="this lease is expired")
    server.on("POST /v1/lease/lease000/progress", lambda body: lost)
    wait_for(lambda: heartbeat.lost)
    assert heartbeat.lost == "this lease is expired"


def test_a_refusal_loses_the_lease(server: FaultServer, heartbeat: LeaseHeartbeat):
    def refuse(body: bytes) -> LeaseState:
        raise RefusedError("not_found", "this worker holds no such lease")

    server.on("POST /v1/lease/lease000/progress", refuse)
    wait_for(lambda: heartbeat.lost)
    assert heartbeat.lost == "this worker holds no such lease"


def test_a_coordinator_that_is_away_for_a_while_does_not_end_the_lease(
    server: FaultServer, told: list[LeaseProgress], heartbeat: LeaseHeartbeat
):
    server.faults = [Fault("POST /v1/lease", status=503, times=3)]
    wait_for(lambda: told)
    assert heartbeat.lost is None


@pytest.fixture
def session(client: Client) -> Mock:
    client.join("name", "cpu")
    session = Mock(client=client)
    session.block.versions.take_downloads.return_value = DOWNLOADS
    return session


@pytest.fixture
def work(session: Mock) -> Iterator[LeaseWork]:
    work = LeaseWork(session, LEASE)
    yield work
    work.heartbeat.release()


def test_a_returned_lease_has_a_reason_and_downloads(server: FaultServer, work: LeaseWork):
    returned: list[LeaseReturn] = []

    def take_back(body: bytes) -> LeaseState:
        returned.append(LeaseReturn.model_validate_json(body))
        return LeaseState(open=False, seconds_left=0.0)

    server.on("POST /v1/lease/lease000/return", take_back)
    work.give_back("x" * 600)
    assert returned == [LeaseReturn(fence=3, reason="x" * 500, downloads=DOWNLOADS)]
    assert work.heartbeat.lost is None


def test_returning_a_lost_lease_is_not_an_error(session: Mock, work: LeaseWork):
    """What was downloaded for it is reported later."""
    work.give_back("nobody there to take it")
    session.block.versions.put_back.assert_called_once_with(DOWNLOADS)
