import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.fault_server import Fault, FaultServer
from tests.support.turned_clock import TurnedClock
from tests.support.worker_side import KEY, RUN, SECRET, WORKER, tls_server

from blocktrain.errors import ProtocolError, RefusedError, UnreachableError, UntrustedError
from blocktrain.protocol import identity
from blocktrain.protocol.messages import (
    Addresses,
    Hello,
    Join,
    LeaseAnswer,
    LeaseRequest,
    Message,
    Token,
    TokenRequest,
    Wait,
)
from blocktrain.protocol.status_messages import Status
from blocktrain.protocol.tls import Authority
from blocktrain.worker.client import Client
from blocktrain.worker.machine import Clock

NewClient = Callable[..., Client]
STATUS = Status(run=RUN, state="running", ce=None, codec="none", blocks=(), workers=(), seconds=1.0)
WAIT = LeaseAnswer(answer=Wait(seconds=1.0, reason="nothing"))


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def authorizations(server: FaultServer, line: str) -> list[str | None]:
    return [seen.headers.get("Authorization") for seen in server.seen if seen.line == line]


# Who answers


def test_it_reads_with_the_invite_and_works_with_its_token(client: Client, server: FaultServer):
    server.on("GET /v1/status", lambda body: STATUS)
    assert client.status() == STATUS
    client.join("a name", "cpu")
    client.status()
    assert authorizations(server, "GET /v1/status") == [f"Invite {SECRET}", "Bearer token1"]


def test_joining_sends_key_name_and_device(client: Client, server: FaultServer):
    said: list[Join] = []

    def join(body: bytes) -> Message:
        said.append(Join.model_validate_json(body))
        raise RefusedError("gone", "this invite has expired")

    server.on("POST /v1/join", join)
    with pytest.raises(RefusedError, match="expired") as caught:
        client.join("two\nlines" + "x" * 100, "")
    assert caught.value.code == "gone"
    assert said[0].invite == SECRET
    assert said[0].public_key == KEY.public
    assert said[0].name.startswith("twolinesxxx") and len(said[0].name) == 80
    assert said[0].device == "unnamed"


def test_another_run_or_another_protocol_is_refused(client: Client, server: FaultServer):
    server.on("GET /v1/hello", lambda body: Hello(run="run00002", protocols=(1,)))
    with pytest.raises(ProtocolError, match="the coordinator serves run run00002"):
        client.join("name", "cpu")
    server.on("GET /v1/hello", lambda body: Hello(run=RUN, protocols=(7, 8)))
    with pytest.raises(ProtocolError, match="speaks protocol 7, 8, this worker protocol 1"):
        client.join("name", "cpu")
    server.on("GET /v1/hello", lambda body: Hello(run=RUN, protocols=(2, 1)))
    assert client.join("name", "cpu").worker == WORKER


# Tokens


def test_a_token_is_renewed_before_it_ends(server: FaultServer, new_client: NewClient):
    turned = TurnedClock(now=5000.0)
    client = new_client(clock=turned.clock)
    asked: list[TokenRequest] = []

    def renew(body: bytes) -> Token:
        asked.append(TokenRequest.model_validate_json(body))
        return Token(token=f"token{len(asked) + 1}", token_seconds=100)

    server.on("POST /v1/token", renew)
    server.on("POST /v1/lease", lambda body: WAIT)
    client.join("name", "cpu")
    for seconds in (0, 79, 2, 50, 40):
        turned.now += seconds
        client.lease(LeaseRequest())
    tokens = authorizations(server, "POST /v1/lease")
    assert tokens == [f"Bearer token{n}" for n in (1, 1, 2, 2, 3)]
    assert asked[0].time == 5081
    text = identity.token_request_text(RUN, WORKER, asked[0].time)
    assert identity.verify(KEY.public, text, asked[0].signature)


def test_a_refused_token_is_renewed_once(client: Client, server: FaultServer):
    server.on("POST /v1/lease", lambda body: WAIT)
    client.join("name", "cpu")
    server.faults = [Fault("POST /v1/lease", status=401)]
    assert client.lease(LeaseRequest()) == WAIT
    assert authorizations(server, "POST /v1/lease") == ["Bearer token1", "Bearer token2"]
    server.faults = [Fault("POST /v1/lease", status=401, times=9)]
    with pytest.raises(RefusedError) as caught:
        client.lease(LeaseRequest())
    assert caught.value.code == "unauthorized"
    assert len(server.lines("POST /v1/lease")) == 4


