"""How much one side of a connection may send before the other has read it, counted in bytes.

One currency for all messages, because what must be bounded is the reader's memory: a message costs
its frame and something for being a message. Knows no sockets and no clock.
"""

import asyncio
import math
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
    Buffer,
    FrameDecoder,
    FrameMessage,
    Kind,
    encode,
    largest_frame,
)

MESSAGE_COST = 1024  # what a small message takes in memory, beyond its frame


def cost(frame_bytes: int) -> int:
    return frame_bytes + MESSAGE_COST


def window_for(largest_frame: int) -> int:
    """Two of the largest frames: one is worked on while the next one travels."""
    return 2 * cost(largest_frame)


class CreditGrant:
    """What a reader has allowed the other side. Topped up in bulk: not a word per message."""

    def __init__(self, window: int) -> None:
        self._left, self._read, self._window = window, 0, window

    def arrived(self, frame_bytes: int) -> None:
        self._left -= cost(frame_bytes)
        if self._left < 0:
            raise ProtocolError("the other side sent more than it was allowed to")

    def read(self, frame_bytes: int) -> None:
        self._read += cost(frame_bytes)

    def top_up(self) -> int:
        """What to allow the other side now: nothing, until it is a quarter of the window.

        So at least three quarters of the window are free to a writer whose reader keeps up, more
        than the largest frame needs: no message waits for ever.
        """
        if self._read < self._window // 4:
            return 0
        more, self._read = self._read, 0
        self._left += more
        return more


FIRST_BYTES = 1 << 15  # less than a HELLO may take: more is not welcome right after it
LONG = 2  # shortest times seen: the line was full for half of it


async def warm_up(
    pad: Callable[[int], Awaitable[None]], most: int, clock: Callable[[], float]
) -> None:
    """Twice as much padding each time, until it is under way for long because it is much."""
    size, shortest = FIRST_BYTES, math.inf
    with suppress(BlocktrainError):  # a connection that ends says so to those who use it
        while size <= most:
            began = clock()
            await pad(size)
            took = clock() - began
            if took > LONG * shortest:
                return
            size, shortest = 2 * size, min(shortest, took)


LARGEST_HELLO = 64 * 1024
LARGEST_LIMIT = 2**40
SLOWEST_BEAT = 60.0
TICKS_PER_BEAT = 4
JOINED_BYTES = 64 * 1024  # a frame of less is written in one piece
WRITE_BUFFER_BYTES = 256 * 1024  # beyond one frame
CONGESTION = b"bbr"  # after a pause it goes on at the speed it had
FAREWELL_SECONDS = 1.0
LONGEST_REASON = 500
SMOOTHING = 1 / 8  # of round trips, as TCP does it

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
    """What one side holds to. `limit` is what the meta and arrays of a message may take, `padding`
    how much of it at most is sent at once to learn the line's speed."""

    beat: float = 1.0
    slack: float = 0.5  # seconds that a sign of life may be late
    greeting_seconds: float = 5.0
    limit: int = LIMIT
    padding: int = 4 << 20


USUAL = Terms()


