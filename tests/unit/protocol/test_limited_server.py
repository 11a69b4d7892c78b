"""A real server with limits on connections, and clients that a patient server would suffer from."""

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from tests.support import certificate
from tests.support.web import listening

from blocktrain.errors import ProtocolError
from blocktrain.protocol import limited_connection, limited_server
from blocktrain.protocol.addresses import bound_socket
from blocktrain.protocol.limited_connection import HEAD_BYTES, ChunkedBody
from blocktrain.protocol.limited_server import ConnectionLimits, LimitedServer, connection_of

SECONDS = 5.0
PATIENCE = 0.2
LIMITS = ConnectionLimits(64, 32)
HELLO = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


def trust(request: Request) -> None:
    """A client that sends this header is trusted."""
    if request.headers.get("authorization"):
        connection_of(request.scope).trust()


async def hello(request: Request) -> Response:
    return PlainTextResponse("hello")


async def echo(request: Request) -> Response:
    trust(request)
    return Response(await request.body())


async def refuse(request: Request) -> Response:
    return PlainTextResponse("no", 401)  # does not read the body


async def wait(request: Request) -> Response:
    trust(request)
    await asyncio.sleep(4 * PATIENCE)
    return PlainTextResponse("patience")


async def large(request: Request) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(4096):
            yield bytes(16 * 1024)

    return StreamingResponse(parts())


APP = Starlette(
    routes=[
        Route("/", hello),
        Route("/echo", echo, methods=["POST"]),
        Route("/refuse", refuse, methods=["POST"]),
        Route("/wait", wait, methods=["GET", "POST"]),
        Route("/large", large),
    ]
)


@contextmanager
def serving(
    limits: ConnectionLimits = LIMITS,
    tls: ssl.SSLContext | None = None,
    loop: str = "auto",
) -> Iterator[tuple[str, int]]:
    listener = bound_socket("127.0.0.1", 0)
    server = LimitedServer(APP, limits, tls, loop=loop, timeout_graceful_shutdown=1)
    with listening(server, listener) as place:
        host, port = place.split(":")
        yield host, int(port)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_server, "SWEEP_SECONDS", 0.02)
    monkeypatch.setattr(limited_server, "HANDSHAKE_SECONDS", PATIENCE)
    for name in ("HEAD_SECONDS", "PATIENCE_SECONDS", "IDLE_SECONDS"):
        monkeypatch.setattr(limited_connection, name, PATIENCE)
    monkeypatch.setattr(limited_connection, "PROGRESS_BYTES", 1024)


@pytest.fixture(params=["uvloop", "asyncio"])
def address(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    with serving(loop=request.param) as address:
        yield address


@contextmanager
def connected(address: tuple[str, int]) -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=SECONDS) as connection:
        yield connection


def received(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection, which must be soon."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False
    finally:
        connection.settimeout(SECONDS)


def sends_all(connection: socket.socket, data: bytes, times: int) -> bool:
    try:
        for _ in range(times):
            connection.sendall(data)
    except OSError:
        return False
    return True


def post(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "host: x", *headers, "", ""]).encode()


# What honest clients do


