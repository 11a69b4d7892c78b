"""TLS of the HTTP port, by a certificate that the operator has: checked, and what is wrong with it
told in words, before anybody connects.

Clients are anyone's, so TLS 1.2 is taken too. Knows nothing of the ring's own authority (`keys`).
"""

import asyncio
import contextlib
import ipaddress
import logging
import socket
import ssl
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import uvicorn
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from blocktrain.errors import ConfigError
from blocktrain.protocol.ring_keys import read_certificate
from blocktrain.serve.http.answer import AnswerEngine
from blocktrain.serve.http.app import Settings, create_app


def https_context(
    certificate: Path | None, key: Path | None, clock: Callable[[], float] = time.time
) -> ssl.SSLContext | None:
    """Of a certificate (with those between it and its authority, in one file) and its key; None
    where neither is given."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("--tls-cert and --tls-key go together: give both, or neither")
    for file in (certificate, key):
        if not file.is_file():
            raise ConfigError(f"{file} is missing, or no file")
    _check(certificate, key, datetime.fromtimestamp(clock(), UTC))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        raise ConfigError(f"{certificate} and {key} cannot be used: {error.reason}") from None
    return context


def in_the_clear(host: str, context: ssl.SSLContext | None) -> bool:
    """Whether what is said to this address of ours can be read on its way."""
    return context is None and not ipaddress.ip_address(host).is_loopback


def _check(certificate: Path, key: Path, now: datetime) -> None:
    found = read_certificate(certificate)
    try:
        private = load_pem_private_key(key.read_bytes(), password=None)
    except TypeError:
        raise ConfigError(f"{key} is locked by a passphrase; give one that is not") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(f"{key} is no private key") from None
    if found.public_key() != private.public_key():
        raise ConfigError(f"{key} is not the key of {certificate}")
    if found.not_valid_after_utc <= now:
        raise ConfigError(f"{certificate} expired on {found.not_valid_after_utc:%Y-%m-%d}")
    if found.not_valid_before_utc > now:
        begins = f"{found.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
        raise ConfigError(f"{certificate} is not valid before {begins}; is this clock right?")


log = logging.getLogger(__name__)

GOODBYE_SECONDS = 2  # for answers under way when a signal says stop
SEND_BUFFER = 128 * 1024  # a client that reads nothing must not have megabytes kept for it
CONNECTIONS = 2048


class TimedHeaders(HttpToolsProtocol):
    """A connection that says nothing, or never ends its headers, is closed. Bodies and answers
    have their own limits."""

    seconds: float
    _due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_headers()

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        self._stop_waiting()
        self._due = self.loop.call_later(self.seconds, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._due:
            self._due.cancel()


class Announcing(uvicorn.Server):
    """Tells when it answers, from when on a signal stops it in good order; and the clients of
    answers under way that it stops, instead of cutting them off."""

    def __init__(self, config: uvicorn.Config, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.warning("stopping")
        self.config.app.state.gate.close()  # type: ignore[union-attr]
        await super().shutdown(sockets)


async def serve(
    engine: AnswerEngine,
    settings: Settings,
    listener: socket.socket,
    tls: ssl.SSLContext | None = None,
    on_start: Callable[[], None] = lambda: None,
) -> None:
    """Answer until a signal says stop, on the loop that the engine runs on."""
    if not settings.keys:
        log.warning("no API key is set: whoever reaches this port may ask")
    if in_the_clear(listener.getsockname()[0], tls):
        log.warning(
            "no TLS: API keys and texts travel in the clear (--tls-cert and --tls-key end that)"
        )
    await web_server(engine, settings, listener, tls, on_start).serve(sockets=[listener])


def web_server(
    engine: AnswerEngine,
    settings: Settings,
    listener: socket.socket,
    tls: ssl.SSLContext | None = None,
    on_start: Callable[[], None] = lambda: None,
) -> uvicorn.Server:
    bound_what_is_kept(listener, settings.patience)

    class Protocol(TimedHeaders):
        seconds = settings.patience

    config = uvicorn.Config(
        create_app(engine, settings),
        http=Protocol,
        ws="none",
        log_config=None,  # uvicorn logs through the handlers of this process
        access_log=False,
        timeout_graceful_shutdown=GOODBYE_SECONDS,
        limit_concurrency=CONNECTIONS,
        server_header=False,
        proxy_headers=False,  # who asks is known by key, not by address
    )
    config.load()
    config.ssl = tls
    return Announcing(config, on_start)


def bound_what_is_kept(listener: socket.socket, patience: float) -> None:
    """Connections inherit it: little is buffered for a client, and none of it for ever."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    user_timeout = getattr(socket, "TCP_USER_TIMEOUT", None)
    if user_timeout is not None:
        with contextlib.suppress(OSError):  # a system that has the name but not the option
            listener.setsockopt(socket.IPPROTO_TCP, user_timeout, int(patience * 1000))
