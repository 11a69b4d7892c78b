"""A connection to a coordinator: uvicorn's own, with two differences.

What a worker sends is not copied on its way through, and a connection that nobody uses stays open
for longer than workers keep theirs, as long as there are not many: opening one takes a worker far
away two round trips, and both sides two milliseconds of a processor.
"""

import logging
import re
import socket
import ssl
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from blocktrain.coordinator.api import create_app
from blocktrain.coordinator.service import Service

IDLE_SECONDS = 75
MANY = 256  # connections, each of which takes 50 KB of memory or more
IDLE_SECONDS_OF_MANY = 5


class HttpConnection(HttpToolsProtocol):
    def on_body(self, body: bytes) -> None:
        if not self.cycle.body:
            self.cycle.body = b""  # type: ignore[assignment]  # to which a part is added as it is
        super().on_body(body)

    def on_response_complete(self) -> None:
        many = len(self.connections) > MANY
        self.timeout_keep_alive = IDLE_SECONDS_OF_MANY if many else IDLE_SECONDS
        super().on_response_complete()


GOODBYE_SECONDS = 2  # event streams never end by themselves
HOST_NAME = re.compile(r"[A-Za-z0-9.-]{1,253}")  # others exist, but no certificate can name them


def own_addresses() -> list[str]:
    """Names and addresses this machine may be reached at."""
    found = ["localhost", "127.0.0.1"]
    if HOST_NAME.fullmatch(socket.gethostname()):
        found.append(socket.gethostname())
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: asks which interface leads outside
            found.append(probe.getsockname()[0])
        except OSError:
            pass
    return list(dict.fromkeys(found))


def own_tls(service: Service, hosts: Sequence[str]) -> ssl.SSLContext:
    """By a fresh certificate of the run's authority, for this process alone: whoever had its key
    would be a coordinator of the run, so nothing of it stays on the disk."""
    issued = service.run.authority.issue_server(hosts, service.run.clock())
    with tempfile.TemporaryDirectory(prefix="blocktrain-") as scratch:
        certificate, key = Path(scratch) / "server.pem", Path(scratch) / "server.key"
        certificate.write_text(issued.cert_pem)
        key.touch(mode=0o600)
        key.write_text(issued.key_pem)
        return tls_of(certificate, key)


def tls_of(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(certificate, key)
    return context


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_stop = on_stop

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._on_stop()
        super().handle_exit(sig, frame)


def server_config(app: Starlette) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=HttpConnection,
        log_config=None,  # uvicorn logs through the handlers of this process
        access_log=logging.getLogger("uvicorn.access").isEnabledFor(logging.INFO),
        timeout_graceful_shutdown=GOODBYE_SECONDS,
        server_header=False,
        proxy_headers=False,  # who asks is known by token, not by address
    )


def serve(
    service: Service,
    listener: socket.socket,
    tls: ssl.SSLContext | None,
    on_stop: Callable[[], None] = lambda: None,
) -> None:
    """Answer until a signal says stop; `on_stop` is told so before the last answers are given."""
    config = server_config(create_app(service))
    config.load()
    config.ssl = tls  # it knows none but from files
    service.start()
    try:
        _Server(config, on_stop).run(sockets=[listener])
    finally:
        service.stop()
