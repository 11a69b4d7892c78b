"""One client's connection to an HTTP server, with a deadline for each phase.

uvicorn's own protocol gets complete heads only (the request line and the headers), so a client that
sends them slowly costs a little memory, and no more than its deadline:

    handshake   TLS is established within HANDSHAKE_SECONDS
    head        complete within HEAD_SECONDS, at most HEAD_BYTES and HEAD_FIELDS
    request     until the response is complete: a client that has to send a body, or to read,
                moves PROGRESS_BYTES in PATIENCE_SECONDS; the server may take as long as it needs
    rest        the response is complete but the body is not: as before, at most REST_BYTES
    idle        the next request begins within IDLE_SECONDS
"""

import asyncio
import logging
import math
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto
from typing import cast

from starlette.types import Scope

from blocktrain.errors import ProtocolError

log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 10.0
HEAD_SECONDS = 10.0
HEAD_BYTES = 32 * 1024
HEAD_FIELDS = 100
# Longer than workers keep idle connections: reconnecting costs a distant worker two round trips.
IDLE_SECONDS = 75
PATIENCE_SECONDS = 60.0
PROGRESS_BYTES = 32 * 1024  # in PATIENCE_SECONDS: 546 bytes per second
REST_BYTES = 16 * 1024 * 1024  # of a body that the application did not read to its end
AHEAD_BYTES = 16 * 1024 * 1024  # read before the application has started; more than one read
WRITE_BUFFER_BYTES = 64 * 1024
HEAD_END = b"\r\n\r\n"
CHUNK_LINE = 64  # characters of the line before a chunk of a body
CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(;.*)?")
TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"connection: close\r\ncontent-length: 0\r\n\r\n"
)


# The end of a body


class Body:
    """Where a body ends that has this many bytes."""

    def __init__(self, left: int) -> None:
        self._left = left

    @property
    def is_complete(self) -> bool:
        return self._left == 0

    def take(self, data: bytes | bytearray) -> int:
        """How many of the next bytes belong to the body."""
        taken = min(self._left, len(data))
        self._left -= taken
        return taken


class ChunkedBody(Body):
    """Where a body in HTTP chunks ends. uvicorn reads them; here only their sizes matter."""

    def __init__(self) -> None:
        super().__init__(0)
        self._line = bytearray()
        self._is_last = self._is_over = False

    @property
    def is_complete(self) -> bool:
        return self._is_over

    def take(self, data: bytes | bytearray) -> int:
        taken = 0
        while taken < len(data) and not self._is_over:
            if self._left:
                step = min(self._left, len(data) - taken)
                self._left -= step
            else:
                end = data.find(b"\n", taken, taken + CHUNK_LINE)
                step = (end + 1 if end >= 0 else min(len(data), taken + CHUNK_LINE)) - taken
                self._line += data[taken : taken + step]
                if end >= 0:
                    self._read_line()
                elif len(self._line) >= CHUNK_LINE:
                    raise ProtocolError("a chunk of the body begins with a line that is too long")
            taken += step
        return taken

    def _read_line(self) -> None:
        line = bytes(self._line).rstrip(b"\r\n")
        self._line.clear()
        if self._is_last:
            self._is_over = True
            if line:
                raise ProtocolError("the body has trailers, which this server does not accept")
            return
        match = CHUNK_SIZE.fullmatch(line)
        if not match:
            raise ProtocolError("a chunk of the body begins without its size")
        size = int(match[1], 16)
        self._is_last = size == 0
        self._left = size + len(b"\r\n") if size else 0


def _body_of(scope: Scope) -> Body:
    headers = dict(scope["headers"])
    if b"transfer-encoding" in headers:
        return ChunkedBody()
    return Body(int(headers.get(b"content-length", 0)))


# A connection


class Phase(Enum):
    HANDSHAKE = auto()
    IDLE = auto()
    HEAD = auto()
    STARTING = auto()  # uvicorn has the head, and calls the application soon
    REQUEST = auto()
    REST = auto()
    LOST = auto()


