"""The HTTP server of a coordinator: the routes as an application, errors as answers, and TLS."""

import asyncio
import json
import logging
import re
import socket
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from secrets import token_hex
from types import FrameType

import uvicorn
from anyio import to_thread
from sqlalchemy.exc import SQLAlchemyError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

from blocktrain.coordinator.api import ENDPOINTS
from blocktrain.coordinator.endpoints import AppState, describe
from blocktrain.coordinator.limits import RateLimiter
from blocktrain.coordinator.reports import CoordinatorMetrics
from blocktrain.coordinator.service import Service
from blocktrain.errors import BlocktrainError, NotFoundError, RefusedError
from blocktrain.protocol.messages import Refusal

log = logging.getLogger(__name__)

THREADS = 20  # fewer than a ledger has connections, so that the ledger's thread always gets one
# Longer than workers keep unused connections: opening one takes a distant worker two round trips.
IDLE_SECONDS = 75
MAX_EVENT_STREAMS = 64  # each reads the ledger twice a second
SHUTDOWN_SECONDS = 2  # event streams never end by themselves
STATUS_OF = {
    "malformed": 422, "unauthorized": 401, "forbidden": 403, "not_found": 404, "conflict": 409,
    "gone": 410, "too_large": 413, "slow_down": 429, "unavailable": 503, "internal": 500,
}  # fmt: skip
CODE_OF = {status: code for code, status in STATUS_OF.items()}
HOST_NAME = re.compile(r"[A-Za-z0-9.-]{1,253}")  # a certificate cannot name any other


def create_app(service: Service) -> Starlette:
    app = AppState(
        service=service,
        metrics=CoordinatorMetrics(service.reports),
        rate_limiter=RateLimiter(time.monotonic),
        event_streams=asyncio.Semaphore(MAX_EVENT_STREAMS),
    )

    @asynccontextmanager
    async def lifespan(starlette: Starlette) -> AsyncIterator[None]:
        to_thread.current_default_thread_limiter().total_tokens = THREADS
        service.executor.start()
        try:
            yield
        finally:
            service.executor.stop()

    document = describe(ENDPOINTS)

    async def openapi(request: Request) -> Response:
        return JSONResponse(document)

    routes = [endpoint.route(app) for endpoint in ENDPOINTS]
    return Starlette(
        routes=[*routes, Route("/openapi.json", openapi)],
        exception_handlers={
            RefusedError: _refused,
            NotFoundError: _not_found,
            BlocktrainError: _failed,
            SQLAlchemyError: _no_database,
            HTTPException: _http_error,
            Exception: _unexpected,
        },
        middleware=[Middleware(RequestLog)] if log.isEnabledFor(logging.DEBUG) else [],
        lifespan=lifespan,
    )


class RequestLog:
    """Logs each request at debug level."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, began = token_hex(4), time.monotonic()
        status = 500

        async def send_with_id(message: AsgiMessage) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            log.debug(
                "%s %s: %d in %.1f ms",
                scope["method"],
                scope["path"],
                status,
                1000 * (time.monotonic() - began),
                extra={"request": request},
            )


# Errors as answers: each is a Refusal


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return _refusal(error.code, str(error))


async def _not_found(request: Request, error: Exception) -> Response:
    return _refusal("not_found", str(error))


async def _no_database(request: Request, error: Exception) -> Response:
    return _refusal("unavailable", "the ledger's database does not answer; try again")


async def _failed(request: Request, error: Exception) -> Response:
    return _refusal("unavailable", str(error))


async def _http_error(request: Request, error: Exception) -> Response:
    """Raised by the framework, for example for an unknown path."""
    assert isinstance(error, HTTPException)
    answer = _refusal(CODE_OF.get(error.status_code, "malformed"), str(error.detail))
    answer.status_code = error.status_code
    return answer


async def _unexpected(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _refusal("internal", "a bug of the coordinator; its log has the details")


def _refusal(code: str, reason: str) -> Response:
    body = json.dumps(Refusal(error=code, reason=reason).model_dump())  # type: ignore[arg-type]
    headers = {"retry-after": "1"} if code in ("slow_down", "unavailable") else None
    return Response(body, STATUS_OF[code], headers, media_type="application/json")


# TLS


def own_addresses() -> list[str]:
    """Names and addresses this machine may be reached at."""
    addresses = ["localhost", "127.0.0.1"]
    if HOST_NAME.fullmatch(socket.gethostname()):
        addresses.append(socket.gethostname())
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: shows which interface leads outside
            addresses.append(probe.getsockname()[0])
        except OSError:
            pass
    return list(dict.fromkeys(addresses))


def own_tls(service: Service, hosts: Sequence[str]) -> ssl.SSLContext:
    """With a new certificate of the run's authority, for this process only. Its key does not stay
    on the disk, because anyone who has it could pose as a coordinator of the run."""
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


# The server


def server_config(app: Starlette, tls: ssl.SSLContext | None = None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,  # uvicorn logs through the handlers of this process
        access_log=False,  # see RequestLog
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        server_header=False,
        proxy_headers=False,  # callers are known by token, not by address
        ssl_context_factory=(lambda config, default: tls) if tls else None,
    )


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
    tls: ssl.SSLContext | None,
    on_stop: Callable[[], None] = lambda: None,
) -> None:
    """Answer until a signal ends it; `on_stop` is called at the signal, before the last answers."""
    service.start()
    try:
        _Server(server_config(create_app(service), tls), on_stop).run(sockets=[listener])
    finally:
        service.stop()
