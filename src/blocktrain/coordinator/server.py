"""A coordinator's HTTP server: the application, error responses and TLS."""

import json
import logging
import re
import socket
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from secrets import token_hex
from types import FrameType

from anyio import to_thread
from sqlalchemy.exc import SQLAlchemyError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from blocktrain.coordinator.api import ENDPOINTS
from blocktrain.coordinator.control import OUTDATED
from blocktrain.coordinator.endpoints import describe
from blocktrain.coordinator.executor import UNREACHABLE, LedgerUnreachableError
from blocktrain.coordinator.page_api import page_routes
from blocktrain.coordinator.run import Run
from blocktrain.coordinator.service import Service
from blocktrain.errors import (
    BlocktrainError,
    ConfigError,
    MissingChunkError,
    NotFoundError,
    RefusedError,
)
from blocktrain.protocol.limited_server import ConnectionLimits, LimitedServer
from blocktrain.protocol.messages import CODE_OF, STATUS_OF, Refusal

log = logging.getLogger(__name__)

THREADS = 20  # fewer than the ledger's connections, so that one is left for the ledger thread
SHUTDOWN_SECONDS = 2  # event streams do not end by themselves
CLIENT_GONE = 499
UNAVAILABLE = "the coordinator cannot do this now, and its log says why; try again later"
HOST_NAME = re.compile(r"[A-Za-z0-9.-]{1,253}")  # what a certificate can name


def create_app(service: Service) -> Starlette:
    @asynccontextmanager
    async def lifespan(starlette: Starlette) -> AsyncIterator[None]:
        to_thread.current_default_thread_limiter().total_tokens = THREADS
        service.executor.start()
        try:
            yield
        finally:
            service.executor.stop()

    document = describe(ENDPOINTS)
    middleware = [Middleware(BaseHTTPMiddleware, dispatch=log_request)]
    return Starlette(
        routes=[
            *(endpoint.route(service) for endpoint in ENDPOINTS),
            Route("/openapi.json", lambda request: JSONResponse(document)),
            *page_routes(),
        ],
        exception_handlers={
            ClientDisconnect: _client_gone,
            **dict.fromkeys((BlocktrainError, SQLAlchemyError, HTTPException, Exception), _refusal),
        },
        middleware=middleware if log.isEnabledFor(logging.DEBUG) else [],
        lifespan=lifespan,
    )


async def _client_gone(request: Request, error: Exception) -> Response:
    log.info("%s %s: the client closed the connection", request.method, request.url.path)
    return Response(status_code=CLIENT_GONE)  # which nobody receives


async def log_request(request: Request, call_next: RequestResponseEndpoint) -> Response:
    began, name = time.monotonic(), token_hex(4)
    response = await call_next(request)
    response.headers["x-request-id"] = name
    milliseconds = 1000 * (time.monotonic() - began)
    line = (request.method, request.url.path, response.status_code, milliseconds)
    log.debug("%s %s: %d in %.1f ms", *line, extra={"request": name})
    return response


async def _refusal(request: Request, error: Exception) -> Response:
    """The error response to a failed request."""
    status = None
    match error:
        case RefusedError():
            code, reason = error.code, str(error)
        case MissingChunkError():
            code, reason = "not_found", f"the coordinator has no chunk {error.chunk}"
        case NotFoundError():
            code, reason = "not_found", str(error)
        case LedgerUnreachableError() | SQLAlchemyError():
            code, reason = "unavailable", UNREACHABLE
        case BlocktrainError():  # its message may name files of this machine
            log.warning("%s %s failed: %s", request.method, request.url.path, error)
            code, reason = "unavailable", UNAVAILABLE
        case HTTPException():  # from Starlette, for example for an unknown path
            status = error.status_code
            code, reason = CODE_OF.get(status, "malformed"), str(error.detail)
        case _:
            log.error("%s %s failed", request.method, request.url.path, exc_info=error)
            code, reason = "internal", "internal error; the coordinator's log has the details"
    body = json.dumps(Refusal(error=code, reason=reason).model_dump())  # type: ignore[arg-type]
    headers = {"retry-after": "1"} if code in ("slow_down", "unavailable") else None
    return Response(body, status or STATUS_OF[code], headers, media_type="application/json")


# TLS


def own_addresses() -> list[str]:
    """Names and addresses under which this machine may be reachable."""
    addresses = ["localhost", "127.0.0.1"]
    if HOST_NAME.fullmatch(socket.gethostname()):
        addresses.append(socket.gethostname())
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; selects the outgoing interface
            addresses.append(probe.getsockname()[0])
        except OSError:
            pass
    return list(dict.fromkeys(addresses))


def own_tls(run: Run, hosts: Sequence[str]) -> ssl.SSLContext:
    """TLS with a new certificate of the run's authority, for this process only. The key does not
    stay on disk, because anyone who has it could pose as a coordinator of the run."""
    issued = run.authority.issue_server(hosts, run.clock())
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


# The server


class CoordinatorServer(LimitedServer):
    def __init__(
        self, service: Service, limits: ConnectionLimits, tls: ssl.SSLContext | None = None
    ) -> None:
        self.app = create_app(service)
        super().__init__(self.app, limits, tls, timeout_graceful_shutdown=SHUTDOWN_SECONDS)

    def stop(self) -> None:
        """Stop as after a signal. Any thread may call this."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        log.info("stopping")  # the last responses follow
        super().handle_exit(sig, frame)


def serve(
    service: Service,
    listener: socket.socket,
    tls: ssl.SSLContext | None,
    limits: ConnectionLimits,
) -> None:
    """Serve until a stop signal. Raises ConfigError if the run was extended meanwhile."""
    server = CoordinatorServer(service, limits, tls)
    service.on_outdated = server.stop
    service.start()
    try:
        server.run(sockets=[listener])
    finally:
        service.stop()
    if service.is_outdated:
        raise ConfigError(OUTDATED)
