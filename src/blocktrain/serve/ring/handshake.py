"""How two members of a ring meet: one dials an address, the other listens, both say HELLO.

Everything until the greeting is done takes bounded time and happens in bounded numbers, whoever
calls: port scans, half-open connections and peers that never speak are dropped. With TLS the
certificate says who the other is; without, its HELLO is believed (`role` and `name`). Knows
nothing of what is said afterwards.
"""

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from blocktrain.errors import (
    BlocktrainError,
    RefusedError,
    UnreachableError,
    UntrustedError,
)
from blocktrain.protocol.addresses import join_host_port, split_host_port
from blocktrain.protocol.ring_keys import member_of
from blocktrain.serve.ring.connection import (
    FAREWELL_SECONDS,
    USUAL,
    Hello,
    Peer,
    RingConnection,
    Terms,
)

MOST_GREETINGS = 64  # at once; the oldest makes room
BREATH_SECONDS = 0.1  # before accepting again, when the machine has no room

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
    terms: Terms = USUAL,
) -> RingConnection:
    """A greeted connection to `host:port`, whoever answers there having one of the roles.

    `check` says what is wrong with the other's HELLO, if anything.
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
        patience = f"{terms.greeting_seconds:g} s"
        raise UnreachableError(f"{address} did not answer within {patience}") from None
    except ssl.SSLError as error:
        raise UntrustedError(f"{address} is not of this ring: {error}") from None
    except (OSError, UnicodeError) as error:
        raise UnreachableError(f"{address} cannot be reached: {_plainly(error)}") from None


class RingListener:
    """Accepts connections until it is closed, and closes them with itself.

    `accept` is a connection's life: when it returns, the connection is closed.
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
        terms: Terms = USUAL,
        most_connections: int = 256,
    ) -> None:
        listener.setblocking(False)
        self._listener, self._context, self._terms = listener, context, terms
        self._hello, self._accept, self._roles, self._check = hello, accept, roles, check
        self._most_connections = most_connections
        self._greetings: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._lives: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept_all())

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    async def close(self) -> None:
        tasks = [self._accepting, *self._greetings, *self._lives]
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
                await asyncio.sleep(BREATH_SECONDS)
                continue
            if len(self._lives) >= self._most_connections:
                accepted.close()
                continue
            if len(self._greetings) >= MOST_GREETINGS:
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
            log.info("%s was not let in: %s", address, error)
            return
        life = asyncio.create_task(self._live(connection))
        self._lives.add(life)
        life.add_done_callback(self._over)

    async def _live(self, connection: RingConnection) -> None:
        try:
            await self._accept(connection)
        except BlocktrainError as error:
            log.info("%s", error)
        finally:
            connection.close()
            await connection.wait_closed()

    def _over(self, task: asyncio.Task[None]) -> None:
        self._greetings.pop(task, None)
        self._lives.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("a connection failed", exc_info=error)


async def _introduced(
    connection: RingConnection,
    roles: Collection[str],
    check: Check,
    answer: Callable[[], Hello] | None = None,
) -> None:
    """Returns when both sides have said HELLO; `answer` is what to say back."""
    try:
        hello = await connection.greeted()
        peer = _peer(connection, hello)
        wrong = check(hello) if peer.role in roles else f"a {peer.role} is not expected here"
        if wrong:
            raise RefusedError("refused", wrong)
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
        role, name = (str(hello.get(key, "nobody")) for key in ("role", "name"))
    return Peer(role, name, connection.peer.address)


def _plainly(error: Exception) -> str:
    """What the system says; asyncio would name the address once more."""
    number = getattr(error, "errno", None) or 0
    return os.strerror(number) if number > 0 else str(getattr(error, "strerror", None) or error)


def _bounds(context: ssl.SSLContext | None) -> dict[str, Any]:
    return {"ssl_shutdown_timeout": FAREWELL_SECONDS} if context else {}
