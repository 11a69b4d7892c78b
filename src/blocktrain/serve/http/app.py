"""The routes of docs/API.md over an engine: bytes in, an answer or a refusal out."""

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
from blocktrain.serve.http.admission import AdmissionQueue, ServerMetrics
from blocktrain.serve.http.answer import Answer, AnswerEngine
from blocktrain.serve.http.openai import CODE_OF, CompletionRequest, RequestLimits, api_error
from blocktrain.serve.http.replies import Chat, Completions, Reply, model_card

log = logging.getLogger(__name__)

PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; style-src 'unsafe-inline'; img-src data:;"
    " frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


@dataclass(frozen=True)
class Settings:
    """How a server treats its clients."""

    keys: tuple[str, ...] = ()  # none: anyone may ask
    limits: RequestLimits = field(default_factory=RequestLimits)
    at_once: int = 32  # answers being made
    queue: int = 64  # requests waiting for a place
    queue_seconds: float = 30.0
    body_bytes: int = 1024 * 1024
    patience: float = 30.0  # seconds that a client may take nothing, or send nothing
    origins: tuple[str, ...] = ()  # of pages elsewhere that may ask


Handler = Callable[[Request], Awaitable[Response]]


class CompletionsApi:
    """An engine behind routes."""

    def __init__(self, engine: AnswerEngine, settings: Settings) -> None:
        self._engine, self._settings = engine, settings
        self._keys = ApiKeys(settings.keys)
        self.gate = AdmissionQueue(settings.at_once, settings.queue, settings.queue_seconds)
        self._started = int(time.time())
        self._page = {
            name: (files("blocktrain.serve") / "page" / name).read_bytes()
            for name in ("index.html", "chat.js")
        }
        self.metrics = ServerMetrics(self.gate)

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
        ask = openai.completion(await self._body(request), self._limits, _new_seed)
        return self._answer(ask)

    async def chat(self, request: Request) -> Response:
        return self._answer(openai.chat(await self._body(request), self._limits, _new_seed))

    def _answer(self, ask: CompletionRequest) -> Response:
        if ask.model is not None:
            self._check_model(ask.model)
        dialect = Chat() if ask.chat else Completions()
        name = dialect.prefix + token_hex(12)
        reply = Reply(dialect, name, int(time.time()), self._engine.model)
        return Answer(self._engine, ask, reply, self.gate, self.metrics, self._settings.patience)

    @property
    def _limits(self) -> RequestLimits:
        return self._settings.limits

    async def _body(self, request: Request) -> bytes:
        """All of it, unless it is too long or too long in coming."""
        most, body = self._settings.body_bytes, bytearray()
        try:
            async with asyncio.timeout(self._settings.patience):
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise RefusedError("too_large", f"the body is longer than {most} bytes")
        except TimeoutError:
            raise RefusedError("timeout", "the body took too long") from None
        return bytes(body)

    async def models(self, request: Request) -> Response:
        card = model_card(self._engine.model, self._started)
        return JSONResponse({"object": "list", "data": [card]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(model_card(self._engine.model, self._started))

    def _check_model(self, name: str) -> None:
        if name != self._engine.model:
            known = f"there is no model {name[:80]!r} here, only {self._engine.model!r}"
            raise RefusedError("model_not_found", known)

    async def health(self, request: Request) -> Response:
        """Whether answers can be made; how things stand, for those who may ask for answers."""
        status = self._engine.status()
        alive = bool(status.get("alive"))
        told: dict[str, Any] = {
            "status": "ok" if alive else "unavailable",
            "model": self._engine.model,
        }
        if self._keys.admit(request.headers):
            told["engine"] = status
        return JSONResponse(told, 200 if alive else 503)

    async def metrics_page(self, request: Request) -> Response:
        text, kind = self.metrics.page()
        return Response(text, media_type=kind)

    async def page(self, request: Request) -> Response:
        return Response(self._page["index.html"], 200, PAGE_HEADERS, "text/html")

    async def script(self, request: Request) -> Response:
        return Response(self._page["chat.js"], 200, PAGE_HEADERS, "text/javascript")


def create_app(engine: AnswerEngine, settings: Settings) -> Starlette:
    if settings.limits.choices > settings.at_once:
        settings = replace(settings, limits=replace(settings.limits, choices=settings.at_once))
    server = CompletionsApi(engine, settings)
    routes = server.routes()
    known = {route.path for route in routes}

    def told(path: str, status: int, seconds: float) -> None:
        server.metrics.requested(path if path in known else "other", status, seconds)

    middleware = [Middleware(RequestIds, new_id=lambda: f"req_{token_hex(12)}", told=told)]
    if settings.origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.origins,
                allow_headers=["authorization", "content-type"],
                expose_headers=["x-request-id"],
            )
        )
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={
            BlocktrainError: refused,
            HTTPException: by_framework,
            ClientDisconnect: gone,
            Exception: unforeseen,
        },
    )
    app.state.gate = server.gate
    return app


def _new_seed() -> int:
    return randbits(62)


# Every error in OpenAI's format


async def refused(request: Request, error: Exception) -> Response:
    said = api_error(error)
    if said.status >= 500:
        log.warning("%s %s: %s", request.scope["request_id"], request.url.path, error)
    return JSONResponse(said.body, said.status, said.headers)


async def by_framework(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = CODE_OF.get(error.status_code, "malformed")
    where = f"{request.method} {request.url.path[:80]}"
    return await refused(request, RefusedError(code, f"{where}: {error.detail}"))


async def gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)  # nobody reads it; the log does


async def unforeseen(request: Request, error: Exception) -> Response:
    """Said outside of everything, so that the id has to be put on by hand."""
    log.error("%s failed", request.scope["request_id"], exc_info=error)
    said = api_error(error)
    return JSONResponse(said.body, said.status, {"x-request-id": request.scope["request_id"]})


CLIENT_GONE, BUG = 499, 500
SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class ApiKeys:
    """API keys; none at all means that anyone may ask."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._hashes = tuple(_hash(key.encode()) for key in keys)
        if _hash(b"") in self._hashes:
            raise ConfigError("an API key is empty; leave it out to let anyone ask")

    def admit(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        hashed = _hash(given.strip().encode("latin-1") if scheme.lower() == "bearer" else b"")
        matches = sum(hmac.compare_digest(hashed, own) for own in self._hashes)
        return matches > 0 or not self._hashes

    def check(self, headers: Headers) -> None:
        if not self.admit(headers):
            raise RefusedError("invalid_api_key", "needs an Authorization: Bearer with an API key")


def _hash(key: bytes) -> bytes:
    return hashlib.blake2b(key).digest()


class RequestIds:
    """Gives every request an id, in its answer and in the log, and tells how it went."""

    def __init__(
        self,
        app: ASGIApp,
        new_id: Callable[[], str],
        told: Callable[[str, int, float], None],
    ) -> None:
        self._app, self._new_id, self._told = app, new_id, told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if SANE_ID.fullmatch(given) else self._new_id()
        scope["request_id"] = name
        status, began = CLIENT_GONE, time.monotonic()

        async def named_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        try:
            await self._app(scope, receive, named_send)
        except Exception:
            status = BUG
            raise
        finally:
            seconds = time.monotonic() - began
            log.info(
                "%s %s %s: %d in %.3f s", name, scope["method"], scope["path"], status, seconds
            )
            self._told(scope["path"], status, seconds)
