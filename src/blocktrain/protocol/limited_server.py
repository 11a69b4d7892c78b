"""An HTTP server that strangers may reach: uvicorn behind limits on connections.

A `LimitedServer` accepts connections itself. Their number is limited in total and per address.
Beyond a limit, the oldest connection that is not trusted is closed, then the one that has been idle
longest; the application trusts those that it has authorized. So a stranger who holds many
connections does not lock anybody out. `LimitedConnection` limits what each of them may do.
"""

import asyncio
import logging
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from blocktrain.protocol.limited_connection import (
    HANDSHAKE_SECONDS,
    IDLE_SECONDS,
    LimitedConnection,
    Phase,
)
from blocktrain.protocol.limits import RateLimiter, network_of

log = logging.getLogger(__name__)

NEW_SHARE = 1 / 8  # of an address's connections that it may open anew in a second
SWEEP_SECONDS = 1.0
ACCEPT_PAUSE = 0.1  # after a failure, such as too many open files
REPORT_SECONDS = 60.0
SPARE_FILES = 256  # open files that are not connections
STATE = "connection"  # under this name, the application finds the connection of a request


@dataclass(frozen=True)
class ConnectionLimits:
    total: int
    per_address: int

    @classmethod
    def fitting(cls, total: int, per_address: int | None = None) -> "ConnectionLimits":
        """At most `total`, and no more than this process may have open files. `per_address`:
        a quarter of the total by default."""
        total = min(total, max(16, _most_open_files(total + SPARE_FILES) - SPARE_FILES))
        return cls(total, per_address or max(8, total // 4))


def _most_open_files(wanted: int) -> int:
    try:
        import resource
    except ImportError:  # Windows
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else soft


class Connections:
    """The open connections, and which to close if there are too many."""

    def __init__(self, limits: ConnectionLimits, clock: Callable[[], float] = time.monotonic):
        self._limits, self._clock = limits, clock
        self._places: dict[str, _Place] = {}  # by address
        self._count = 0
        most = limits.per_address
        self._arrivals = RateLimiter(clock, most * NEW_SHARE, most)
        self.counts: Counter[str] = Counter()  # since the last report

    def __len__(self) -> int:
        return self._count

    def admit(self, address: str) -> bool:
        """Make room for one more connection from this address. False: it must be refused."""
        if not self._arrivals.allows(address):
            self.counts["refused"] += 1
            return False
        place = self._places.get(address)
        has_room = place is None or len(place.all) < self._limits.per_address
        if not has_room or self._count >= self._limits.total:
            largest = sorted(self._places.values(), key=lambda each: -len(each.all))
            if not any(each.close_one() for each in (largest if has_room else [place]) if each):
                self.counts["refused"] += 1
                return False
            self.counts["closed to make room"] += 1
        return True

    def add(self, connection: LimitedConnection) -> None:
        self._places.setdefault(connection.address, _Place()).add(connection)
        self._count += 1

    def update(self, connection: LimitedConnection) -> None:
        """After the connection became idle, busy or trusted."""
        if place := self._places.get(connection.address):
            place.update(connection)

    def remove(self, connection: LimitedConnection) -> None:
        place = self._places.get(connection.address)
        if place and place.remove(connection):
            self._count -= 1
            if not place.all:
                del self._places[connection.address]

    def sweep(self) -> None:
        """End the connections that have exceeded their deadline."""
        now = self._clock()
        for place in list(self._places.values()):
            late = [connection for connection in list(place.all) if not connection.check(now)]
            self.counts["timed out"] += len(late)
            for connection in late:
                self.remove(connection)


class _Place:
    """The connections from one address. Dicts keep the order of insertion: the oldest first."""

    def __init__(self) -> None:
        self.all: dict[LimitedConnection, None] = {}
        self._strangers: dict[LimitedConnection, None] = {}
        self._idle: dict[LimitedConnection, None] = {}

    def add(self, connection: LimitedConnection) -> None:
        self.all[connection] = self._strangers[connection] = None

    def update(self, connection: LimitedConnection) -> None:
        if connection not in self.all:
            return
        if connection.is_trusted:
            self._strangers.pop(connection, None)
        self._idle.pop(connection, None)
        if connection.is_trusted and connection.phase is Phase.IDLE:
            self._idle[connection] = None

    def remove(self, connection: LimitedConnection) -> bool:
        """False if it was removed before."""
        self._strangers.pop(connection, None)
        self._idle.pop(connection, None)
        return self.all.pop(connection, self) is None

    def close_one(self) -> bool:
        """Close the oldest stranger's connection, or the one that has been idle longest."""
        victim = next(iter(self._strangers or self._idle), None)
        if victim is None:
            return False
        self._strangers.pop(victim, None)
        self._idle.pop(victim, None)
        victim.abort()
        return True


# The server


class LimitedServer(uvicorn.Server):
    """A uvicorn server for an application, with TLS if a context is given. Its listening sockets
    are given to `run` or `serve`."""

    def __init__(
        self,
        app: ASGIApp,
        limits: ConnectionLimits,
        tls: ssl.SSLContext | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                partial(_answer, app),
                interface="asgi3",
                log_config=None,  # keep the application's configuration
                access_log=False,
                server_header=False,
                proxy_headers=False,  # clients are known by their key or token
                ws="none",
                timeout_keep_alive=2 * IDLE_SECONDS,  # a connection ends earlier by itself
                **options,
            )
        )
        self._tls = tls
        self.connections = Connections(limits)
        self._tasks: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])  # the application, without a listener of uvicorn's
        if self.started:
            for listener in sockets or ():
                self._start(self._accept(listener))
            self._start(self._sweep())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await super().shutdown(sockets)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        while True:
            try:
                raw, peer = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("cannot accept a connection: %s", error.strerror)
                await asyncio.sleep(ACCEPT_PAUSE)
                continue
            address = network_of(peer[0])
            if self.connections.admit(address):
                self._start(self._open(raw, address))
            else:
                raw.close()
            await asyncio.sleep(0)  # so that arrivals do not stop everything else

    async def _open(self, raw: socket.socket, address: str) -> None:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = LimitedConnection(address, raw, self._new_inner, self._on_change)
        self.connections.add(connection)
        seconds = HANDSHAKE_SECONDS if self._tls else None
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                lambda: connection, raw, ssl=self._tls, ssl_handshake_timeout=seconds
            )
        except OSError as error:  # SSLError is one too
            log.debug("no TLS connection with %s: %s", address, error)
            self.connections.remove(connection)
            raw.close()

    def _new_inner(self, connection: LimitedConnection) -> asyncio.Protocol:
        protocol: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config,
            server_state=self.server_state,
            app_state={**self.lifespan.state, STATE: connection},
        )
        return protocol

    def _on_change(self, connection: LimitedConnection) -> None:
        if connection.phase is Phase.LOST:
            self.connections.remove(connection)
        else:
            self.connections.update(connection)

    async def _sweep(self) -> None:
        report_at = time.monotonic()
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.connections.sweep()
            counts = self.connections.counts
            if counts["refused"] + counts["closed to make room"] and time.monotonic() > report_at:
                report_at = time.monotonic() + REPORT_SECONDS
                told = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
                log.warning("too many connections (%d are open): %s", len(self.connections), told)
                counts.clear()


async def _answer(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """The application, whose connection knows when it begins and ends to answer."""
    if scope["type"] != "http":
        await app(scope, receive, send)
        return
    connection: LimitedConnection = scope["state"][STATE]
    connection.begin(scope)
    try:
        await app(scope, receive, send)
    finally:
        connection.finish()


def connection_of(scope: Scope) -> LimitedConnection:
    """The connection of a request."""
    connection: LimitedConnection = scope["state"][STATE]
    return connection
