import threading
import time
from collections.abc import Iterator

import pytest
from tests.support.fault_server import Fault, FaultServer

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
from blocktrain.worker.heartbeat import LeaseHeartbeat

LEASE = Lease(
    lease="lease000", fence=3, block=0, base_version=0, base=Blob(name="0" * 64, size=1),
    first_batch=0, steps=5, schedule_start=0, schedule_stride=1, seconds_left=0.4,
)  # fmt: skip
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
def keeper(client: Client) -> Iterator[LeaseHeartbeat]:
    client.join("name", "cpu")
    keeper = LeaseHeartbeat(client, LEASE)
    yield keeper
    keeper.release()


def until(condition: object, seconds: float = 5.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_it_says_now_and_then_how_far_the_work_is(
    told: list[LeaseProgress], keeper: LeaseHeartbeat
):
    keeper.report(2, 1.5)
    until(lambda: len(told) >= 2)
    keeper.report(4, None)
    until(lambda: told[-1].steps_done == 4)
    assert told[0] == LeaseProgress(fence=3, steps_done=2, loss=1.5)
    keeper.release()
    time.sleep(0.1)  # for what is under way
    count = len(told)
    time.sleep(0.3)
    assert len(told) == count
    assert keeper.lost is None


def test_it_learns_that_the_lease_is_lost(server: FaultServer, keeper: LeaseHeartbeat):
    lost = LeaseState(open=False, seconds_left=0.0, reason="this lease is expired")
    server.on("POST /v1/lease/lease000/progress", lambda body: lost)
    until(lambda: keeper.lost)
    assert keeper.lost == "this lease is expired"


def test_a_refusal_loses_the_lease(server: FaultServer, keeper: LeaseHeartbeat):
    def refuse(body: bytes) -> LeaseState:
        raise RefusedError("not_found", "this worker holds no such lease")

    server.on("POST /v1/lease/lease000/progress", refuse)
    until(lambda: keeper.lost)
    assert keeper.lost == "this worker holds no such lease"


def test_a_coordinator_that_is_away_for_a_while_loses_nothing(
    server: FaultServer, told: list[LeaseProgress], keeper: LeaseHeartbeat
):
    server.faults = [Fault("POST /v1/lease", status=503, times=3)]
    until(lambda: told)
    assert keeper.lost is None


def test_giving_back_says_why(server: FaultServer, keeper: LeaseHeartbeat):
    said = threading.Event()

    def take_back(body: bytes) -> LeaseState:
        returned = LeaseReturn.model_validate_json(body)
        assert returned == LeaseReturn(fence=3, reason="x" * 500, downloads=keeper.downloads)
        said.set()
        return LeaseState(open=False, seconds_left=0.0)

    server.on("POST /v1/lease/lease000/return", take_back)
    keeper.downloads = (Downloaded(block=0, whole=7, differences=0, raw=7),)
    assert keeper.give_back("x" * 600)
    assert said.is_set()


def test_giving_back_what_is_lost_is_no_error(keeper: LeaseHeartbeat):
    assert not keeper.give_back("nobody there to take it")