def test_a_worker_whose_clock_is_wrong_joins_again(client: Client, server: FaultServer):
    def renew(body: bytes) -> Token:
        raise RefusedError("unauthorized", "the clocks differ by more than five minutes")

    server.on("POST /v1/token", renew)
    server.on("POST /v1/lease", lambda body: WAIT)
    client.join("name", "cpu")
    server.faults = [Fault("POST /v1/lease", status=401)]
    assert client.lease(LeaseRequest()) == WAIT
    assert len(server.lines("POST /v1/join")) == 2


# Failures


def test_the_next_address_is_tried_when_one_does_not_answer(
    server: FaultServer, new_client: NewClient
):
    turned = TurnedClock()
    client = new_client(closed_port(), server.address, clock=turned.clock)
    client.hello()
    client.hello()
    assert turned.slept == []


@pytest.mark.parametrize(
    "fault",
    [
        Fault("GET /v1/hello", status=503),
        Fault("GET /v1/hello", status=500, times=3),
        Fault("GET /v1/hello", status=429, headers={"Retry-After": "3"}),
        Fault("GET /v1/hello", cut_after=5),
        Fault("GET /v1/hello", cut_after=0),
    ],
    ids=["503", "500", "429", "cut", "cut at once"],
)
def test_transient_failures_are_retried(server: FaultServer, new_client: NewClient, fault: Fault):
    turned = TurnedClock()
    server.faults = [fault]
    assert new_client(clock=turned.clock).hello().run == RUN
    assert sum(turned.slept) >= 3.0 if fault.headers else sum(turned.slept) < 3.0


def test_an_unreachable_address_is_named(new_client: NewClient):
    address = closed_port()
    client = new_client(address, clock=TurnedClock().clock)
    with pytest.raises(UnreachableError, match=f"no answer from {address}: .*refused"):
        client.hello(client.deadline(0.1))


def test_a_refused_request_is_not_repeated(client: Client, server: FaultServer):
    def ban(body: bytes) -> Message:
        raise RefusedError("forbidden", "this worker was banned from the run")

    server.on("POST /v1/lease", ban)
    client.join("name", "cpu")
    with pytest.raises(RefusedError, match="banned"):
        client.lease(LeaseRequest())
    assert len(server.lines("POST /v1/lease")) == 1


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (b"<html>", "answer to /v1/hello is invalid"),
        (b'{"run":"run00001","protocols":[1],"new":1}', "new: Extra inputs"),
    ],
)
def test_a_response_that_is_not_understood_is_named(
    client: Client, server: FaultServer, body: bytes, match: str
):
    server.faults = [Fault("GET /v1/hello", status=200, body=body)]
    with pytest.raises(ProtocolError, match=match):
        client.hello()
    assert len(server.lines()) == 1


def test_a_redirect_is_not_followed(client: Client, server: FaultServer):
    there = {"Location": f"{server.address}/v1/hello"}
    server.faults = [Fault("GET /v1/hello", status=302, headers=there)]
    with pytest.raises(ProtocolError, match="answered 302"):
        client.hello()


def test_a_silent_connection_is_given_up(server: FaultServer, new_client: NewClient):
    client = new_client()
    server.on("GET /v1/hello", lambda body: time.sleep(2.0))
    began = time.monotonic()
    with pytest.raises(UnreachableError, match="timed out"):
        client.hello(client.deadline(0.0))
    assert time.monotonic() - began < 1.8


def test_silence_is_reported_once_until_a_coordinator_answers(
    server: FaultServer, new_client: NewClient
):
    client, told = new_client(), []
    client.http.on_unreachable = lambda reason, seconds: told.append((reason, seconds))
    client.hello()
    for _ in range(2):
        server.faults = [Fault("GET /v1/hello", cut_after=0, times=4)]
        client.hello(client.deadline(60.0))
    assert len(told) == 2
    assert all("no answer from http" in reason and seconds > 50 for reason, seconds in told)
    server.faults = [Fault("GET /v1/hello", status=429, headers={"Retry-After": "0"})]
    client.hello()
    assert len(told) == 2  # busy is an answer


def test_a_trickling_connection_is_given_up(server: FaultServer, new_client: NewClient):
    """Each byte comes in time, but all of them would take hours."""
    hurried = Clock(lambda: 1000.0 * time.monotonic(), time.time, lambda seconds: None)
    client = new_client(clock=hurried)
    server.faults = [Fault("GET /v1/hello", seconds_between=0.01)]
    with pytest.raises(UnreachableError, match="sends too slowly"):
        client.hello(client.deadline(0.0))
    assert server.bytes_sent < 20


