"""Requests over real connections, directly and through a real proxy."""

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from tests.support.fault_server import FaultServer
from tests.support.http_proxy import HttpProxy
from tests.support.worker_side import SECRET
from tests.unit.worker.test_transfer import PENDING, new_transfer, offered, takes_updates

from blocktrain.errors import RefusedError, UnreachableError
from blocktrain.protocol.messages import CHUNK_BYTES
from blocktrain.protocol.tls import Authority
from blocktrain.worker.client import Client
from blocktrain.worker.http import HttpRequest, HttpResponse, JsonRequest

NewClient = Callable[..., Client]
LARGE = np.random.default_rng(1).bytes(CHUNK_BYTES + 1000)
LONG = 8_000_000


class Put(HttpRequest[bytes]):
    method = "PUT"

    def headers(self) -> dict[str, str]:
        return {"Content-Length": str(LONG)}

    def body(self) -> Iterator[bytes]:
        return (bytes(1000) for _ in range(LONG // 1000))

    def read(self, response: HttpResponse) -> bytes:
        return response.whole()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpProxy]:
    """Named by the environment, as on a machine behind one."""
    proxy = HttpProxy()
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, proxy.address)
    for name in ("NO_PROXY", "no_proxy", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    yield proxy
    proxy.close()


@pytest.fixture
def raw() -> Iterator[Callable[..., str]]:
    """A server that says one of the given bytes on each of its connections; its address."""
    listeners = []

    def serve(*answers: bytes) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def run() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                connection.recv(65536)
                connection.sendall(answer)
                threading.Timer(2.0, connection.close).start()

        threading.Thread(target=run, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield serve
    for listener in listeners:
        listener.close()


@pytest.mark.parametrize("way", ["direct", "proxy"])
def test_blobs_travel_both_ways_over_pinned_tls(
    secure: FaultServer,
    authority: Authority,
    new_client: NewClient,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    way: str,
):
    proxy = request.getfixturevalue("proxy") if way == "proxy" else None
    client = new_client(secure.address, fingerprint=authority.fingerprint)
    client.join("name", "cpu")
    transfer, deadline = new_transfer(client, tmp_path), client.deadline(20.0)
    assert transfer.read(secure.hold(LARGE), deadline) == LARGE
    takes_updates(secure)
    offer = offered(transfer, LARGE[::-1])
    assert transfer.send(offer, deadline) == PENDING
    assert set(offer.claim.recipe.chunks) <= set(secure.chunks)
    place = secure.address.removeprefix("https://")
    assert proxy is None or set(proxy.lines) == {f"CONNECT {place}"}


def test_a_proxy_sees_nothing_of_a_run_but_its_address(
    secure: FaultServer, authority: Authority, new_client: NewClient, proxy: HttpProxy
):
    new_client(secure.address, fingerprint=authority.fingerprint).join("name", "cpu")
    assert proxy.lines
    assert all(line.startswith("CONNECT ") for line in proxy.lines)


def test_without_tls_a_proxy_forwards_requests(
    server: FaultServer, new_client: NewClient, proxy: HttpProxy, tmp_path: Path
):
    transfer = new_transfer(new_client(), tmp_path)
    assert transfer.read(server.hold(LARGE), transfer.client.deadline(20.0)) == LARGE
    assert proxy.lines[0].startswith(f"GET {server.address}/v1/blobs/")
    assert len(proxy.lines) == 3


def test_a_proxy_that_does_not_answer_is_an_unreachable_coordinator(
    new_client: NewClient, proxy: HttpProxy
):
    proxy.close()
    client = new_client("https://127.0.0.1:9", fingerprint="ab" * 32)
    with pytest.raises(UnreachableError, match="no answer from https"):
        client.hello(client.deadline(0.0))


def test_a_connection_is_used_again(client: Client, server: FaultServer):
    for _ in range(3):
        client.hello()
    assert server.connections == 1


def test_a_connection_that_the_server_has_closed_is_not_used_again(
    new_client: NewClient, raw: Callable[..., str]
):
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
    client = new_client(raw(answer, answer))
    for _ in range(2):
        assert client.http.send(JsonRequest("GET"), "/", client.deadline(1.0)) == b"ok"


def test_a_response_that_is_cut_short_is_an_error(new_client: NewClient, raw: Callable[..., str]):
    client = new_client(raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok"))
    with pytest.raises(UnreachableError):
        client.http.send(JsonRequest("GET"), "/", client.deadline(0.0))


@pytest.mark.parametrize("answer", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Le"])
def test_what_is_not_a_response_is_an_error_of_the_connection(
    new_client: NewClient, raw: Callable[..., str], answer: bytes
):
    client = new_client(raw(answer))
    with pytest.raises(UnreachableError, match="no answer from"):
        client.http.send(JsonRequest("GET"), "/", client.deadline(0.0))


def test_a_header_may_have_other_characters_than_ascii(
    new_client: NewClient, raw: Callable[..., str]
):
    client = new_client(raw(b"HTTP/1.1 200 OK\r\nVia: caf\xe9\r\nContent-Length: 2\r\n\r\nok"))
    assert client.http.send(JsonRequest("GET"), "/", client.deadline(0.0)) == b"ok"


def test_a_refusal_before_the_end_of_an_upload_is_read(
    new_client: NewClient, raw: Callable[..., str]
):
    refusal = b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno"
    client = new_client(raw(refusal))
    with pytest.raises((RefusedError, UnreachableError)) as caught:
        client.http.send(Put(), "/", client.deadline(0.0))
    if isinstance(caught.value, RefusedError):  # else TCP has reset the connection before
        assert caught.value.code == "too_large"


def test_no_url_is_logged(client: Client, server: FaultServer, caplog: pytest.LogCaptureFixture):
    """A presigned URL is a secret."""
    caplog.set_level(logging.INFO)
    client.hello()
    assert server.address not in caplog.text
    assert SECRET not in caplog.text
    assert httpx.__name__ not in {record.name for record in caplog.records}
