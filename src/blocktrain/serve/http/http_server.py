"""The HTTP server: the routes of docs/API.md on top of an engine, with API keys, request ids, the
access log, bounded send buffers and a checked certificate."""

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import logging
import re
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from secrets import randbits, token_hex
from typing import Any, NamedTuple
from urllib.parse import quote

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blocktrain.errors import BlocktrainError, ConfigError, RefusedError
from blocktrain.protocol.limited_server import ConnectionLimits, LimitedServer, connection_of
from blocktrain.protocol.ring_keys import read_certificate
from blocktrain.serve.http import openai
from blocktrain.serve.http.admission import AdmissionQueue
from blocktrain.serve.http.answer import TRUNCATED, Answer
from blocktrain.serve.http.metrics import REPORT, ServerMetrics
from blocktrain.serve.http.openai import CODE_OF, CompletionRequest, RequestLimits, api_error
from blocktrain.serve.http.replies import ChatFormat, ResponseFormat, TextFormat
from blocktrain.serve.http.served_model import ServedModel
from blocktrain.serve.router.engine import RingEngine

log = logging.getLogger(__name__)

CLIENT_GONE, INTERNAL_ERROR = 499, 500
LOGGED_PATH = 200  # characters
GRACE_SECONDS = 2  # for answers in progress at a stop signal
SEND_BUFFER_BYTES = 128 * 1024  # kernel memory for a client that does not read
MOST_CONNECTIONS = 2048
MOST_BIASES_IN_STEP = 8192  # of all requests together, which fit into the head of one message
SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; style-src 'unsafe-inline'; img-src data:;"
    " frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


@dataclass(frozen=True)
class ApiSettings:
    """Keys, limits and timeouts of the HTTP API."""

    keys: tuple[str, ...] = ()  # empty: no key is needed
    limits: RequestLimits = field(default_factory=RequestLimits)
    at_once: int = 32  # answers in progress
    queue: int = 64  # requests of one key that may wait
    queue_seconds: float = 30.0
    body_bytes: int = 1024 * 1024
    patience: float = 30.0  # seconds a client may take to send a body, or to read some output
    origins: tuple[str, ...] = ()  # web sites whose pages may use the API (CORS)
    request_log: Path | None = None  # a line of JSON for each request
    connections: ConnectionLimits = field(
        default_factory=lambda: ConnectionLimits.fitting(MOST_CONNECTIONS)
    )


Handler = Callable[[Request], Awaitable[Response]]
Parse = Callable[[bytes, ServedModel, RequestLimits, int], CompletionRequest]


class CompletionsApi:
    """The handlers of all routes."""

    def __init__(self, engine: RingEngine, model: ServedModel, settings: ApiSettings) -> None:
        self._engine, self._model, self._settings = engine, model, settings
        if "" in settings.keys:
            raise ConfigError("an API key is empty; to serve without keys, leave --api-key out")
        self._key_hashes = [hashed(key.encode()) for key in settings.keys]
        self.admission = AdmissionQueue(settings.at_once, settings.queue, settings.queue_seconds)
        self._started = int(time.time())
        self.reports = ServerMetrics(self.admission, settings.request_log)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/completions", self._guarded(self.completions), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded(self.chat), methods=["POST"]),
            Route("/v1/models", self._guarded(self.models)),
            Route("/v1/models/{name:path}", self._guarded(self.model)),
            Route("/tokenize", self._guarded(self.tokenize), methods=["POST"]),
            Route("/detokenize", self._guarded(self.detokenize), methods=["POST"]),
            Route("/tokenizer_info", self._guarded(self.tokenizer_info)),
            Route("/health", self.health),
            Route("/metrics", self.metrics_page),
            Route("/", _file("index.html", "text/html")),
            Route("/chat.js", _file("chat.js", "text/javascript")),
        ]

    def _admits(self, headers: Headers) -> bool:
        """Whether a request has a valid API key, or needs none."""
        key_hash = hashed(_key(headers))
        matches = sum(hmac.compare_digest(key_hash, other) for other in self._key_hashes)
        return matches > 0 or not self._key_hashes

    def _tenant(self, headers: Headers) -> str:
        """Whose request this is: the hash of a valid key; empty if the server has no keys."""
        return hashed(_key(headers)).hex() if self._key_hashes else ""

    def _guarded(self, handler: Handler) -> Handler:
        async def checked(request: Request) -> Response:
            if not self._admits(request.headers):
                reason = "send an API key as `Authorization: Bearer KEY`"
                raise RefusedError("invalid_api_key", reason)
            connection_of(request.scope).trust()
            return await handler(request)

        return checked

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, openai.completion, TextFormat)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, openai.chat, ChatFormat)

    async def _answer(
        self, http_request: Request, parse: Parse, new_format: type[ResponseFormat]
    ) -> Response:
        body = await self._body(http_request)
        request = await asyncio.to_thread(  # tokenizing a long text takes a while
            parse, body, self._model, self._settings.limits, randbits(62)
        )
        if request.model is not None:
            self._check_model(request.model)
        request = request.of_tenant(self._tenant(http_request.headers))
        response_format = new_format(token_hex(12), int(time.time()), self._model)
        patience = self._settings.patience
        return Answer(
            self._engine, request, response_format, self.admission, self.reports, patience
        )

    async def tokenize(self, request: Request) -> Response:
        tokens = await asyncio.to_thread(openai.tokens, await self._body(request), self._model)
        window = self._model.config.model.window
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": window})

    async def detokenize(self, request: Request) -> Response:
        return JSONResponse({"prompt": openai.text(await self._body(request), self._model)})

    async def tokenizer_info(self, request: Request) -> Response:
        return JSONResponse(self._model.tokenizer_info)

    async def _body(self, request: Request) -> bytes:
        """The whole body. Raises if it is too long or arrives too slowly."""
        most, body = self._settings.body_bytes, bytearray()
        try:
            async with asyncio.timeout(self._settings.patience):
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise RefusedError("too_large", f"the body is longer than {most} bytes")
        except TimeoutError:
            seconds = self._settings.patience
            raise RefusedError(
                "timeout", f"the body did not arrive within {seconds:g} s; send it again"
            ) from None
        return bytes(body)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model.card(self._started)]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model.card(self._started))

    def _check_model(self, name: str) -> None:
        if name not in (self._model.name, self._model.alias):
            reason = f"there is no model {name[:80]!r}; this server has {self._model.name!r}"
            raise RefusedError("model_not_found", reason)

    async def health(self, request: Request) -> Response:
        """Whether every block is available; with a valid key also the engine's state."""
        status = self._engine.status()
        alive = status["alive"]
        report: dict[str, Any] = {
            "status": "ok" if alive else "unavailable",
            "model": self._model.name,
        }
        if self._admits(request.headers):
            report["engine"] = status
        return JSONResponse(report, 200 if alive else 503)

    async def metrics_page(self, request: Request) -> Response:
        return self.reports.page()