class LimitedConnection(asyncio.Protocol):
    """Passes a client's bytes on to uvicorn's protocol, one request after another."""

    def __init__(
        self,
        address: str,
        raw: socket.socket,
        new_inner: Callable[["LimitedConnection"], asyncio.Protocol],
        on_change: Callable[["LimitedConnection"], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_change`: called when the connection becomes idle, busy, trusted or lost."""
        self.address, self._raw, self._new_inner = address, raw, new_inner
        self._on_change, self._clock = on_change, clock
        self.is_trusted = False
        self.phase = Phase.HANDSHAKE
        self.deadline = clock() + 2 * HANDSHAKE_SECONDS  # the event loop's own timeout comes first
        self._transport: asyncio.Transport | None = None
        self._waiting = bytearray()  # bytes that uvicorn did not get yet
        self._body = Body(0)
        self._moved = 0  # bytes since the deadline was last extended
        self._unsent = 0  # in the write buffer at the last sweep, if the client has to read
        self._rest = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)
        transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        self._inner = self._new_inner(self)
        self._inner.connection_made(transport)
        self._enter(Phase.HEAD, HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport:
            self._inner.connection_lost(exc)
        self._enter(Phase.LOST, math.inf)
        self._waiting.clear()

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def data_received(self, data: bytes) -> None:
        self._receive(data)

    def pause_writing(self) -> None:
        assert self._transport
        self._unsent, self._moved = self._transport.get_write_buffer_size(), 0
        self.deadline = self._clock() + PATIENCE_SECONDS
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._unsent = 0
        if self.phase is Phase.REQUEST:
            self._await_body()
        self._inner.resume_writing()

    # For the application

    def trust(self) -> None:
        """Keep this connection rather than those of strangers."""
        if not self.is_trusted:
            self.is_trusted = True
            self._on_change(self)

    def begin(self, scope: Scope) -> None:
        """The application has started to answer a request."""
        if self.phase is Phase.LOST:
            return
        self._body = _body_of(scope)
        self._enter(Phase.REQUEST, math.inf)
        self._await_body()
        self._receive(b"")

    def finish(self) -> None:
        """The application has answered a request."""
        if self.phase is Phase.LOST:
            return
        if self._body.is_complete:
            self._enter(Phase.IDLE, IDLE_SECONDS)
        else:
            self._rest = 0
            self._enter(Phase.REST, PATIENCE_SECONDS)
        self._receive(b"")

    # For the server

    def abort(self) -> None:
        if self._transport:
            self._transport.abort()
        else:
            with suppress(OSError):
                self._raw.shutdown(socket.SHUT_RDWR)  # ends the handshake

    def check(self, now: float) -> bool:
        """Whether the connection is within its deadline. Ends it otherwise."""
        if self._unsent and self._transport:
            left = self._transport.get_write_buffer_size()
            self._count_progress(self._unsent - left)
            self._unsent = left or 1
        if now < self.deadline:
            return True
        is_sending = self.phase is Phase.REQUEST and not self._unsent
        if is_sending and self._transport and not self._transport.is_reading():
            self.deadline = now + PATIENCE_SECONDS  # the server does not read: it is busy
            return True
        self.abort()
        return False

    def _enter(self, phase: Phase, seconds: float) -> None:
        self.phase, self._moved = phase, 0
        self.deadline = self._clock() + seconds
        self._on_change(self)

    def _await_body(self) -> None:
        seconds = math.inf if self._body.is_complete else PATIENCE_SECONDS
        self.deadline, self._moved = self._clock() + seconds, 0

    def _count_progress(self, moved: int) -> None:
        self._moved += moved
        if self._moved >= PROGRESS_BYTES:
            self._moved, self.deadline = 0, self._clock() + PATIENCE_SECONDS

    def _receive(self, data: bytes) -> None:
        """Pass on what belongs to the current request; the rest waits."""
        try:
            if self.phase in (Phase.REQUEST, Phase.REST):
                data = self._pass_body(bytes(self._waiting) + data if self._waiting else data)
                self._waiting.clear()
            self._waiting += data
            if self.phase is Phase.IDLE and self._waiting:
                self._enter(Phase.HEAD, HEAD_SECONDS)
            if self.phase is Phase.HEAD:
                self._pass_head()
            elif len(self._waiting) > (AHEAD_BYTES if self.phase is Phase.STARTING else HEAD_BYTES):
                raise ProtocolError("it sent more than the server reads ahead")
        except ProtocolError as error:
            log.debug("closed a connection from %s: %s", self.address, error)
            self.abort()

    def _pass_head(self) -> None:
        waiting = self._waiting
        start = len(waiting) - len(waiting.lstrip(b"\r\n"))
        end = waiting.find(HEAD_END, start)
        if (end if end >= 0 else len(waiting)) > HEAD_BYTES:
            self._refuse_head()
        elif end >= 0:
            head = bytes(waiting[: end + len(HEAD_END)])
            if head.count(b"\n") > HEAD_FIELDS + 2:
                self._refuse_head()
                return
            del waiting[: len(head)]
            self._enter(Phase.STARTING, PATIENCE_SECONDS)
            self._inner.data_received(head)

    def _refuse_head(self) -> None:
        assert self._transport
        self._transport.write(TOO_LARGE)
        self._transport.close()
        self._waiting.clear()

    def _pass_body(self, data: bytes) -> bytes:
        """Pass on the part of the data that belongs to the body. Returns what follows it."""
        taken = self._body.take(data)
        if not taken:
            return data
        self._inner.data_received(data[:taken])  # no copy if it is all of the data
        if self.phase is Phase.REST:
            self._rest += taken
            if self._rest > REST_BYTES:
                raise ProtocolError("it goes on sending a body that was refused")
        if not self._unsent:
            self._count_progress(taken)
        if self._body.is_complete and self.phase is Phase.REST:
            self._enter(Phase.IDLE, IDLE_SECONDS)
        elif self._body.is_complete and not self._unsent:
            self.deadline = math.inf
        return data[taken:]