def test_requests_follow_each_other_on_one_connection(address: tuple[str, int]):
    with httpx.Client(base_url=f"http://{address[0]}:{address[1]}") as client:
        assert client.get("/").text == "hello"
        for size in (0, 1, 100_000, 3_000_000):
            body = bytes(number % 251 for number in range(1000)) * (size // 1000)
            assert client.post("/echo", content=body).content == body
            assert client.post("/refuse", content=body).status_code == 401
            chunks = [body[at : at + 70_000] for at in range(0, len(body), 70_000)]
            assert client.post("/echo", content=iter(chunks)).content == body
            assert client.post("/refuse", content=iter(chunks)).status_code == 401
        assert client.get("/").text == "hello"


def test_a_request_in_many_pieces_is_the_same_request(address: tuple[str, int]):
    request = post("/echo", "content-length: 5") + b"abcde" + HELLO
    for step in (1, 7, 40):
        with connected(address) as connection:
            for at in range(0, len(request), step):
                connection.sendall(request[at : at + step])
                time.sleep(0.001)
            told = b""
            while told.count(b"HTTP/1.1 200") < 2 or b"hello" not in told:
                told += connection.recv(65536)
            assert b"abcde" in told


def test_pipelined_requests_are_answered_in_order(address: tuple[str, int]):
    with connected(address) as connection:
        connection.sendall(post("/echo", "content-length: 3") + b"one" + 3 * HELLO)
        told = b""
        while told.count(b"hello") < 3:
            told += connection.recv(65536)
        assert told.index(b"one") < told.index(b"hello")


def test_the_server_may_take_its_time(address: tuple[str, int]):
    answer = httpx.get(f"http://{address[0]}:{address[1]}/wait")
    assert answer.text == "patience"


def test_a_slow_but_steady_body_arrives(address: tuple[str, int]):
    with connected(address) as connection:
        connection.sendall(post("/echo", f"content-length: {8 * 1024}", "connection: close"))
        for _ in range(8):
            time.sleep(0.5 * PATIENCE)
            connection.sendall(bytes(1024))
        assert received(connection).endswith(bytes(8 * 1024))


def test_a_slow_but_steady_reader_gets_everything(address: tuple[str, int]):
    with connected(address) as connection:
        connection.sendall(HELLO.replace(b"/ ", b"/large "))
        count = 0
        while count < 8 * 1024 * 1024:
            count += len(connection.recv(1024 * 1024))
            time.sleep(0.1 * PATIENCE)


# Clients that are too slow


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\r\n\r\n\r\n",
        HELLO[:-2],
        HELLO + b"GET",
        post("/echo", "content-length: 1000") + b"some",
        post("/echo", "transfer-encoding: chunked") + b"3e8\r\nsome",
        post("/refuse", "content-length: 1000") + b"some",
    ],
    ids=range(7),
)
def test_a_client_that_stops_sending_is_disconnected(address: tuple[str, int], sent: bytes):
    with connected(address) as connection:
        connection.sendall(sent)
        received(connection)


@pytest.mark.parametrize("begin", [b"GET / HTTP/1.1\r\na: ", post("/echo", "content-length: 9999")])
def test_a_trickle_does_not_keep_a_connection_open(address: tuple[str, int], begin: bytes):
    with connected(address) as connection:
        connection.sendall(begin)
        began = time.monotonic()
        while is_open(connection):
            assert time.monotonic() - began < SECONDS
            with contextlib.suppress(OSError):
                connection.sendall(b"a")
            time.sleep(0.02)


def test_a_client_that_does_not_read_is_disconnected(address: tuple[str, int]):
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(SECONDS)
        connection.connect(address)
        connection.sendall(HELLO.replace(b"/ ", b"/large "))
        time.sleep(4 * PATIENCE)
        assert len(received(connection)) < 32 * 1024 * 1024


def test_tls_must_be_established_in_time(tmp_path: Path):
    with serving(tls=made_tls(tmp_path)) as address, connected(address) as connection:
        received(connection)


# Clients that send too much


def test_heads_are_limited(address: tuple[str, int]):
    with connected(address) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\na: " + b"x" * HEAD_BYTES)
        assert received(connection).startswith(b"HTTP/1.1 431")
    with connected(address) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 101 + b"\r\n")
        assert received(connection).startswith(b"HTTP/1.1 431")


def test_a_flood_of_headers_costs_little_time(address: tuple[str, int]):
    """Small pieces, which a parser would join again and again."""
    began = time.process_time()
    with connected(address) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\na: ")
        assert not sends_all(connection, bytes(1000), times=150_000)
    assert time.process_time() - began < 2.0  # 27 s without a limit


@pytest.mark.parametrize("then", [b"GET / HTTP/1.1\r\na: ", HELLO])
def test_no_flood_behind_a_request_that_is_being_answered(address: tuple[str, int], then: bytes):
    with connected(address) as connection:
        connection.sendall(HELLO.replace(b"/ ", b"/wait "))
        assert not sends_all(connection, then * 1000, times=10_000)


@pytest.mark.parametrize(
    "body",
    [b"5;" + b"x" * 100, b"zz\r\n", b"0\r\na: b\r\n\r\n", b"-5\r\nabcde\r\n"],
    ids=range(4),
)
def test_chunks_must_be_plain(address: tuple[str, int], body: bytes):
    with connected(address) as connection:
        connection.sendall(post("/echo", "transfer-encoding: chunked") + body)
        assert not received(connection).startswith(b"HTTP/1.1 200")


