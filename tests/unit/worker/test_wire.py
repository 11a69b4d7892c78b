"""Connections of an httpx client, against a real server. What passes through a transfer is tested
with the transfer."""

import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import httpx
import pytest
from tests.support.fault_server import Fault, FaultServer

from blocktrain.protocol.messages import Hello
from blocktrain.worker.wire import PIECE_BYTES, Wire

IDLE = 0.5
SOON = 0.5  # a timeout of what is expected to time out

Talk = Callable[[socket.socket], None]
Raw = Callable[..., str]


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    context = ssl.create_default_context()
    with httpx.Client(transport=Wire(context, IDLE), timeout=httpx.Timeout(2.0)) as client:
        yield client


@pytest.fixture
def raw() -> Iterator[Raw]:
    """A server that takes as many connections as there are talks, one after the other, and hangs up
    on all of them after the last talk; its address."""
    listeners = []

    def serve(*talks: Talk) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def talk_to_each() -> None:
            with ExitStack() as held:
                for talk in talks:
                    connection, _ = listener.accept()
                    talk(held.enter_context(connection))

        threading.Thread(target=talk_to_each, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield serve
    for listener in listeners:
        listener.close()


def says(*answers: bytes) -> Talk:
    """Each to what it read of a request."""

    def talk(connection: socket.socket) -> None:
        for answer in answers:
            connection.recv(65536)
            connection.sendall(answer)

    return talk


def stalls(connection: socket.socket) -> None:
    connection.recv(1)  # until the other side hangs up


def resets(connection: socket.socket) -> None:
    time.sleep(0.1)  # while the other side, which has what came, waits for more
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_a_connection_is_used_again(http: httpx.Client, server: FaultServer):
    for _ in range(3):
        answer = http.get(server.address + "/v1/hello")
        assert Hello.model_validate_json(answer.content).protocols == (1,)
    assert server.connections == 1


@pytest.mark.parametrize(
    "empty",
    [b"HTTP/1.1 204 No Content\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"],
    ids=["204", "200"],
)
def test_a_connection_is_used_again_after_an_answer_without_a_body(
    http: httpx.Client, raw: Raw, empty: bytes
):
    address = raw(says(empty, empty, empty))  # to one connection
    with http.stream("GET", address):
        pass  # there is nothing to be read
    for _ in range(2):
        assert http.get(address).content == b""


def test_a_connection_that_was_idle_for_long_is_not(http: httpx.Client, server: FaultServer):
    http.get(server.address + "/v1/hello")
    time.sleep(IDLE + 0.1)
    assert http.get(server.address + "/v1/hello").status_code == 200
    assert server.connections == 2


def test_nor_is_one_whose_answer_nobody_read(http: httpx.Client, server: FaultServer):
    blob = server.hold(bytes(3 * PIECE_BYTES))
    name = next(name for name in server.chunks if name != blob.name)
    with http.stream("GET", f"{server.address}/v1/chunks/{name}") as answer:
        next(answer.iter_raw())
    assert http.get(server.address + "/v1/hello").status_code == 200
    assert server.connections == 2


def test_nor_is_one_that_did_not_take_all_of_a_request(http: httpx.Client, raw: Raw):
    """It stays open and quiet, but whoever reads on there reads the rest of the first request."""
    refusal = b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno"
    address = raw(says(refusal), says(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nyes"))
    answer = http.put(address, content=bytes(20_000_000), timeout=SOON)
    assert (answer.status_code, answer.content) == (413, b"no")
    assert http.get(address).content == b"yes"


def test_many_bytes_arrive_in_large_pieces(http: httpx.Client, server: FaultServer):
    data = bytes(range(256)) * (20 * PIECE_BYTES // 256)
    blob = server.hold(data)
    name = next(name for name in server.chunks if name != blob.name)
    with http.stream("GET", f"{server.address}/v1/chunks/{name}") as answer:
        pieces = list(answer.iter_raw())
    assert b"".join(pieces) == data
    assert len(pieces) < 20 * PIECE_BYTES / 16384


def received(http: httpx.Client, address: str, room: memoryview) -> list[bytes]:
    with http.stream("GET", address, extensions={"room": room}) as answer:
        return list(answer.iter_raw())


def test_an_answer_is_received_where_there_is_room_for_it(http: httpx.Client, server: FaultServer):
    data = bytes(range(256)) * (PIECE_BYTES // 100)
    blob = server.hold(data)
    name = next(name for name in server.chunks if name != blob.name)
    room = memoryview(bytearray(len(data)))
    pieces = received(http, f"{server.address}/v1/chunks/{name}", room)
    assert room == data
    for piece in pieces:
        memoryview(piece)[:] = bytes(len(piece))  # type: ignore[index]  # parts of the room
    assert room == bytes(len(data))


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nabcdef",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nabcd\r\n2\r\nef\r\n0\r\n\r\n",
    ],
    ids=["of a length", "in parts"],
)
@pytest.mark.parametrize("size", [0, 1, 4, 6, 9])
def test_an_answer_of_another_size_than_its_room_arrives_as_a_whole(
    http: httpx.Client, raw: Raw, answer: bytes, size: int
):
    room = memoryview(bytearray(size))
    address = raw(says(answer, answer))  # to one connection
    for _ in range(2):
        assert b"".join(received(http, address, room)) == b"abcdef"
        assert room[:6] == b"abcdef"[:size]


def test_a_room_is_let_go_of_when_the_answer_was_read(http: httpx.Client, raw: Raw):
    data = bytearray(6)
    with memoryview(data) as room:
        received(http, raw(says(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nabcdef")), room)
    data.extend(b"g")  # which it refuses while anybody looks at it
    assert data == b"abcdefg"


def test_few_bytes_do_not_wait_for_more(http: httpx.Client, server: FaultServer):
    server.faults = [Fault("GET /v1/hello", seconds_between=0.05)]
    with http.stream("GET", server.address + "/v1/hello") as answer:
        began = time.monotonic()
        first = next(answer.iter_raw())
        assert time.monotonic() - began < 1.0
        assert 0 < len(first) < int(answer.headers["content-length"])


def test_an_answer_that_is_cut_short_is_no_answer(http: httpx.Client, server: FaultServer):
    server.faults = [Fault("GET /v1/hello", cut_after=3)]
    with pytest.raises(httpx.TransportError):
        http.get(server.address + "/v1/hello")


@pytest.mark.parametrize(
    ("breaks", "error"), [(stalls, httpx.ReadTimeout), (resets, httpx.ReadError)]
)
def test_what_came_before_the_line_broke_is_handed_on_first(
    http: httpx.Client, raw: Raw, breaks: Talk, error: type[httpx.TransportError]
):
    came = bytes(range(256)) * 40
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"

    def talk(connection: socket.socket) -> None:
        says(head + came)(connection)
        breaks(connection)

    with http.stream("GET", raw(talk), timeout=SOON) as answer:
        pieces, read = answer.iter_raw(), b""
        while len(read) < len(came):
            read += next(pieces)
        with pytest.raises(error):
            next(pieces)
    assert read == came


def test_a_header_may_have_more_than_ascii(http: httpx.Client, raw: Raw):
    address = raw(says(b"HTTP/1.1 200 OK\r\nVia: caf\xe9\r\nContent-Length: 2\r\n\r\nok"))
    answer = http.get(address)
    assert (answer.status_code, answer.content) == (200, b"ok")
    assert (b"Via", b"caf\xe9") in answer.headers.raw


@pytest.mark.parametrize("answer", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Le"])
def test_what_is_no_answer_is_an_error_of_the_line(http: httpx.Client, raw: Raw, answer: bytes):
    with pytest.raises(httpx.TransportError):
        http.get(raw(says(answer)))


def test_a_refusal_before_the_end_of_what_is_sent_is_heard(http: httpx.Client, raw: Raw):
    refusal = b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno"
    address = raw(says(refusal))
    try:
        answer = http.put(address, content=bytes(20_000_000))
    except httpx.TransportError:
        return  # the line was reset before the answer was read, as TCP may
    assert (answer.status_code, answer.content) == (413, b"no")


def test_silence_and_a_closed_port_are_errors_of_the_line(server: FaultServer):
    server.faults = [Fault("GET /v1/hello", wait=threading.Event())]
    wire = Wire(ssl.create_default_context(), IDLE)
    with httpx.Client(transport=wire, timeout=httpx.Timeout(0.2)) as http:
        with pytest.raises(httpx.TimeoutException):
            http.get(server.address + "/v1/hello")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        with pytest.raises(httpx.TransportError):
            http.get(f"http://127.0.0.1:{port}/")


def test_a_connection_that_is_done_after_its_client_was_closed_is_not_kept(raw: Raw):
    """A thread that sends may end an exchange after the worker has said goodbye."""
    left = threading.Event()

    def talk(connection: socket.socket) -> None:
        says(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")(connection)
        if connection.recv(1) == b"":
            left.set()

    wire = Wire(ssl.create_default_context(), IDLE)
    client = httpx.Client(transport=wire, timeout=httpx.Timeout(2.0))
    answer = client.send(client.build_request("GET", raw(talk)), stream=True)
    client.close()
    assert answer.read() == b"hi"
    assert left.wait(2.0)
