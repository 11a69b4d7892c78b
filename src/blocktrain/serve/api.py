"""The routes of docs/API.md over an engine: bytes in, an answer or a refusal out."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from importlib.resources import files
from secrets import randbits, token_hex
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from blocktrain.errors import BlocktrainError, RefusedError
from blocktrain.serve import openai
from blocktrain.serve.access import CLIENT_GONE, Keys, Named
from blocktrain.serve.answering import Answer, Engine
from blocktrain.serve.gate import Gate
from blocktrain.serve.metrics import Metrics
from blocktrain.serve.openai import Ask, Limits
from blocktrain.serve.refusals import CODE_OF, refusal
from blocktrain.serve.replies import Chat, Completions, Reply, model_card

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
    limits: Limits = field(default_factory=Limits)
    at_once: int = 32  # answers being made
    queue: int = 64  # requests waiting for a place
    queue_seconds: float = 30.0
    body_bytes: int = 1024 * 1024
    patience: float = 30.0  # seconds that a client may take nothing, or send nothing
    origins: tuple[str, ...] = ()  # of pages elsewhere that may ask


Handler = Callable[[Request], Awaitable[Response]]


class Server:
    """An engine behind routes."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine, self._settings = engine, settings
        self._keys = Keys(settings.keys)
        self.gate = Gate(settings.at_once, settings.queue, settings.queue_seconds)
        self._started = int(time.time())
        self._page = {
            name: (files("blocktrain.serve") / "page" / name).read_bytes()
            for name in ("index.html", "chat.js")
        }
        self.metrics = Metrics(self.gate)

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

    def _answer(self, ask: Ask) -> Response:
        if ask.model is not None:
            self._check_model(ask.model)
        dialect = Chat() if ask.chat else Completions()
        name = dialect.prefix + token_hex(12)
        reply = Reply(dialect, name, int(time.time()), self._engine.model)
        return Answer(self._engine, ask, reply, self.gate, self.metrics, self._settings.patience)

    @property
    def _limits(self) -> Limits:
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


def create_app(engine: Engine, settings: Settings) -> Starlette:
    if settings.limits.choices > settings.at_once:
        settings = replace(settings, limits=replace(settings.limits, choices=settings.at_once))
    server = Server(engine, settings)
    routes = server.routes()
    known = {route.path for route in routes}

    def told(path: str, status: int, seconds: float) -> None:
        server.metrics.requested(path if path in known else "other", status, seconds)

    middleware = [Middleware(Named, new_id=lambda: f"req_{token_hex(12)}", told=told)]
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
    said = refusal(error)
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
    said = refusal(error)
    return JSONResponse(said.body, said.status, {"x-request-id": request.scope["request_id"]})