def test_a_refused_body_does_not_go_on_for_ever(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(limited_connection, "REST_BYTES", 1 << 20)
    with connected(address) as connection:
        connection.sendall(post("/refuse", "content-length: 1000000000"))
        assert not sends_all(connection, bytes(1 << 16), times=10_000)


@given(st.lists(st.binary(max_size=40)), st.integers(1, 50), st.binary(max_size=20))
def test_the_end_of_a_chunked_body_is_found_however_it_arrives(
    parts: list[bytes], step: int, rest: bytes
):
    sent = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts if part) + b"0\r\n\r\n"
    body, taken = ChunkedBody(), 0
    while taken < len(sent) and not body.is_complete:
        taken += body.take((sent + rest)[taken : taken + step])
    assert (taken, body.is_complete) == (len(sent), True)
    assert body.take(rest) == 0


def test_a_line_before_a_chunk_is_short():
    body = ChunkedBody()
    body.take(b"0" * 63)
    with pytest.raises(ProtocolError, match="too long"):
        body.take(b"0")


# Too many connections


def test_strangers_do_not_lock_anybody_out():
    with serving(ConnectionLimits(8, 100)) as address, ExitStack() as stack:
        silent = [stack.enter_context(connected(address)) for _ in range(20)]
        for _ in range(5):
            assert httpx.get(f"http://{address[0]}:{address[1]}/", timeout=SECONDS).text == "hello"
        assert sum(map(is_open, silent)) <= 8


def test_trusted_connections_are_closed_last():
    with serving(ConnectionLimits(8, 100)) as address, ExitStack() as stack:
        trusted = stack.enter_context(connected(address))
        trusted.sendall(post("/echo", "content-length: 2", "authorization: x") + b"hi")
        assert trusted.recv(65536).endswith(b"hi")
        began = time.monotonic()
        while time.monotonic() - began < 0.5 * PATIENCE:
            stack.enter_context(connected(address))
        trusted.sendall(HELLO)
        assert trusted.recv(65536).startswith(b"HTTP/1.1 200")


def test_trusted_connections_that_are_being_answered_stay_and_further_ones_are_refused():
    with serving(ConnectionLimits(4, 100)) as address, ExitStack() as stack:
        busy = [stack.enter_context(connected(address)) for _ in range(4)]
        for connection in busy:
            connection.sendall(post("/wait", "authorization: x"))
        time.sleep(0.5 * PATIENCE)
        for _ in range(4):
            received(stack.enter_context(connected(address)))
        assert all(connection.recv(65536).endswith(b"patience") for connection in busy)


def test_one_address_leaves_room_for_others(caplog: pytest.LogCaptureFixture):
    with (
        caplog.at_level(logging.WARNING),
        serving(ConnectionLimits(64, 4)) as address,
        ExitStack() as stack,
    ):
        crowd = [stack.enter_context(connected(address)) for _ in range(12)]
        time.sleep(0.1)
        assert sum(map(is_open, crowd)) <= 4
    assert "closed to make room" in caplog.text or "refused" in caplog.text


def test_silent_tls_connections_do_not_lock_anybody_out(tmp_path: Path):
    tls = made_tls(tmp_path)
    with serving(ConnectionLimits(100, 1000), tls) as address, ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(connected(address))
        url = f"https://{address[0]}:{address[1]}/"
        assert httpx.get(url, verify=False, timeout=SECONDS).text == "hello"


def test_many_clients_at_once_are_served():
    with serving(ConnectionLimits(256, 256)) as address:
        url, failures = f"http://{address[0]}:{address[1]}", []

        def work() -> None:
            with httpx.Client(base_url=url) as client:
                for number in range(20):
                    body = bytes([number]) * 10_000
                    if client.post("/echo", content=body).content != body:
                        failures.append(number)

        threads = [threading.Thread(target=work) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


def made_tls(folder: Path) -> ssl.SSLContext:
    made = certificate.written(folder, time.time())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.certificate, made.key)
    return context
