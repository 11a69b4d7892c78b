"""A connection of the ring: messages in both directions, with flow control, heartbeat and a reason
for its end. Does not know what the messages mean."""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from blocktrain.errors import (
    BlocktrainError,
    ProtocolError,
    RefusedError,
    UnreachableError,
    UntrustedError,
)
from blocktrain.protocol.framing import (
    LIMIT,
    FrameDecoder,
    FrameKind,
    FrameMessage,
    encode,
    largest_frame,
)
from blocktrain.serve.ring.flow import Heartbeat, ReceiveCredit, SendCredit, warm_up, window_for

MAX_HELLO_BYTES = 64 * 1024
MAX_LIMIT = 2**40
MAX_BEAT = 60.0
JOINED_BYTES = 64 * 1024  # a smaller frame is written in one piece
WRITE_BUFFER_BYTES = 256 * 1024  # beyond one frame
CONGESTION = b"bbr"  # keeps its speed after a pause
FAREWELL_SECONDS = 1.0
MAX_REASON = 500  # characters
PADDING_BYTES = 4 << 20

Hello = dict[str, Any]


@dataclass(frozen=True)
class Peer:
    role: str
    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.role} {self.name} at {self.address}" if self.role else self.address


@dataclass(frozen=True)
class Terms:
    """Settings of one side of a connection."""

    beat: float = 1.0  # seconds between pings
    slack: float = 0.5  # tolerated delay of a ping in seconds
    greeting_seconds: float = 5.0
    limit: int = LIMIT  # largest message (meta and arrays) in bytes
    padding: int = PADDING_BYTES  # largest warm-up message; 0: no warm-up


DEFAULT_TERMS = Terms()


