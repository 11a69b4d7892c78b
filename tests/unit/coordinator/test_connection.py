"""Connections to a coordinator, real ones. That large bodies arrive is tested with chunks."""

import socket
import time
from urllib.parse import urlsplit

import pytest
from tests.support.coordinator import SetClock, running, served

from blocktrain.coordinator import process
from blocktrain.worker.http import IDLE_SECONDS

HELLO = b"GET /v1/hello HTTP/1.1\r\nHost: here\r\n\r\n"
SHORT = 0.3


@pytest.fixture
def address(tmp_path):
    with running(tmp_path, SetClock()) as service, served(service) as place:
        yield urlsplit(place).hostname, urlsplit(place).port


def opened(address: tuple[str, int]) -> socket.socket:
    """A connection that was used once."""
    line = socket.create_connection(address, timeout=5.0)
    line.sendall(HELLO)
    assert line.recv(65536).startswith(b"HTTP/1.1 200")
    return line


def was_closed(line: socket.socket, within: float) -> bool:
    line.settimeout(within)
    try:
        return line.recv(1) == b""
    except TimeoutError:
        return False


def test_few_connections_are_kept_for_long(address, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "MANY", 2)
    monkeypatch.setattr(process, "IDLE_SECONDS_OF_MANY", SHORT)
    with opened(address) as first, opened(address) as second:
        assert not was_closed(first, within=3 * SHORT)
        first.settimeout(5.0)
        first.sendall(HELLO)
        assert first.recv(65536).startswith(b"HTTP/1.1 200")
        assert not was_closed(second, within=3 * SHORT)


def test_of_many_those_are_closed_that_nobody_uses(address, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "MANY", 1)
    monkeypatch.setattr(process, "IDLE_SECONDS_OF_MANY", SHORT)
    with opened(address) as first, opened(address) as second:
        began = time.monotonic()
        assert was_closed(second, within=5.0)
        assert time.monotonic() - began > SHORT / 2
        assert not was_closed(first, within=3 * SHORT)  # it was there before they were many


def test_workers_let_go_first():
    assert IDLE_SECONDS < process.IDLE_SECONDS
