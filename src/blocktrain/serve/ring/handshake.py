"""How two members of a ring connect: one dials, the other listens, both send a HELLO.

Greetings are bounded in time and number, so port scans and half-open connections do no harm. With
TLS a certificate proves the peer's role and name; without it, its HELLO is believed.
"""

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from blocktrain.errors import BlocktrainError, RefusedError, UnreachableError, UntrustedError
from blocktrain.protocol.addresses import join_host_port, split_host_port
from blocktrain.protocol.ring_keys import member_of
from blocktrain.serve.ring.connection import (
    DEFAULT_TERMS,
    FAREWELL_SECONDS,
    Hello,
    Peer,
    RingConnection,
    Terms,
)

MAX_GREETINGS = 64  # at once; a further one cancels the oldest
ACCEPT_PAUSE_SECONDS = 0.1  # after an error, such as too many open files

Check = Callable[[Hello], str | None]
Accept = Callable[[RingConnection], Awaitable[None]]

log = logging.getLogger(__name__)


def anyone(hello: Hello) -> str | None:
    return None


async def dial(
    address: str,
    context: ssl.SSLContext | None,
    hello: Hello,
    *,
    roles: Collection[str],
    check: Check = anyone,
    terms: Terms = DEFAULT_TERMS,
) -> RingConnection:
    """A greeted connection to a peer with one of these roles.

    `check` returns what is wrong with the peer's HELLO, or None.
    """
    host, port = split_host_port(address)
    loop = asyncio.get_running_loop()
    connection = RingConnection(terms, address)
    try:
        async with asyncio.timeout(terms.greeting_seconds):
            await loop.create_connection(
                lambda: connection, host, port, ssl=context, **_bounds(context)
            )
            connection.greet(hello)
            await _introduced(connection, roles, check)
            return connection
    except TimeoutError:
        seconds = terms.greeting_seconds
        raise UnreachableError(f"{address} did not answer within {seconds:g} s") from None
    except ssl.SSLError as error:
        raise UntrustedError(f"{address} does not belong to this ring: {error}") from None
    except (OSError, UnicodeError) as error:
        raise UnreachableError(f"{address} cannot be reached: {_reason(error)}") from None


class RingListener:
    """Accepts connections until it is closed, which closes them too.

    `accept` serves one connection; when it returns, the connection is closed.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext | None,
        hello: Callable[[], Hello],
        accept: Accept,
        *,
        roles: Collection[str],
        check: Check = anyone,
        terms: Terms = DEFAULT_TERMS,
        max_connections: int = 256,
    ) -> None:
        listener.setblocking(False)
        self._listener, self._context, self._terms = listener, context, terms
        self._hello, self._accept, self._roles, self._check = hello, accept, roles, check
        self._max_connections = max_connections
        self._greetings: dict[asyncio.Task[None], None] = {}  # oldest first
        self._served: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept_all())

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    async def close(self) -> None:
        tasks = [self._accepting, *self._greetings, *self._served]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def _accept_all(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(self._listener)
            except OSError as error:
                log.warning("cannot accept a connection: %s", error)
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            if len(self._served) >= self._max_connections:
                accepted.close()
                continue
            if len(self._greetings) >= MAX_GREETINGS:
                next(iter(self._greetings)).cancel()
            greeting = asyncio.create_task(self._meet(accepted, join_host_port(*address[:2])))
            self._greetings[greeting] = None
            greeting.add_done_callback(self._over)

    async def _meet(self, accepted: socket.socket, address: str) -> None:
        loop = asyncio.get_running_loop()
        connection = RingConnection(self._terms, address)
        try:
            async with asyncio.timeout(self._terms.greeting_seconds):
                await loop.connect_accepted_socket(
                    lambda: connection, accepted, ssl=self._context, **_bounds(self._context)
                )
                await _introduced(connection, self._roles, self._check, self._hello)
        except (OSError, BlocktrainError) as error:
            log.info("refused a connection from %s: %s", address, error)
            return
        task = asyncio.create_task(self._serve(connection))
        self._served.add(task)
        task.add_done_callback(self._over)

    async def _serve(self, connection: RingConnection) -> None:
        try:
            await self._accept(connection)
        except BlocktrainError as error:
            log.info("%s", error)
        finally:
            connection.close()
            await connection.wait_closed()

    def _over(self, task: asyncio.Task[None]) -> None:
        self._greetings.pop(task, None)
        self._served.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("a connection failed", exc_info=error)


async def _introduced(
    connection: RingConnection,
    roles: Collection[str],
    check: Check,
    answer: Callable[[], Hello] | None = None,
) -> None:
    """Returns once both sides have sent a HELLO; `answer` makes the listener's."""
    try:
        hello = await connection.greeted()
        peer = _peer(connection, hello)
        problem = check(hello) if peer.role in roles else f"a {peer.role} may not connect here"
        if problem:
            raise RefusedError("refused", problem)
        if answer:
            connection.greet(answer())
        connection.begin(peer, hello)
    except BlocktrainError as error:
        connection.refuse(error)
        raise
    except BaseException:
        connection.close()
        raise


def _peer(connection: RingConnection, hello: Hello) -> Peer:
    certificate = connection.certificate()
    if certificate:
        role, name = member_of(certificate)
    else:
        role, name = (str(hello.get(key, "unknown")) for key in ("role", "name"))
    return Peer(role, name, connection.peer.address)


def _reason(error: Exception) -> str:
    """The system's own words; asyncio's would repeat the address."""
    number = getattr(error, "errno", None) or 0
    return os.strerror(number) if number > 0 else str(getattr(error, "strerror", None) or error)


def _bounds(context: ssl.SSLContext | None) -> dict[str, Any]:
    return {"ssl_shutdown_timeout": FAREWELL_SECONDS} if context else {}