def _file(name: str, media_type: str) -> Handler:
    """A handler for a file of the chat page."""
    content = (files("blocktrain.serve") / "page" / name).read_bytes()

    async def handler(request: Request) -> Response:
        return Response(content, 200, PAGE_HEADERS, media_type)

    return handler


def create_app(engine: RingEngine, model: ServedModel, settings: ApiSettings) -> Starlette:
    limits, at_once = settings.limits, settings.at_once
    limits = replace(
        limits,
        choices=min(limits.choices, at_once),
        biases=min(limits.biases, MOST_BIASES_IN_STEP // at_once),
    )
    settings = replace(settings, limits=limits)
    api = CompletionsApi(engine, model, settings)
    routes = api.routes()
    paths = {route.path for route in routes}
    middleware = [Middleware(RequestIds, reports=api.reports, paths=paths)]
    if settings.origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.origins,
                allow_methods=["GET", "POST"],
                allow_headers=["authorization", "content-type"],
                expose_headers=["x-request-id", TRUNCATED],
            )
        )
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={
            BlocktrainError: error_response,
            HTTPException: framework_error,
            ClientDisconnect: client_gone,
            Exception: error_response,
        },
    )
    app.state.admission, app.state.reports = api.admission, api.reports
    return app


# Errors, all in OpenAI's format


async def error_response(request: Request, error: Exception) -> Response:
    """The response to any error. Starlette handles unexpected ones outside all middleware, so the
    request's id is added here and not in RequestIds."""
    answer, request_id = api_error(error), request.scope["request_id"]
    if answer.status >= 500:
        bug = None if isinstance(error, BlocktrainError) else error
        level = logging.ERROR if bug else logging.WARNING
        log.log(level, "%s %s: %s", request_id, request.url.path, error, exc_info=bug)
    return JSONResponse(answer.body, answer.status, answer.headers | {"x-request-id": request_id})


async def framework_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = CODE_OF.get(error.status_code, "malformed")
    where = f"{request.method} {request.url.path[:80]}"
    return await error_response(request, RefusedError(code, f"{where}: {error.detail}"))


async def client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)  # only for the access log


