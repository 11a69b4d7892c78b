"""The HTTP port: uvicorn with bounded buffers; its certificate is checked before it listens."""

import contextlib
import ipaddress
import logging
import socket
import ssl
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import uvicorn
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from blocktrain.errors import ConfigError
from blocktrain.protocol.ring_keys import read_certificate
from blocktrain.serve.http.answer import AnswerEngine
from blocktrain.serve.http.app import ApiSettings, create_app

GRACE_SECONDS = 2  # for answers in progress after a stop signal
SEND_BUFFER_BYTES = 128 * 1024  # kernel memory for a client that does not read
MAX_CONNECTIONS = 2048

log = logging.getLogger(__name__)


class CertificateFiles(NamedTuple):
    """PEM files: the certificate with its chain, and its private key."""

    certificate: Path
    key: Path


def checked_certificate(
    certificate: Path | None, key: Path | None, clock: Callable[[], float] = time.time
) -> CertificateFiles | None:
    """The files of --tls-cert and --tls-key, if given; ConfigError if they cannot be served."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("--tls-cert and --tls-key go together: give both or neither")
    for file in (certificate, key):
        if not file.is_file():
            raise ConfigError(f"{file} does not exist or is not a file")
    _check_pair(certificate, key, datetime.fromtimestamp(clock(), UTC))
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        raise ConfigError(f"{certificate} and {key} cannot be used: {error.reason}") from None
    return CertificateFiles(certificate, key)


def _check_pair(certificate_file: Path, key_file: Path, now: datetime) -> None:
    certificate = read_certificate(certificate_file)
    try:
        key = load_pem_private_key(key_file.read_bytes(), password=None)
    except TypeError:
        raise ConfigError(f"{key_file} has a passphrase; give a key without one") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(f"{key_file} is not a private key in PEM") from None
    if certificate.public_key() != key.public_key():
        raise ConfigError(f"{key_file} is not the key of {certificate_file}")
    if certificate.not_valid_after_utc <= now:
        expiry = f"{certificate.not_valid_after_utc:%Y-%m-%d}"
        raise ConfigError(f"{certificate_file} expired on {expiry}")
    if certificate.not_valid_before_utc > now:
        start = f"{certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
        raise ConfigError(f"{certificate_file} is valid from {start} on; is this clock right?")


class NotifyingServer(uvicorn.Server):
    """Calls `on_start` once it accepts requests. On a stop signal it first closes the admission
    queue, which ends answers in progress with an error message instead of cutting them off."""

    def __init__(self, config: uvicorn.Config, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.warning("stopping")
        self.config.app.state.admission.close()  # type: ignore[union-attr]
        await super().shutdown(sockets)


async def serve(
    engine: AnswerEngine,
    settings: ApiSettings,
    listener: socket.socket,
    tls: CertificateFiles | None = None,
    on_start: Callable[[], None] = lambda: None,
) -> None:
    """Answer requests until a stop signal, on the engine's event loop."""
    if not settings.keys:
        log.warning("no API key is set: anyone who can reach this port can use the model")
    if is_readable_in_transit(listener.getsockname()[0], tls):
        log.warning(
            "no TLS: API keys and texts travel unencrypted; set --tls-cert and --tls-key, or put"
            " a proxy with TLS in front"
        )
    await web_server(engine, settings, listener, tls, on_start).serve(sockets=[listener])


def is_readable_in_transit(host: str, tls: CertificateFiles | None) -> bool:
    """Whether others can read what is sent to this address of ours."""
    return tls is None and not ipaddress.ip_address(host).is_loopback


def web_server(
    engine: AnswerEngine,
    settings: ApiSettings,
    listener: socket.socket,
    tls: CertificateFiles | None = None,
    on_start: Callable[[], None] = lambda: None,
) -> uvicorn.Server:
    bound_send_buffers(listener, settings.patience)
    config = uvicorn.Config(
        create_app(engine, settings),
        ws="none",
        log_config=None,  # the application's own set-up
        log_level="warning",
        access_log=False,  # app.RequestIds writes one
        timeout_graceful_shutdown=GRACE_SECONDS,
        limit_concurrency=MAX_CONNECTIONS,
        server_header=False,
        proxy_headers=False,  # clients are known by key, not by address
        ssl_certfile=tls and tls.certificate,
        ssl_keyfile=tls and tls.key,
    )
    return NotifyingServer(config, on_start)


def bound_send_buffers(listener: socket.socket, patience: float) -> None:
    """Accepted connections inherit both: a small buffer, and an end if nothing is acknowledged."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    user_timeout = getattr(socket, "TCP_USER_TIMEOUT", None)
    if user_timeout is not None:
        with contextlib.suppress(OSError):  # a system that has the name but not the option
            listener.setsockopt(socket.IPPROTO_TCP, user_timeout, int(patience * 1000))
