"""TLS, idle connections and the request log of a real server."""

import logging
import socket
import ssl
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from tests.support.coordinator import SetClock, running, served

from blocktrain.coordinator.server import own_tls
from blocktrain.coordinator.service import Service
from blocktrain.protocol import limited_connection
from blocktrain.worker import http

HELLO = b"GET /v1/hello HTTP/1.1\r\nHost: here\r\n\r\n"


@pytest.fixture
def tls_address(service: Service) -> Iterator[tuple[str, int]]:
    with served(service, own_tls(service.run, ["127.0.0.1"])) as url:
        parts = urlsplit(url)
        assert parts.hostname and parts.port
        yield parts.hostname, parts.port


def trusting(service: Service) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=service.run.authority.certificate_pem)


def test_the_server_speaks_tls_1_3(service: Service, tls_address: tuple[str, int]):
    with (
        socket.create_connection(tls_address, timeout=5.0) as plain,
        trusting(service).wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        assert connection.version() == "TLSv1.3"
        connection.sendall(HELLO)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")


def test_the_server_refuses_tls_1_2(service: Service, tls_address: tuple[str, int]):
    context = trusting(service)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(tls_address, timeout=5.0) as plain, pytest.raises(ssl.SSLError):
        context.wrap_socket(plain, server_hostname="127.0.0.1")


def test_the_key_does_not_stay_on_the_disk(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    context = own_tls(service.run, ["127.0.0.1"])
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == before
    assert context.minimum_version == ssl.TLSVersion.TLSv1_3


def test_workers_close_idle_connections_before_the_server_does():
    assert http.IDLE_SECONDS < limited_connection.IDLE_SECONDS


def test_each_request_is_logged_at_debug_level(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with (
        caplog.at_level(logging.DEBUG, "blocktrain.coordinator.server"),
        running(tmp_path, SetClock()) as service,
        served(service) as url,
    ):
        request = httpx.get(f"{url}/v1/run").headers["x-request-id"]
    (record,) = (each for each in caplog.records if each.name == "blocktrain.coordinator.server")
    assert record.getMessage().startswith("GET /v1/run: 401 in ")
    assert vars(record)["request"] == request
