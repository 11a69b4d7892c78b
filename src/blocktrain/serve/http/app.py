"""The routes of docs/API.md over an engine, with API keys, request ids and the access log."""

import asyncio
import hashlib
import hmac
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from importlib.resources import files
from secrets import randbits, token_hex
from typing import Any
from urllib.parse import quote

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
from blocktrain.serve.http import openai
from blocktrain.serve.http.answer import (
    OUTPUT_TOKENS,
    AdmissionQueue,
    Answer,
    AnswerEngine,
    ServerMetrics,
)
from blocktrain.serve.http.openai import CODE_OF, CompletionRequest, RequestLimits, api_error
from blocktrain.serve.http.replies import ChatFormat, TextFormat, model_card

log = logging.getLogger(__name__)

CLIENT_GONE, INTERNAL_ERROR = 499, 500
LOGGED_PATH = 200  # characters
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

    keys: tuple[str, ...] = ()  # none: no key is needed
    limits: RequestLimits = field(default_factory=RequestLimits)
    at_once: int = 32  # answers in progress
    queue: int = 64  # requests waiting for one to end
    queue_seconds: float = 30.0
    body_bytes: int = 1024 * 1024
    patience: float = 30.0  # seconds a client may take to send a body, or to read some output
    origins: tuple[str, ...] = ()  # of web pages elsewhere that may use the API (CORS)


Handler = Callable[[Request], Awaitable[Response]]


class CompletionsApi:
    """The handlers of all routes."""

    def __init__(self, engine: AnswerEngine, settings: ApiSettings) -> None:
        self._engine, self._settings = engine, settings
        self._keys = ApiKeys(settings.keys)
        self.admission = AdmissionQueue(settings.at_once, settings.queue, settings.queue_seconds)
        self._started = int(time.time())
        self._page = {
            name: (files("blocktrain.serve") / "page" / name).read_bytes()
            for name in ("index.html", "chat.js")
        }
        self.metrics = ServerMetrics(self.admission)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/completions", self._guarded(self.completions), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded(self.chat), methods=["POST"]),
            Route("/v1/models", self._guarded(self.models)),
            Route("/v1/models/{name:path}", self._guarded(self.model)),
            Route("/health", self.health),
            Route("/metrics", self.metrics_page),
            Route("/", self.page),
            Route("/chat.js", self.script),
        ]

    def _guarded(self, handler: Handler) -> Handler:
        async def checked(request: Request) -> Response:
            self._keys.check(request.headers)
            return await handler(request)

        return checked

    async def completions(self, request: Request) -> Response:
        return self._answer(openai.completion(await self._body(request), self._limits, _new_seed))

    async def chat(self, request: Request) -> Response:
        return self._answer(openai.chat(await self._body(request), self._limits, _new_seed))

    def _answer(self, request: CompletionRequest) -> Response:
        if request.model is not None:
            self._check_model(request.model)
        new_format = ChatFormat if request.chat else TextFormat
        response_format = new_format(token_hex(12), int(time.time()), self._engine.model)
        return Answer(
            self._engine,
            request,
            response_format,
            self.admission,
            self.metrics,
            self._settings.patience,
        )

    @property
    def _limits(self) -> RequestLimits:
        return self._settings.limits

    async def _body(self, request: Request) -> bytes:
        """The whole body; RefusedError if it is too long or arrives too slowly."""
        most, body = self._settings.body_bytes, bytearray()
        try:
            async with asyncio.timeout(self._settings.patience):
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise RefusedError("too_large", f"the body is longer than {most} bytes")
        except TimeoutError:
            raise RefusedError("timeout", "the body did not arrive in time") from None
        return bytes(body)

    async def models(self, request: Request) -> Response:
        card = model_card(self._engine.model, self._started)
        return JSONResponse({"object": "list", "data": [card]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(model_card(self._engine.model, self._started))

    def _check_model(self, name: str) -> None:
        if name != self._engine.model:
            reason = f"there is no model {name[:80]!r}; this server has {self._engine.model!r}"
            raise RefusedError("model_not_found", reason)

    async def health(self, request: Request) -> Response:
        """Whether every block can be computed; with a valid key also the engine's state."""
        status = self._engine.status()
        alive = bool(status.get("alive"))
        report: dict[str, Any] = {
            "status": "ok" if alive else "unavailable",
            "model": self._engine.model,
        }
        if self._keys.admit(request.headers):
            report["engine"] = status
        return JSONResponse(report, 200 if alive else 503)

    async def metrics_page(self, request: Request) -> Response:
        text, kind = self.metrics.page()
        return Response(text, media_type=kind)

    async def page(self, request: Request) -> Response:
        return Response(self._page["index.html"], 200, PAGE_HEADERS, "text/html")

    async def script(self, request: Request) -> Response:
        return Response(self._page["chat.js"], 200, PAGE_HEADERS, "text/javascript")


def create_app(engine: AnswerEngine, settings: ApiSettings) -> Starlette:
    if settings.limits.choices > settings.at_once:
        settings = replace(settings, limits=replace(settings.limits, choices=settings.at_once))
    api = CompletionsApi(engine, settings)
    routes = api.routes()
    paths = {route.path for route in routes}

    def count(path: str, status: int, seconds: float) -> None:
        api.metrics.requested(path if path in paths else "other", status, seconds)

    middleware = [Middleware(RequestIds, on_end=count)]
    if settings.origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.origins,
                allow_methods=["GET", "POST"],
                allow_headers=["authorization", "content-type"],
                expose_headers=["x-request-id"],
            )
        )
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={
            BlocktrainError: project_error,
            HTTPException: framework_error,
            ClientDisconnect: client_gone,
            Exception: internal_error,
        },
    )
    app.state.admission = api.admission
    return app