# Trust


def test_the_certificate_is_fetched_once_and_pinned(
    secure: FaultServer, new_client: NewClient, authority: Authority
):
    secure.on("GET /v1/status", lambda body: STATUS)
    client = new_client(secure.address, fingerprint=authority.fingerprint)
    client.hello()
    client.status()
    assert secure.lines()[:3] == ["GET /v1/ca", "GET /v1/hello", "GET /v1/status"]
    assert len(secure.lines("GET /v1/ca")) == 1


def test_a_server_with_another_authority_gets_no_secret(secure: FaultServer, new_client: NewClient):
    client = new_client(secure.address, fingerprint="ab" * 32)
    with pytest.raises(UntrustedError, match="does not match the invite"):
        client.status()
    assert secure.lines() == ["GET /v1/ca"]
    assert "Authorization" not in secure.seen[0].headers


def test_a_server_that_only_shows_the_right_authority_gets_no_secret(
    new_client: NewClient, authority: Authority, tmp_path: Path
):
    other = Authority.create(RUN, time.time())
    servers = tls_server(shown=authority, signer=other, folder=tmp_path)
    impostor = next(servers)
    client = new_client(impostor.address, fingerprint=authority.fingerprint)
    with pytest.raises(UnreachableError, match="certificate verify failed"):
        client.status(client.deadline(0.0))
    assert impostor.lines() == ["GET /v1/ca"]
    servers.close()


def test_an_honest_address_is_found_behind_an_impostor(
    secure: FaultServer, new_client: NewClient, authority: Authority, tmp_path: Path
):
    secure.on("GET /v1/status", lambda body: STATUS)
    other = Authority.create(RUN, time.time())
    servers = tls_server(shown=other, signer=other, folder=tmp_path / "other")
    impostor = next(servers)
    turned = TurnedClock()
    client = new_client(
        impostor.address, secure.address, fingerprint=authority.fingerprint, clock=turned.clock
    )
    assert client.status() == STATUS
    assert impostor.lines() == ["GET /v1/ca"]
    servers.close()


# A coordinator that moves


def naming(server: FaultServer, *addresses: str) -> None:
    server.on("GET /v1/status", lambda body: STATUS)
    server.on("GET /v1/addresses", lambda body: Addresses(addresses=addresses))


def test_a_client_follows_a_coordinator_to_an_address_that_it_has_named(
    secure: FaultServer, new_client: NewClient, authority: Authority, tmp_path: Path
):
    servers = tls_server(authority, authority, tmp_path / "next")
    following = next(servers)
    naming(secure, secure.address, following.address)
    naming(following, following.address)
    client = new_client(secure.address, fingerprint=authority.fingerprint)
    for _ in range(3):
        client.status()
    assert len(secure.lines("GET /v1/addresses")) == 1
    assert following.lines() == []
    secure.faults.append(Fault("GET /v1/status", status=503, times=1000))
    assert client.status() == STATUS
    assert following.lines() == ["GET /v1/status", "GET /v1/addresses"]
    servers.close()


def test_an_address_that_was_named_gets_nothing_without_the_run_s_authority(
    secure: FaultServer, new_client: NewClient, authority: Authority, tmp_path: Path
):
    other = Authority.create(RUN, time.time())
    servers = tls_server(shown=authority, signer=other, folder=tmp_path / "other")
    impostor = next(servers)
    naming(impostor)
    naming(secure, impostor.address)
    client = new_client(secure.address, fingerprint=authority.fingerprint)
    client.status()
    secure.faults.append(Fault("GET /v1/status", status=503, times=1000))
    with pytest.raises(UnreachableError):
        client.status(client.deadline(0.5))
    assert impostor.lines() == []
    servers.close()


def test_an_older_coordinator_names_no_addresses(
    secure: FaultServer, new_client: NewClient, authority: Authority
):
    def unknown(body: bytes) -> Message:
        raise RefusedError("not_found", "there is no such route")

    secure.on("GET /v1/status", lambda body: STATUS)
    secure.on("GET /v1/addresses", unknown)
    client = new_client(secure.address, fingerprint=authority.fingerprint)
    assert [client.status(), client.status()] == [STATUS, STATUS]
    assert len(secure.lines("GET /v1/addresses")) == 1
