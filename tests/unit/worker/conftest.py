"""A server that fails by plan, and clients with short timeouts to talk to it."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.fault_server import FaultServer
from tests.support.worker_side import (
    KEY,
    RUN,
    SECRET,
    SHORT_TIMEOUT,
    Eager,
    answer_joins,
    tls_server,
)

from blocktrain.protocol.invite import Invite
from blocktrain.protocol.tls import Authority
from blocktrain.worker.client import Client
from blocktrain.worker.timing import Clock


@pytest.fixture
def server() -> Iterator[FaultServer]:
    server = FaultServer()
    answer_joins(server)
    yield server
    server.close()


@pytest.fixture
def authority() -> Authority:
    return Authority.create(RUN, time.time())


@pytest.fixture
def secure(authority: Authority, tmp_path: Path) -> Iterator[FaultServer]:
    yield from tls_server(authority, authority, tmp_path)


@pytest.fixture
def new_client(server: FaultServer) -> Iterator[Callable[..., Client]]:
    made: list[Client] = []

    def make(*addresses: str, clock: Clock | None = None, fingerprint: str | None = None) -> Client:
        invite = Invite(addresses or (server.address,), SECRET, fingerprint, RUN)
        made.append(Client(invite, KEY, timeout=SHORT_TIMEOUT, clock=clock, random=Eager()))
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture
def client(new_client: Callable[..., Client]) -> Client:
    return new_client()
