"""A server that fails by plan, and clients with short timeouts to talk to it."""

from collections.abc import Callable, Iterator

import pytest
from tests.support.fault_server import FaultServer
from tests.support.worker_side import KEY, RUN, SECRET, SHORT_TIMEOUT, Eager, joined

from blocktrain.protocol.invite import Invite
from blocktrain.protocol.messages import Hello, Token
from blocktrain.worker.client import Client
from blocktrain.worker.timing import Clock


@pytest.fixture
def server() -> Iterator[FaultServer]:
    server = FaultServer()
    server.on("GET /v1/hello", lambda body: Hello(run=RUN, protocols=(1,)))
    server.on("POST /v1/join", lambda body: joined())
    server.on("POST /v1/token", lambda body: Token(token="token2", token_seconds=100))
    yield server
    server.close()


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