def _new_seed() -> int:
    return randbits(62)


# Every error in OpenAI's format


async def project_error(request: Request, error: Exception) -> Response:
    answer = api_error(error)
    if answer.status >= 500:
        log.warning("%s %s: %s", request.scope["request_id"], request.url.path, error)
    return JSONResponse(answer.body, answer.status, answer.headers)


async def framework_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = CODE_OF.get(error.status_code, "malformed")
    where = f"{request.method} {request.url.path[:80]}"
    return await project_error(request, RefusedError(code, f"{where}: {error.detail}"))


async def client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)  # for the access log alone


async def internal_error(request: Request, error: Exception) -> Response:
    """Starlette runs this outside of all middleware, so the id is added here."""
    log.error("%s failed", request.scope["request_id"], exc_info=error)
    answer = api_error(error)
    return JSONResponse(answer.body, answer.status, {"x-request-id": request.scope["request_id"]})


class ApiKeys:
    """API keys as hashes; if there are none, every request is admitted."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._hashes = tuple(_hash(key.encode()) for key in keys)
        if _hash(b"") in self._hashes:
            raise ConfigError("an API key is empty; to serve without keys, give no --api-key")

    def admit(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        hashed = _hash(given.strip().encode("latin-1") if scheme.lower() == "bearer" else b"")
        matches = sum(hmac.compare_digest(hashed, own) for own in self._hashes)
        return matches > 0 or not self._hashes

    def check(self, headers: Headers) -> None:
        if not self.admit(headers):
            raise RefusedError("invalid_api_key", "send an API key as `Authorization: Bearer KEY`")


def _hash(key: bytes) -> bytes:
    return hashlib.blake2b(key).digest()


class RequestIds:
    """Gives every request an id, in its response and in the access log: one line a request."""

    def __init__(self, app: ASGIApp, on_end: Callable[[str, int, float], None]) -> None:
        self._app, self._on_end = app, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope).get("x-request-id", "")
        request_id = sent if SANE_ID.fullmatch(sent) else f"req_{token_hex(12)}"
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
            path = quote(scope["path"][:LOGGED_PATH])  # no line break gets into the log
            log.info(
                "%s %s %s: %d in %.3f s, %d tokens",
                request_id, scope["method"], path, status, seconds, scope.get(OUTPUT_TOKENS, 0),
            )  # fmt: skip
            self._on_end(scope["path"], status, seconds)
