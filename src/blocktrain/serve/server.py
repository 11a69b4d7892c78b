"""A server as a process: a socket, TLS where the operator has a certificate, the routes."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from blocktrain.serve.answering import Engine
from blocktrain.serve.api import Settings, create_app
from blocktrain.serve.https import in_the_clear

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
    engine: Engine,
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
    engine: Engine,
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
        log_level="warning",
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