def _key(headers: Headers) -> bytes:
    """The API key that a request was sent with; empty if there is none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip().encode("latin-1") if scheme.lower() == "bearer" else b""


def hashed(key: bytes) -> bytes:
    return hashlib.blake2b(key).digest()


class RequestIds:
    """Gives every request an id, in its response and in its line of the access log.

    Metrics name the paths in `paths`, and count all others together.
    """

    def __init__(self, app: ASGIApp, reports: ServerMetrics, paths: Collection[str]) -> None:
        self._app, self._reports, self._paths = app, reports, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client_id = Headers(scope=scope).get("x-request-id", "")
        request_id = client_id if SANE_ID.fullmatch(client_id) else f"req_{token_hex(12)}"
        scope["request_id"] = request_id
        status, started = CLIENT_GONE, time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            status = INTERNAL_ERROR
            raise
        finally:
            seconds = time.monotonic() - started
            path = quote(scope["path"][:LOGGED_PATH])  # keeps line breaks out of the log
            log.info(
                "%s %s %s: %d in %.3f s, %d tokens",
                request_id, scope["method"], path, status, seconds,
                scope.get(REPORT, {}).get("completion_tokens", 0),
            )  # fmt: skip
            counted_path = scope["path"] if scope["path"] in self._paths else "other"
            facts = {"id": request_id, "method": scope["method"], "path": path}
            self._reports.requested(counted_path, status, seconds, facts | scope.get(REPORT, {}))


# The port


class CertificateFiles(NamedTuple):
    """PEM files of a certificate with its chain, and of its private key."""

    certificate: Path
    key: Path


def checked_certificate(
    certificate: Path | None, key: Path | None, clock: Callable[[], float] = time.time
) -> CertificateFiles | None:
    """The files of --tls-cert and --tls-key, if given. Raises ConfigError if they are not
    usable."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("--tls-cert and --tls-key belong together; give both or neither")
    for file in (certificate, key):
        if not file.is_file():
            raise ConfigError(f"{file} is not a file; give the path of a PEM file")
    _check_pair(certificate, key, datetime.fromtimestamp(clock(), UTC))
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        raise ConfigError(
            f"{certificate} and {key} are not usable ({error.reason}); give a PEM certificate chain"
            " and its key"
        ) from None
    return CertificateFiles(certificate, key)


def _check_pair(certificate_file: Path, key_file: Path, now: datetime) -> None:
    certificate = read_certificate(certificate_file)
    try:
        key = load_pem_private_key(key_file.read_bytes(), password=None)
    except TypeError:
        raise ConfigError(f"{key_file} has a passphrase; give a key without one") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(
            f"{key_file} is not a PEM private key; give the path of one with --tls-key"
        ) from None
    if certificate.public_key() != key.public_key():
        raise ConfigError(f"{key_file} is not the key of {certificate_file}; give its key")
    if certificate.not_valid_after_utc <= now:
        expiry = f"{certificate.not_valid_after_utc:%Y-%m-%d}"
        raise ConfigError(f"{certificate_file} expired on {expiry}; renew it")
    if certificate.not_valid_before_utc > now:
        start = f"{certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
        raise ConfigError(f"{certificate_file} is valid from {start} on; check the clock")


class ApiServer(LimitedServer):
    """Calls `on_start` once it accepts requests. On a stop signal it first closes the admission
    queue, so that answers in progress end with an error message instead of being cut off."""

    def __init__(
        self,
        app: Starlette,
        limits: ConnectionLimits,
        tls: ssl.SSLContext | None,
        on_start: Callable[[], None],
    ) -> None:
        super().__init__(
            app, limits, tls, log_level="warning", timeout_graceful_shutdown=GRACE_SECONDS
        )
        self.app, self._on_start = app, on_start
        self._reporting: asyncio.Future[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._reporting = asyncio.ensure_future(self.app.state.reports.log_throughput())
            self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.warning("stopping")
        if self._reporting:
            self._reporting.cancel()
        self.app.state.admission.close()
        await super().shutdown(sockets)


def web_server(
    engine: RingEngine,
    model: ServedModel,
    settings: ApiSettings,
    listener: socket.socket,
    tls: CertificateFiles | None = None,
    on_start: Callable[[], None] = lambda: None,
) -> ApiServer:
    """A server whose `serve` runs on the engine's event loop until a stop signal."""
    if not settings.keys:
        log.warning("no API key is set: anyone who can reach this port can use the model")
    if is_readable_in_transit(listener.getsockname()[0], tls):
        log.warning(
            "no TLS: API keys and texts travel unencrypted; set --tls-cert and --tls-key, or put"
            " a proxy with TLS in front"
        )
    # Accepted connections inherit both: a small buffer, and a timeout for unacknowledged data.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    if user_timeout := getattr(socket, "TCP_USER_TIMEOUT", None):
        with contextlib.suppress(OSError):  # not every kernel supports it
            listener.setsockopt(socket.IPPROTO_TCP, user_timeout, int(settings.patience * 1000))
    context = None
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls.certificate, tls.key)
    return ApiServer(create_app(engine, model, settings), settings.connections, context, on_start)


def is_readable_in_transit(host: str, tls: CertificateFiles | None) -> bool:
    """Whether others on the network can read what clients send to this address."""
    return tls is None and not ipaddress.ip_address(host).is_loopback