class RingConnection(asyncio.BufferedProtocol):
    """A connection to another member of the ring, made by `handshake.dial` and
    `handshake.RingListener`. Do not change arrays after sending them.

    `reason` says why the connection ended. Messages that arrived before can still be received.
    """

    def __init__(self, terms: Terms, address: str) -> None:
        self.peer = Peer("", "", address)
        self.hello: Hello = {}
        self.reason: BlocktrainError | None = None
        self._closed = asyncio.Event()
        self._terms = terms
        self._loop = asyncio.get_running_loop()
        self._decoder = FrameDecoder(MAX_HELLO_BYTES)
        self._inbox: asyncio.Queue[FrameMessage | None] = asyncio.Queue()  # None: the end
        self.greeting: asyncio.Future[Hello] = self._loop.create_future()  # the peer's
        self._incoming = ReceiveCredit(window_for(largest_frame(terms.limit)))
        self._outgoing = SendCredit()
        self._sending = asyncio.Lock()
        self._heartbeat = Heartbeat(terms.beat, terms.slack, self._ping, self._silent)
        self._unsent_pong: int | None = None
        self._max_padding = 0
        self._padded: asyncio.Future[None] | None = None
        self._warming: asyncio.Task[None] | None = None
        self._abort_timer: asyncio.TimerHandle | None = None

    async def send(self, message: FrameMessage) -> None:
        """Hand a message to the transport. Raises `reason` if the connection has ended."""
        parts = encode(message)
        size = sum(map(len, parts))
        if size > self._outgoing.max_frame:
            raise ProtocolError(f"a message of {size} bytes exceeds the limit of {self.peer}")
        async with self._sending:
            await self._outgoing.take(size)
            if self.reason:
                raise self.reason
            for part in [b"".join(parts)] if size <= JOINED_BYTES else parts:
                self._transport.write(part)

    async def receive(self) -> FrameMessage:
        """The next message. Raises `reason` after the last one."""
        message = await self._inbox.get()
        if message is None:
            self._inbox.put_nowait(None)
            assert self.reason
            raise self.reason
        self._incoming.read(message.size)
        self._grant_credit()
        return message

    async def wait_closed(self) -> None:
        await self._closed.wait()

    def close(self) -> None:
        """Close; sent messages still go out if the peer reads them soon."""
        self._end(UnreachableError(f"the connection to {self.peer} is closed"), farewell=True)

    def refuse(self, reason: BlocktrainError) -> None:
        """Close, and tell the peer why."""
        self._write_control(FrameKind.ERROR, reason=str(reason)[:MAX_REASON])
        self._end(reason, farewell=True)

    # The greeting, for `handshake`

    def greet(self, hello: Hello) -> None:
        terms = self._terms
        self._write_control(FrameKind.HELLO, hello=hello, limit=terms.limit, beat=terms.beat)

    def begin(self, peer: Peer, hello: Hello) -> None:
        """Start heartbeat and warm-up, once both sides have sent HELLO."""
        self.peer, self.hello = peer, hello
        self._heartbeat.start()
        warming = warm_up(self._pad, self._max_padding, self._loop.time)
        self._warming = self._loop.create_task(warming)

    def certificate(self) -> dict[str, Any] | None:
        result: dict[str, Any] | None = self._transport.get_extra_info("peercert")
        return result

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        _tune(transport.get_extra_info("socket"))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._decoder.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        if self.reason:
            return
        self._heartbeat.reset()
        try:
            self._decoder.buffer_updated(nbytes)
            for message in self._decoder.messages():
                self._take(message)
        except ProtocolError as error:
            self.refuse(error)

    def pause_writing(self) -> None:
        self._outgoing.paused = True

    def resume_writing(self) -> None:
        self._outgoing.resume()
        if self._unsent_pong is not None:
            self._write_control(FrameKind.PONG, number=self._unsent_pong)
            self._unsent_pong = None
        self._grant_credit()

    def eof_received(self) -> None:
        early = (
            "" if self._outgoing.is_open else " before a greeting; it is full or in another ring"
        )
        self._end(UnreachableError(f"{self.peer} closed the connection{early}"), farewell=True)

    def connection_lost(self, exc: Exception | None) -> None:
        if isinstance(exc, ssl.SSLError):
            self._end(UntrustedError(f"{self.peer} does not accept this certificate: {exc}"))
        else:
            cause = exc or "cut off"
            self._end(UnreachableError(f"the connection to {self.peer} was lost: {cause}"))
        if self._abort_timer:
            self._abort_timer.cancel()
        self._closed.set()

    # Incoming messages

    def _take(self, message: FrameMessage) -> None:
        if message.kind is FrameKind.ERROR:
            reason = str(message.meta.get("reason", "no reason given"))[:MAX_REASON]
            self._end(RefusedError("refused", f"{self.peer} refused: {reason}"), farewell=True)
        elif (message.kind is FrameKind.HELLO) == self._outgoing.is_open:
            if message.kind is FrameKind.HELLO:
                raise ProtocolError("a second HELLO arrived")
            raise ProtocolError("the first message is not a HELLO")
        elif message.kind is FrameKind.HELLO:
            self._take_hello(message.meta)
        elif message.kind is FrameKind.PING and self._outgoing.paused:
            self._unsent_pong = _number(message)
        elif message.kind is FrameKind.PING:
            self._write_control(FrameKind.PONG, number=_number(message))
        elif message.kind is FrameKind.PONG:
            self._heartbeat.pong(_number(message))
        elif message.kind is FrameKind.CREDIT:
            self._outgoing.grant(_number(message))
        elif message.kind is FrameKind.PAD:
            self._take_padding(message)
        else:
            self._incoming.arrived(message.size)
            self._inbox.put_nowait(message)

    def _take_hello(self, meta: dict[str, Any]) -> None:
        hello, limit, beat = (meta.get(key) for key in ("hello", "limit", "beat"))
        if not isinstance(hello, dict) or type(limit) is not int or type(beat) is not float:
            raise ProtocolError("a HELLO needs hello, limit and beat")
        if not (MAX_HELLO_BYTES <= limit <= MAX_LIMIT and 0 < beat <= MAX_BEAT):
            raise ProtocolError(f"the HELLO's limit of {limit} or beat of {beat} is out of range")
        self._outgoing.open(largest_frame(limit))
        self._heartbeat.expect(beat)
        self._max_padding = min(self._terms.padding, limit // 2)
        self._decoder.limit = self._terms.limit
        if not self.greeting.done():
            self.greeting.set_result(hello)

    def _take_padding(self, message: FrameMessage) -> None:
        if not message.arrays:  # an acknowledgement
            if self._padded and not self._padded.done():
                self._padded.set_result(None)
            return
        self._incoming.arrived(message.size)
        self._incoming.read(message.size)
        self._grant_credit()
        if not self._outgoing.paused:
            self._write_control(FrameKind.PAD)

    # Outgoing messages and the end

    def _ping(self, microseconds: int) -> None:
        if not self._outgoing.paused:
            self._write_control(FrameKind.PING, number=microseconds)

    def _silent(self, seconds: float) -> None:
        self._end(UnreachableError(f"{self.peer} was silent for {seconds:.1f} s"))

    def _grant_credit(self) -> None:
        if not self._outgoing.paused and (more := self._incoming.top_up()):
            self._write_control(FrameKind.CREDIT, number=more)

    async def _pad(self, size: int) -> None:
        """Send this many padding bytes; returns once the peer has received them."""
        self._padded = self._loop.create_future()
        await self.send(FrameMessage(FrameKind.PAD, arrays=(np.zeros(size, np.uint8),)))
        await self._padded

    def _write_control(self, kind: FrameKind, **meta: object) -> None:
        if not self.reason:
            self._transport.write(b"".join(encode(FrameMessage(kind, meta))))

    def _end(self, reason: BlocktrainError, *, farewell: bool = False) -> None:
        if self.reason:
            return
        self.reason = reason
        self._heartbeat.stop()
        if self._warming:
            self._warming.cancel()
        if not self.greeting.done():
            self.greeting.set_exception(reason)
            self.greeting.exception()  # marks it as retrieved: there may be no waiter
        self._inbox.put_nowait(None)
        self._outgoing.end()
        if farewell:
            # Send an end of file first: closing with unread input would reset the connection and
            # lose sent data.
            transport = self._transport
            (transport.write_eof if transport.can_write_eof() else transport.close)()
            self._abort_timer = self._loop.call_later(FAREWELL_SECONDS, transport.abort)
        else:
            self._transport.abort()


def _number(message: FrameMessage) -> int:
    """What a PING, PONG or CREDIT says."""
    number = message.meta.get("number")
    if type(number) is not int or number < 0:
        raise ProtocolError(f"a {message.kind.name} must have a number of 0 or more")
    return number


def _tune(link: socket.socket) -> None:
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_CONGESTION"):
        with suppress(OSError):  # not every kernel supports it
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION)


Dial = Callable[[str], Awaitable[RingConnection]]


class ConnectionPool:
    """One connection per address, opened when it is needed."""

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._open: dict[str, RingConnection] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def to(self, address: str) -> RingConnection:
        async with self._locks.setdefault(address, asyncio.Lock()):
            connection = self._open.get(address)
            if connection is None or connection.reason:
                connection = self._open[address] = await self._dial(address)
            return connection

    def close(self) -> None:
        for connection in self._open.values():
            connection.close()
        self._open.clear()
