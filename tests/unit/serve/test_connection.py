"""Two members on one loop, or one and a peer that does not keep to the protocol; real sockets."""

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

from blocktrain.errors import (
    ConfigError,
    ProtocolError,
    RefusedError,
    UnreachableError,
    UntrustedError,
)
from blocktrain.protocol.framing import FrameDecoder, FrameKind, FrameMessage, encode, largest_frame
from blocktrain.protocol.ring_keys import ROUTER, STAGE, Keyring, client_context, server_context
from blocktrain.serve.ring.connection import MAX_HELLO_BYTES, Hello, RingConnection, Terms
from blocktrain.serve.ring.flow import window_for
from blocktrain.serve.ring.handshake import MAX_GREETINGS, RingListener, dial

HELLO = {"role": "router", "name": "r", "model": "m1"}
QUICK = Terms(beat=0.05, slack=0.1, limit=MAX_HELLO_BYTES, padding=0)
HASTY = replace(QUICK, greeting_seconds=0.5)
WINDOW = window_for(largest_frame(QUICK.limit))
BOTH = (ROUTER, STAGE)
NewLoop = Callable[[], asyncio.AbstractEventLoop]
# A router lives in uvicorn's loop, a stage may live in Python's own.
on_every_loop = pytest.mark.parametrize(
    "new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ring(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def other_keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ring(tmp_path_factory.mktemp("other"))


@pytest.fixture(autouse=True)
def no_accidents(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What a server meets is its everyday life, whatever it is; an error in a log is a mistake."""
    yield
    assert not [record for record in caplog.get_records("call") if record.levelno >= logging.ERROR]


def ring(folder: Path) -> Path:
    keyring = Keyring(folder)
    keyring.add(ROUTER, "router")
    keyring.add(STAGE, "stage-1")
    return folder


def run(scene: Coroutine[Any, Any, None], new_loop: NewLoop = asyncio.new_event_loop) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(asyncio.wait_for(scene, 20))


def anyone(hello: Hello) -> None:
    pass


async def echo(connection: RingConnection) -> None:
    while True:
        said = await connection.receive()
        await connection.send(FrameMessage(FrameKind.RESULT, said.meta, said.arrays))


class Kept:
    """Accepts connections and leaves them to the test."""

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[RingConnection] = asyncio.Queue()

    async def __call__(self, connection: RingConnection) -> None:
        self.arrived.put_nowait(connection)
        await connection.wait_closed()


@asynccontextmanager
async def serving(
    accept: Callable[[RingConnection], Awaitable[None]] = echo,
    context: ssl.SSLContext | None = None,
    **more: Any,
) -> AsyncIterator[str]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    settings = {"roles": BOTH, "check": anyone, "terms": QUICK, **more}
    hello = {"role": "stage", "name": "s", "model": "m1"}
    server = RingListener(listener, context, lambda: hello, accept, **settings)
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        await server.close()


async def dialled(
    address: str, context: ssl.SSLContext | None = None, **more: Any
) -> RingConnection:
    settings = {"roles": [STAGE], "check": anyone, "terms": QUICK, **more}
    return await dial(address, context, HELLO, **settings)


class Stranger:
    """A peer in plain TCP that says what the test wants, and reads only when asked to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._decoder = FrameDecoder()

    def say(self, message: FrameMessage) -> None:
        self.say_bytes(b"".join(encode(message)))

    def say_bytes(self, data: bytes) -> None:
        self._writer.write(data)

    def greet(self, **changed: Any) -> None:
        meta = {"hello": HELLO, "limit": QUICK.limit, "beat": QUICK.beat, **changed}
        self.say(FrameMessage(FrameKind.HELLO, meta=meta))

    async def heard(self) -> list[FrameMessage]:
        """Everything until the other side hangs up."""
        try:
            while data := await asyncio.wait_for(self._reader.read(65536), 5):
                self._decoder.feed(data)
        except ConnectionResetError:
            pass
        return list(self._decoder.messages())

    async def refusal(self) -> str:
        last = (await self.heard())[-1]
        assert last.kind is FrameKind.ERROR
        return str(last.meta["reason"])


@asynccontextmanager
async def stranger(address: str) -> AsyncIterator[Stranger]:
    reader, writer = await asyncio.open_connection(*address.split(":"))
    try:
        yield Stranger(reader, writer)
    finally:
        writer.close()


# Meeting


@on_every_loop
def test_members_know_each_other_by_their_certificates(keys: Path, new_loop: NewLoop):
    async def scene() -> None:
        kept = Kept()
        async with serving(kept, server_context(keys, "stage-1")) as address:
            near = await dialled(address, client_context(keys, "router"))
            far = await kept.arrived.get()
            assert (near.peer.role, near.peer.name, near.peer.address) == (
                STAGE,
                "stage-1",
                address,
            )
            assert (far.peer.role, far.peer.name) == (ROUTER, "router")
            assert near.hello["name"] == "s" and far.hello == HELLO

    run(scene(), new_loop)


@on_every_loop
def test_only_members_of_the_ring_get_in(keys: Path, other_keys: Path, new_loop: NewLoop):
    without_certificate = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    without_certificate.check_hostname = False
    without_certificate.verify_mode = ssl.CERT_NONE

    async def scene() -> None:
        async with serving(echo, server_context(keys, "stage-1")) as address:
            with pytest.raises(UntrustedError):
                await dialled(address, client_context(other_keys, "router"))
            for context in (without_certificate, None):
                with pytest.raises(UnreachableError, match=r"before a greeting|lost"):
                    await dialled(address, context)
            assert await dialled(address, client_context(keys, "router"))

    run(scene(), new_loop)


def test_a_stage_of_another_ring_is_refused(keys: Path, other_keys: Path):
    trusting = server_context(other_keys, "stage-1")
    trusting.verify_mode = ssl.CERT_NONE

    async def scene() -> None:
        async with serving(echo, trusting) as address:
            with pytest.raises(UntrustedError):
                await dialled(address, client_context(keys, "router"))

    run(scene())


def test_only_expected_roles_may_connect(keys: Path):
    async def scene() -> None:
        context = client_context(keys, "router")
        async with serving(echo, server_context(keys, "stage-1"), roles=[STAGE]) as address:
            with pytest.raises(RefusedError, match="a router may not connect here"):
                await dialled(address, context)
            assert await dialled(address, client_context(keys, "stage-1"))
            with pytest.raises(RefusedError, match="a stage may not connect here"):
                await dialled(address, client_context(keys, "stage-1"), roles=[ROUTER])

    run(scene())


def test_either_side_may_refuse_the_others_hello():
    def check(hello: dict[str, Any]) -> str | None:
        return None if hello["model"] == "m2" else "another model"

    async def scene() -> None:
        async with serving(check=check) as address:
            with pytest.raises(RefusedError, match="refused: another model"):
                await dialled(address)
        kept = Kept()
        async with serving(kept) as address:
            with pytest.raises(RefusedError, match=r"^another model"):
                await dialled(address, check=check)
            with pytest.raises(RefusedError, match="refused: another model"):
                await (await kept.arrived.get()).receive()

    run(scene())


@pytest.mark.parametrize("tls", [False, True])
def test_garbage_on_the_port_is_dropped_and_others_are_served(keys: Path, tls: bool):
    contexts = (server_context(keys, "stage-1"), client_context(keys, "router"))
    listening, dialling = contexts if tls else (None, None)

    async def scene() -> None:
        async with serving(echo, listening, terms=HASTY) as address:
            for garbage in (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", bytes(100), b"\x16\x03\x01" * 50):
                async with stranger(address) as port_scan:
                    port_scan.say_bytes(garbage)
                    await asyncio.wait_for(port_scan._reader.read(), 5)
            assert await dialled(address, dialling)

    run(scene())


@on_every_loop
@pytest.mark.parametrize("said", [b"", b"BTfr\x01"])
@pytest.mark.parametrize("tls", [False, True])
def test_a_peer_that_never_greets_is_dropped_in_time(
    keys: Path, tls: bool, said: bytes, new_loop: NewLoop
):
    async def scene() -> None:
        context = server_context(keys, "stage-1") if tls else None
        async with serving(echo, context, terms=HASTY) as address, stranger(address) as silent:
            silent.say_bytes(said)
            began = time.monotonic()
            assert await silent.heard() == []
            assert time.monotonic() - began < 4 * HASTY.greeting_seconds

    run(scene(), new_loop)


def test_a_listener_that_never_answers_is_given_up_in_time(keys: Path):
    async def scene() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            for context in (None, client_context(keys, "router")):
                with pytest.raises(UnreachableError, match=r"did not answer within 0\.5 s"):
                    await dialled(f"127.0.0.1:{listener.getsockname()[1]}", context, terms=HASTY)

    run(scene())


def test_silent_connections_do_not_keep_others_out():
    async def scene() -> None:
        async with serving(terms=Terms(greeting_seconds=60)) as address:
            callers = [
                await asyncio.open_connection(*address.split(":")) for _ in range(MAX_GREETINGS + 5)
            ]
            assert await dialled(address)
            for _, writer in callers:
                writer.close()

    run(scene())


def test_the_number_of_connections_is_limited():
    async def scene() -> None:
        async with serving(max_connections=1) as address:
            first = await dialled(address)
            with pytest.raises(UnreachableError):
                await dialled(address)
            first.close()
            await asyncio.sleep(0.1)
            assert await dialled(address)

    run(scene())


def test_dialling_a_closed_port_is_unreachable():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = f"127.0.0.1:{listener.getsockname()[1]}"

    async def scene() -> None:
        with pytest.raises(UnreachableError, match=f"cannot reach {closed}"):
            await dialled(closed)
        for address in ("", "host", "host:", ":1", "host:65536", "host:x", "host:²"):
            with pytest.raises(ConfigError, match="HOST:PORT"):
                await dialled(address)

    run(scene())


# Talking


@on_every_loop
@pytest.mark.parametrize("tls", [False, True])
def test_messages_of_all_sizes_come_back_in_order(keys: Path, tls: bool, new_loop: NewLoop):
    contexts = (server_context(keys, "stage-1"), client_context(keys, "router"))
    listening, dialling = contexts if tls else (None, None)
    draws = np.random.default_rng(0)
    sizes = [0, 1, 100, 5_000_000, 3, 70_000, 1_000_000, 64]
    sent = [draws.integers(0, 256, size, np.uint8) for size in sizes]

    async def scene() -> None:
        async with serving(echo, listening, terms=Terms()) as address:
            connection = await dialled(address, dialling, terms=Terms())

            async def push() -> None:
                for index, array in enumerate(sent):
                    await connection.send(FrameMessage(FrameKind.STEP, {"n": index}, (array,)))

            pushing = asyncio.create_task(push())
            for index, array in enumerate(sent):
                back = await connection.receive()
                assert back.meta == {"n": index}
                np.testing.assert_array_equal(back.arrays[0], array)
            await pushing

    run(scene(), new_loop)


def test_padding_uses_no_message_credit_and_is_not_received():
    padding = replace(QUICK, limit=1 << 20, padding=1 << 18)

    async def scene() -> None:
        async with serving(terms=padding) as address:
            near = await dialled(address, terms=padding)
            for number in range(8):
                await near.send(
                    FrameMessage(FrameKind.STEP, {"n": number}, (np.zeros(1 << 18, np.uint8),))
                )
                assert (await near.receive()).meta == {"n": number}

    run(scene())


def test_the_failure_of_a_request_is_an_ordinary_message():
    async def scene() -> None:
        kept = Kept()
        async with serving(kept) as address:
            near = await dialled(address)
            await near.send(FrameMessage(FrameKind.FAILURE, meta={"reason": "no cache"}))
            assert (await (await kept.arrived.get()).receive()).meta == {"reason": "no cache"}

    run(scene())


@on_every_loop
def test_what_was_sent_before_closing_still_arrives(new_loop: NewLoop):
    async def scene() -> None:
        kept = Kept()
        async with serving(kept) as address:
            near = await dialled(address)
            far = await kept.arrived.get()
            await near.send(FrameMessage(FrameKind.STEP, {"n": 1}))
            near.close()
            assert (await far.receive()).meta == {"n": 1}
            for _ in range(2):
                with pytest.raises(UnreachableError, match="closed the connection"):
                    await far.receive()
            with pytest.raises(UnreachableError):
                await far.send(FrameMessage(FrameKind.STEP))
            await near.wait_closed()

    run(scene(), new_loop)


def test_a_message_over_the_other_sides_limit_is_not_sent():
    async def scene() -> None:
        async with serving() as address:
            near = await dialled(address)
            with pytest.raises(ProtocolError, match="exceeds the limit"):
                await near.send(
                    FrameMessage(FrameKind.STEP, {}, (np.zeros(QUICK.limit, np.float32),))
                )
            await near.send(FrameMessage(FrameKind.STEP, {"n": 2}))
            assert (await near.receive()).meta == {"n": 2}

    run(scene())


# Credit


def test_who_has_no_credit_waits_until_the_other_has_read():
    message = FrameMessage(FrameKind.STEP, {}, (np.zeros(1000, np.uint8),))

    async def scene() -> None:
        kept, sent = Kept(), 0
        async with serving(kept) as address:
            near = await dialled(address)
            far = await kept.arrived.get()

            async def push() -> None:
                nonlocal sent
                while True:
                    await near.send(message)
                    sent += 1

            pushing = asyncio.create_task(push())
            await asyncio.sleep(5 * QUICK.beat)  # longer than silence is borne: reading goes on
            in_flight = sent
            assert WINDOW // 2200 <= in_flight <= WINDOW // 2000
            for _ in range(in_flight // 2):
                await far.receive()
            await asyncio.sleep(0.05)
            assert in_flight < sent <= in_flight + in_flight // 2
            pushing.cancel()
            await asyncio.gather(pushing, return_exceptions=True)
            for _ in range(sent - in_flight // 2):
                await far.receive()
            await near.send(FrameMessage(FrameKind.RESULT, {"n": 9}))
            assert (await far.receive()).meta == {"n": 9}

    run(scene())


def test_the_largest_message_never_waits_for_ever():
    largest = FrameMessage(FrameKind.STEP, {}, (np.zeros(QUICK.limit - 8, np.uint8),))

    async def scene() -> None:
        async with serving() as address:
            near = await dialled(address)
            for _ in range(10):
                await near.send(FrameMessage(FrameKind.STEP, {}, (np.zeros(5000, np.uint8),)))
                await near.send(largest)
                await near.receive()
                await near.receive()

    run(scene())


# Peers that break the rules


def overrun(peer: Stranger) -> None:
    message = b"".join(encode(FrameMessage(FrameKind.STEP, {}, (np.zeros(10_000, np.uint8),))))
    peer.greet()
    peer.say_bytes(message * (WINDOW // len(message) + 1))


def too_large(peer: Stranger) -> None:
    peer.greet()
    peer.say(FrameMessage(FrameKind.STEP, {}, (np.zeros(QUICK.limit + 1, np.uint8),)))


def too_large_a_hello(peer: Stranger) -> None:
    peer.say(FrameMessage(FrameKind.HELLO, arrays=(np.zeros(MAX_HELLO_BYTES, np.uint8),)))


def no_hello(peer: Stranger) -> None:
    peer.say(FrameMessage(FrameKind.STEP))


def two_hellos(peer: Stranger) -> None:
    peer.greet()
    peer.greet()


def credit_from_nothing(peer: Stranger) -> None:
    peer.greet()
    peer.say(FrameMessage(FrameKind.CREDIT, {"number": 2**63}))


def credit_below_zero(peer: Stranger) -> None:
    peer.greet()
    peer.say(FrameMessage(FrameKind.CREDIT, {"number": -1}))


def pong_without_a_number(peer: Stranger) -> None:
    peer.greet()
    peer.say(FrameMessage(FrameKind.PONG))


def pong_from_the_future(peer: Stranger) -> None:
    peer.greet()
    peer.say(FrameMessage(FrameKind.PONG, {"number": 2**64 - 1}))


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (overrun, "more than its credit allows"),
        (too_large, "the limit is"),
        (too_large_a_hello, "the limit is"),
        (no_hello, "HELLO"),
        (two_hellos, "HELLO"),
        (credit_from_nothing, "more credit"),
        (pong_from_the_future, "without a PING"),
        (pong_without_a_number, "a number"),
        (credit_below_zero, "a number"),
        (lambda peer: peer.greet(hello=[]), "needs hello, limit and beat"),
        (lambda peer: peer.greet(limit=True), "needs hello, limit and beat"),
        (lambda peer: peer.greet(limit=2**60), "out of range"),
        (lambda peer: peer.greet(limit=1), "out of range"),
        (lambda peer: peer.greet(beat=1e9), "out of range"),
        (lambda peer: peer.greet(hello={"role": "king"}), "king may not connect"),
    ],
)
def test_a_peer_that_breaks_the_protocol_is_disconnected_with_the_reason(
    wrong: Callable[[Stranger], None], reason: str
):
    async def scene() -> None:
        async with serving(Kept()) as address, stranger(address) as peer:
            wrong(peer)
            assert reason in await peer.refusal()

    run(scene())


# Signs of life


@on_every_loop
def test_a_peer_that_falls_silent_is_gone_after_two_beats(new_loop: NewLoop):
    async def scene() -> None:
        kept = Kept()
        async with serving(kept) as address, stranger(address) as peer:
            peer.greet()
            connection = await kept.arrived.get()
            began = time.monotonic()
            waiting = asyncio.create_task(connection.receive())
            with pytest.raises(UnreachableError, match="was silent for"):
                await waiting
            assert time.monotonic() - began < 6 * QUICK.beat + QUICK.slack
            assert isinstance(connection.reason, UnreachableError)
            await connection.wait_closed()

    run(scene(), new_loop)


def test_a_sender_that_waits_for_a_silent_peer_is_told():
    """The peer is half-open: it greeted, then neither reads nor speaks."""

    async def scene() -> None:
        kept = Kept()
        async with serving(kept) as address, stranger(address) as peer:
            peer.greet()
            connection = await kept.arrived.get()
            message = FrameMessage(FrameKind.STEP, {}, (np.zeros(WINDOW // 2 - 4000, np.uint8),))
            await connection.send(message)
            with pytest.raises(UnreachableError, match="was silent for"):
                await asyncio.gather(connection.send(message), connection.send(message))

    run(scene())


def test_idle_connections_live_on_and_a_slower_beat_is_respected():
    async def scene() -> None:
        kept = Kept()
        async with serving(kept) as address:
            near = await dialled(address)
            slow = await dialled(address, terms=Terms(beat=0.5))
            await asyncio.sleep(0.6)
            assert near.reason is None and slow.reason is None

    run(scene())


def test_time_in_which_this_side_stood_still_is_not_the_others_silence():
    async def scene() -> None:
        async with serving() as address:
            near = await dialled(address)
            time.sleep(4 * QUICK.beat + QUICK.slack)
            await asyncio.sleep(QUICK.beat)
            await near.send(FrameMessage(FrameKind.STEP, {"n": 3}))
            assert (await near.receive()).meta == {"n": 3}

    run(scene())
