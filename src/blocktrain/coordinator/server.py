"""A coordinator as a process: a socket, a certificate, the routes, the rounds."""

import os
import re
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from types import FrameType

import uvicorn

from blocktrain.coordinator.api import create_app
from blocktrain.coordinator.service import Service

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


def write_certificate(service: Service, hosts: Sequence[str], folder: Path) -> tuple[Path, Path]:
    """A fresh certificate of the run's authority, for this process."""
    issued = service.run.authority.issue_server(hosts, service.run.clock())
    folder.mkdir(parents=True, exist_ok=True)
    certificate, key = (folder / f"server-{os.getpid()}.{kind}" for kind in ("pem", "key"))
    certificate.write_text(issued.cert_pem)
    key.touch(mode=0o600)
    key.write_text(issued.key_pem)
    return certificate, key


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_stop = on_stop

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._on_stop()
        super().handle_exit(sig, frame)


def serve(
    service: Service,
    listener: socket.socket,
    tls: tuple[Path, Path] | None,
    on_stop: Callable[[], None] = lambda: None,
) -> None:
    """Answer until a signal says stop; `on_stop` is told so before the last answers are given."""
    config = uvicorn.Config(
        create_app(service),
        log_level="warning",
        access_log=False,
        ssl_certfile=str(tls[0]) if tls else None,
        ssl_keyfile=str(tls[1]) if tls else None,
        timeout_graceful_shutdown=GOODBYE_SECONDS,
        server_header=False,
        proxy_headers=False,  # who asks is known by token, not by address
    )
    config.load()
    if config.ssl:
        config.ssl.minimum_version = ssl.TLSVersion.TLSv1_3
    service.start()
    try:
        _Server(config, on_stop).run(sockets=[listener])
    finally:
        service.stop()