class RingConnection(asyncio.BufferedProtocol):
    """Made by `meeting.dial` and `meeting.listen`. Arrays that were sent must not be changed.

    `reason` is why it ended. What had arrived before can still be received.
    """

    def __init__(self, terms: Terms, address: str) -> None:
        self.peer = Peer("", "", address)
        self.hello: Hello = {}
        self.round_trip: float | None = None
        self.reason: BlocktrainError | None = None
        self.closed = asyncio.Event()
        self._terms = terms
        self._loop = asyncio.get_running_loop()
        self._decoder = FrameDecoder(LARGEST_HELLO)
        self._grant = CreditGrant(window_for(largest_frame(terms.limit)))
        self._inbox: asyncio.Queue[FrameMessage | None] = asyncio.Queue()  # None: the end
        self._greeting: asyncio.Future[Hello] = self._loop.create_future()
        self._sending = asyncio.Lock()
        self._paused = False
        self._wake: asyncio.Future[None] | None = None  # a sender that waits for credit or room
        self._window, self._credit, self._largest = 0, 0, 0  # what the other side takes
        self._owed_pong: int | None = None
        self._ticks = 0
        self._silence, self._patience = 0.0, 2 * terms.beat + terms.slack
        self._timer: asyncio.TimerHandle | None = None
        self._warming: asyncio.Task[None] | None = None
        self._padded: asyncio.Future[None] | None = None
        self._most_padding = 0

    async def send(self, message: FrameMessage) -> None:
        """Returns when the message is on its way, or raises why the connection ended."""
        parts = encode(message)
        size = sum(map(len, parts))
        if size > self._largest:
            raise ProtocolError(f"a message of {size} bytes is more than {self.peer} takes")
        async with self._sending:
            await self._until(lambda: self._credit >= cost(size) and not self._paused)
            self._credit -= cost(size)
            self._write(parts, size)

    async def receive(self) -> FrameMessage:
        """The next message, or, after the last, raises why the connection ended."""
        message = await self._inbox.get()
        if message is None:
            self._inbox.put_nowait(None)
            raise self._why()
        self._grant.read(message.size)
        self._top_up()
        return message

    async def wait_closed(self) -> None:
        await self.closed.wait()

    def close(self) -> None:
        """What was sent still goes out, if the other side takes it soon."""
        self._end(UnreachableError(f"the connection to {self.peer} is closed"), farewell=True)

    def refuse(self, reason: BlocktrainError) -> None:
        """Close, and tell the other side why."""
        self._tell(Kind.ERROR, meta={"reason": str(reason)[:LONGEST_REASON]})
        self._end(reason, farewell=True)

    # The greeting, for `meeting`

    def greet(self, hello: Hello) -> None:
        terms = self._terms
        meta = {"hello": hello, "limit": terms.limit, "beat": terms.beat}
        self._tell(Kind.HELLO, meta=meta)

    async def greeted(self) -> Hello:
        return await self._greeting

    def begin(self, peer: Peer, hello: Hello) -> None:
        """From here on both sides show that they live."""
        self.peer, self.hello = peer, hello
        self._tick()
        warming = warm_up(self._pad, self._most_padding, self._loop.time)
        self._warming = self._loop.create_task(warming)

    def certificate(self) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self._transport.get_extra_info("peercert")
        return found

    # What the transport says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not of its class
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        _tune(transport.get_extra_info("socket"))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._decoder.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        if self.reason:
            return
        self._silence = 0.0
        try:
            self._decoder.buffer_updated(nbytes)
            for message in self._decoder.messages():
                self._take(message)
        except ProtocolError as error:
            self.refuse(error)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if self._owed_pong is not None:
            self._tell(Kind.PONG, self._owed_pong)
            self._owed_pong = None
        self._top_up()
        self._woken()

    def eof_received(self) -> None:
        early = "" if self._window else " without a greeting: it is full, or not of this ring"
        self._end(UnreachableError(f"{self.peer} closed the connection{early}"), farewell=True)

    def connection_lost(self, exc: Exception | None) -> None:
        if isinstance(exc, ssl.SSLError):
            self._end(UntrustedError(f"{self.peer} does not accept this certificate: {exc}"))
        else:
            self._end(
                UnreachableError(f"the connection to {self.peer} was lost: {exc or 'cut off'}")
            )
        if self._timer:
            self._timer.cancel()
        self.closed.set()

    # What messages do

    def _take(self, message: FrameMessage) -> None:
        if message.kind is Kind.ERROR and not message.request:
            said = str(message.meta.get("reason", "no reason given"))[:LONGEST_REASON]
            self._end(RefusedError("refused", f"{self.peer} refused: {said}"), farewell=True)
        elif (message.kind is Kind.HELLO) != (not self._window):
            raise ProtocolError("the first message, and no other, is a HELLO")
        elif message.kind is Kind.HELLO:
            self._take_hello(message.meta)
        elif message.kind is Kind.PING:
            self._answer(message.sequence)
        elif message.kind is Kind.PONG:
            self._take_pong(message.sequence)
        elif message.kind is Kind.CREDIT:
            self._take_credit(message.sequence)
        elif message.kind is Kind.PAD:
            self._take_pad(message)
        else:
            self._grant.arrived(message.size)
            self._inbox.put_nowait(message)

    def _take_hello(self, meta: dict[str, Any]) -> None:
        hello, limit, beat = (meta.get(key) for key in ("hello", "limit", "beat"))
        if not isinstance(hello, dict) or type(limit) is not int or type(beat) is not float:
            raise ProtocolError("a HELLO has hello, limit and beat")
        if not (LARGEST_HELLO <= limit <= LARGEST_LIMIT and 0 < beat <= SLOWEST_BEAT):
            raise ProtocolError(f"a limit of {limit} and a beat of {beat} are not possible")
        self._largest = largest_frame(limit)
        self._window = self._credit = window_for(self._largest)
        self._most_padding = min(self._terms.padding, limit // 2)
        self._patience = 2 * max(beat, self._terms.beat) + self._terms.slack
        self._decoder.limit = self._terms.limit
        if not self._greeting.done():
            self._greeting.set_result(hello)

    def _answer(self, ping: int) -> None:
        if self._paused:
            self._owed_pong = ping
        else:
            self._tell(Kind.PONG, ping)

    def _take_pong(self, ping: int) -> None:
        took = (self._microseconds() - ping) / 1e6
        if took < 0:
            raise ProtocolError("a PONG without a PING")
        before = self.round_trip
        self.round_trip = took if before is None else before + SMOOTHING * (took - before)

    def _take_credit(self, more: int) -> None:
        self._credit += more
        if self._credit > self._window:
            raise ProtocolError("more credit than the window has")
        self._woken()

    def _take_pad(self, message: FrameMessage) -> None:
        if not message.arrays:
            if self._padded and not self._padded.done():
                self._padded.set_result(None)
            return
        self._grant.arrived(message.size)
        self._grant.read(message.size)
        self._top_up()
        if not self._paused:  # whoever does not read is owed no answer
            self._tell(Kind.PAD)

    # Signs of life

    def _tick(self) -> None:
        """Silence is counted in ticks, not read from a clock: time in which this side stood still
        is not the other's silence."""
        seconds = self._terms.beat / TICKS_PER_BEAT
        if self._silence > self._patience:
            self._end(UnreachableError(f"{self.peer} was silent for {self._silence:.1f} s"))
        if self.reason:
            return
        if self._ticks % TICKS_PER_BEAT == 0 and not self._paused:
            self._tell(Kind.PING, self._microseconds())
        self._silence += seconds
        self._ticks += 1
        self._timer = self._loop.call_later(seconds, self._tick)

    def _microseconds(self) -> int:
        return int(self._loop.time() * 1e6)

    # Writing and ending

    def _tell(self, kind: Kind, sequence: int = 0, meta: dict[str, Any] | None = None) -> None:
        if not self.reason:
            self._transport.write(b"".join(encode(FrameMessage(kind, 0, sequence, meta or {}))))

    def _write(self, parts: list[Buffer], size: int) -> None:
        if size <= JOINED_BYTES:
            self._transport.write(b"".join(parts))
            return
        for part in parts:
            self._transport.write(part)

    def _top_up(self) -> None:
        if not self._paused and (more := self._grant.top_up()):
            self._tell(Kind.CREDIT, more)

    async def _pad(self, size: int) -> None:
        """Returns when the other side has so many bytes that mean nothing."""
        self._padded = self._loop.create_future()
        await self.send(FrameMessage(Kind.PAD, arrays=(np.zeros(size, np.uint8),)))
        await self._padded

    async def _until(self, ready: Callable[[], bool]) -> None:
        """Only one sender at a time waits."""
        while not self.reason and not ready():
            self._wake = self._loop.create_future()
            await self._wake
        if self.reason:
            raise self._why()

    def _woken(self) -> None:
        if self._wake and not self._wake.done():
            self._wake.set_result(None)

    def _why(self) -> BlocktrainError:
        assert self.reason
        return self.reason

    def _end(self, reason: BlocktrainError, *, farewell: bool = False) -> None:
        if self.reason:
            return
        self.reason = reason
        if self._timer:
            self._timer.cancel()
        if self._warming:
            self._warming.cancel()
        if not self._greeting.done():
            self._greeting.set_exception(reason)
            self._greeting.exception()  # nobody may be waiting for it any more
        self._inbox.put_nowait(None)
        self._woken()
        if farewell:
            # To close with something unread would cut off what was sent: first say that it is all.
            leave = self._transport
            (leave.write_eof if leave.can_write_eof() else leave.close)()
            self._timer = self._loop.call_later(FAREWELL_SECONDS, self._transport.abort)
        else:
            self._transport.abort()


def _tune(link: socket.socket) -> None:
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_CONGESTION"):
        with suppress(OSError):  # not every machine has it
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION)


Dial = Callable[[str], Awaitable[RingConnection]]


class StageLinks:
    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._open: dict[str, RingConnection] = {}
        self._dialing: dict[str, asyncio.Lock] = {}

    async def to(self, address: str) -> RingConnection:
        """The connection to an address; dialled if there is none that still stands."""
        async with self._dialing.setdefault(address, asyncio.Lock()):
            held = self._open.get(address)
            if held is None or held.reason:
                held = self._open[address] = await self._dial(address)
            return held

    def close(self) -> None:
        for connection in self._open.values():
            connection.close()
        self._open.clear()
