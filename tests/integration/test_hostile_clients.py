"""A real coordinator and clients that mean harm: what it keeps, tells and logs."""

import json
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.support.coordinator import (
    INVITE_SECONDS,
    Member,
    SetClock,
    join,
    running,
    served,
)
from tests.support.waiting import wait_for

from blocktrain.coordinator import client_limits
from blocktrain.coordinator.client_limits import Most
from blocktrain.coordinator.service import Service
from blocktrain.protocol.messages import CHUNK_BYTES
from blocktrain.storage.chunks import name_of

SECONDS = 10.0


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def service(tmp_path: Path, clock: SetClock) -> Iterator[Service]:
    with running(tmp_path, clock) as service:
        yield service


@pytest.fixture
def address(service: Service) -> Iterator[str]:
    with served(service) as address:
        yield address


def client(address: str, member: Member) -> httpx.Client:
    headers = {"authorization": f"Bearer {member.joined.token}"}
    return httpx.Client(base_url=address, headers=headers, timeout=SECONDS, trust_env=False)


def request_head(member: Member, path: str, length: int, method: str = "POST") -> bytes:
    token = member.joined.token
    return (
        f"{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\n"
        f"content-length: {length}\r\n\r\n"
    ).encode()


def test_an_aborted_request_is_one_line_of_the_log(
    service: Service, address: str, caplog: pytest.LogCaptureFixture
):
    member = join(service)
    host, port = address.removeprefix("http://").split(":")
    with caplog.at_level(logging.INFO, "blocktrain"):
        with socket.create_connection((host, int(port)), SECONDS) as connection:
            head = request_head(member, "/v1/lease", 100)
            connection.sendall(head.replace(b"\r\n", b"\r\nexpect: 100-continue\r\n", 1))
            assert b"100 Continue" in connection.recv(100)  # the coordinator reads the body
            connection.sendall(b"{")
        wait_for(lambda: caplog.records)
        time.sleep(0.1)
    (record,) = caplog.records
    assert record.getMessage() == "POST /v1/lease: the client closed the connection"
    assert record.exc_info is None


def test_no_response_names_a_file_of_the_coordinator(
    service: Service, address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    member = join(service)
    lease = member.lease(blocks=(0,))
    made = member.make(lease)
    with client(address, member) as http:
        http.post("/v1/updates", content=made.offer.model_dump_json())
        (name,) = made.chunks
        texts = [http.get(f"/v1/{kind}/{'0' * 64}").text for kind in ("chunks", "blobs")]
        texts.append(http.put(f"/v1/chunks/{name}?lease={lease.lease}", content=b"wrong").text)
        corpus = service.run.description.corpus["train"].name
        stored = service.run.chunks.folder / corpus[:2] / corpus[2:]
        stored.write_bytes(b"damaged")
        texts.append(http.get(f"/v1/blobs/{corpus}").text)
        (service.run.chunks.folder / "partial").rmdir()  # as if the disk failed
        answer = http.put(f"/v1/chunks/{name}?lease={lease.lease}", content=made.chunks[name])
        assert (answer.status_code, answer.json()["error"]) == (503, "unavailable")
        texts.append(answer.text)
    assert all(json.loads(text)["reason"] for text in texts)
    assert not any(str(tmp_path) in text for text in texts), texts
    assert str(tmp_path) in caplog.text  # the operator is told


def test_an_offer_is_no_longer_than_the_names_of_a_blocks_chunks(service: Service, address: str):
    """200 offers of 8 MiB would take gigabytes, once they are parsed."""
    member = join(service)
    with client(address, member) as http:
        answer = http.post("/v1/updates", content=b" " * (service.run.offer_bytes + 1))
    assert answer.json()["error"] == "too_large"
    assert service.run.offer_bytes < 256 * 1024


def test_unfinished_chunks_of_a_worker_are_limited_and_others_are_served(
    service: Service, address: str, monkeypatch: pytest.MonkeyPatch
):
    few = Most(total=10 * CHUNK_BYTES, invite=10 * CHUNK_BYTES, client=500, address=0)
    monkeypatch.setattr(client_limits, "CHUNK_BYTES", few)
    secret = service.operator.invite("train", 2, INVITE_SECONDS)
    hoarder, honest = join(service, invite=secret), join(service)
    lease = hoarder.lease(blocks=(0,))
    made = hoarder.make(lease)
    (name,) = made.chunks
    size = len(made.chunks[name])
    assert 250 < size < 500
    host, port = address.removeprefix("http://").split(":")
    path = f"/v1/chunks/{name}?lease={lease.lease}"
    with client(address, hoarder) as http, client(address, honest) as other:
        http.post("/v1/updates", content=made.offer.model_dump_json())
        with socket.create_connection((host, int(port)), SECONDS) as connection:
            connection.sendall(request_head(hoarder, path, size, "PUT") + b"x")
            partial = service.run.chunks.folder / "partial"
            wait_for(lambda: list(partial.iterdir()))
            refused = http.put(path, content=made.chunks[name])
            assert refused.json()["error"] == "slow_down"
            good = honest.lease(blocks=(1,))
            update = honest.make(good)
            other.post("/v1/updates", content=update.offer.model_dump_json())
            chunk = name_of(update.chunks[next(iter(update.chunks))])
            path = f"/v1/chunks/{chunk}?lease={good.lease}"
            assert other.put(path, content=update.chunks[chunk]).status_code == 204
        wait_for(lambda: not list(partial.iterdir()))
