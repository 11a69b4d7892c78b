"""How two members of a ring connect: one dials, the other listens, and both send a HELLO, which
says what they must agree on, above all their model.

Handshakes are limited in time and number, so port scans and half-open connections do no harm. With
TLS, a certificate proves the peer's role and name; without it, its HELLO is trusted, as far as its
form is right.
"""

import asyncio
import hashlib
import json
import logging
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from blocktrain.config import Config, stored_values
from blocktrain.errors import (
    BlocktrainError,
    ConfigError,
    RefusedError,
    UnreachableError,
    UntrustedError,
)
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

RING_VERSION = 3  # version of the messages after the HELLO
LARGEST_ADDED_UP = 256  # largest vocabulary whose log-probabilities are all sent
MAX_GREETINGS = 64  # concurrent; one more cancels the oldest
ACCEPT_PAUSE_SECONDS = 0.1  # after an error, such as too many open files
Check = Callable[[Hello], str | None]
Accept = Callable[[RingConnection], Awaitable[None]]
log = logging.getLogger(__name__)


async def dial(
    address: str,
    context: ssl.SSLContext | None,
    hello: Hello,
    *,
    roles: Collection[str],
    check: Check,
    terms: Terms = DEFAULT_TERMS,
) -> RingConnection:
    """Connect to a peer with one of these roles, and exchange HELLOs.

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
        raise UnreachableError(f"cannot reach {address}: {_reason(error)}") from None


class RingListener:
    """Accepts connections until it is closed; then it closes them too.

    `accept` serves one connection, which is closed when it returns.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext | None,
        hello: Callable[[], Hello],
        accept: Accept,
        *,
        roles: Collection[str],
        check: Check,
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
    """Check the peer's HELLO, and send this side's if `answer` (the listener's) is given. Returns
    once both sides have sent theirs."""
    try:
        hello = await connection.greeting
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
    """The system's error text, without the address that asyncio adds."""
    number = getattr(error, "errno", None) or 0
    return os.strerror(number) if number > 0 else str(getattr(error, "strerror", None) or error)


def _bounds(context: ssl.SSLContext | None) -> dict[str, Any]:
    return {"ssl_shutdown_timeout": FAREWELL_SECONDS} if context else {}


def chosen_readout(config: Config, option: str) -> str:
    """The ring's readout for the option `auto`, `final` or `product`."""
    tokens = config.vocabulary.size
    if config.kind.last_block_predicts or config.block_count == 1:
        return "final"
    if option == "product" and tokens > LARGEST_ADDED_UP:
        raise ConfigError(
            f"--readout product would send the log-probabilities of all {tokens} tokens to every"
            " stage, which is too much; use --readout final, or `blocktrain generate --readout"
            " product` on one machine"
        )
    return config.default_readout if option == "auto" else option


def model_hello(config: Config, role: str, name: str, readout: str) -> Hello:
    return {
        "role": role,
        "name": name,
        "ring": RING_VERSION,
        "settings": settings_fingerprint(config),
        "tokenizer": config.vocabulary.digest,
        "readout": readout,
    }


def mismatch(own: Hello, other: Hello) -> str | None:
    """Why two members of a ring cannot work together, worded for both."""
    ours, theirs = own["role"], other.get("role")
    if other.get("ring") != own["ring"]:
        return (
            f"{theirs} and {ours} are different releases; use the same release of blocktrain on"
            " all hosts"
        )
    if not isinstance(other.get("name"), str):
        return f"the {theirs}'s HELLO has no name"
    if other.get("tokenizer") != own["tokenizer"]:
        return (
            f"the {theirs} has tokenizer {_short(other.get('tokenizer'))}, the {ours} has"
            f" {_short(own['tokenizer'])}; copy the same run to both"
        )
    if other.get("settings") != own["settings"]:
        return f"{theirs} and {ours} have different models; copy the same run to both"
    if other.get("readout") != own["readout"]:
        return (
            f"the {theirs} has --readout {_short(other.get('readout'))}, the {ours} --readout"
            f" {own['readout']}; start both with the same"
        )
    return None


def stage_mismatch(own: Hello, weights: Sequence[str], stage: Hello) -> str | None:
    """Why a router with these weight fingerprints of all blocks cannot use a stage."""
    listed = stage.get("blocks")
    blocks = listed if isinstance(listed, list) else []
    first = blocks[0] if blocks else None
    if problem := mismatch(own, stage):
        return problem
    if type(first) is not int or first < 1 or blocks != list(range(first, first + len(blocks))):
        return "the stage must name consecutive blocks after block 0"
    if stage.get("weights") != list(weights[first : first + len(blocks)]):
        return "the stage has another version of the model; copy the same run to both"
    return None if isinstance(stage.get("address"), str) else "the stage must name its address"


def settings_fingerprint(config: Config) -> str:
    """A hash of the settings that define the model, not its training.

    A setting that a later release adds is left out while it has its default, so that stages of both
    releases work together.
    """
    values = stored_values(config)
    defining = [values["model"], values["objective"], values["train"]["seed"]]
    if config.vocab.sha256:
        defining.append({**values["vocab"], "bytes_per_token": 0})
    return hashlib.sha256(json.dumps(defining, sort_keys=True).encode()).hexdigest()[:16]


def _short(digest: object) -> str:
    return str(digest)[:12]
