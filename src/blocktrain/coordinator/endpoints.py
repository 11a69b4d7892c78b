"""What a route is: its path, its callers, its messages; and how a request is checked against that.

A request becomes a `RequestContext` whose caller is known and whose parameters are well-formed,
before the route's function sees it. `describe` makes the OpenAPI document from the same fields.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, ParamSpec, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from blocktrain.coordinator.limits import RateLimiter
from blocktrain.coordinator.members import Caller
from blocktrain.coordinator.reports import CoordinatorMetrics
from blocktrain.coordinator.service import Service
from blocktrain.errors import RefusedError
from blocktrain.protocol import identity
from blocktrain.protocol.messages import (
    PROTOCOL,
    Hash,
    Identifier,
    Message,
    Refusal,
    UpdateOffer,
    first_problem,
)

M = TypeVar("M", bound=Message)
P = ParamSpec("P")
T = TypeVar("T")

MAX_OFFER_BYTES = 8 * 1024 * 1024  # it names every chunk of a large block
MAX_MESSAGE_BYTES = 64 * 1024
READ_COST, WRITE_COST = 1.0, 10.0  # of a request, see `limits.RateLimiter`
PATH_PARAMETERS: dict[str, Any] = {"lease": Identifier, "name": Hash}

Callers = Literal["anyone", "reader", "worker"]


@dataclass(frozen=True)
class AppState:
    service: Service
    metrics: CoordinatorMetrics
    rate_limiter: RateLimiter
    event_streams: asyncio.Semaphore  # how many may still be opened


class RequestContext:
    def __init__(self, http: Request, app: AppState, caller: Caller | None) -> None:
        self.http, self._caller = http, caller
        self.service, self.metrics, self.event_streams = app.service, app.metrics, app.event_streams

    @property
    def reader(self) -> Caller | None:
        """The worker that reads; None for a reader with an invite."""
        return self._caller

    @property
    def caller(self) -> Caller:
        assert self._caller is not None, "a route for workers"
        return self._caller

    async def on_ledger(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one ledger transaction, together with those of other requests."""
        return await self.service.executor.run(call, *args, **kwargs)

    def path(self, name: str) -> str:
        value: str = parse_parameter(PATH_PARAMETERS[name], self.http.path_params[name], name)
        return value

    def query(self, name: str, kind: Any) -> Any:
        """A parameter after the question mark; None if there is none."""
        value = self.http.query_params.get(name)
        return None if value is None else parse_parameter(kind, value, name)

    def required_query(self, name: str, kind: Any) -> Any:
        value = self.query(name, kind)
        if value is None:
            raise RefusedError("malformed", f"{name}: this parameter is required")
        return value

    async def message(self, kind: type[M]) -> M:
        limit = MAX_OFFER_BYTES if kind is UpdateOffer else MAX_MESSAGE_BYTES
        return parse_message(kind, await self.body(limit))

    async def body(self, limit: int) -> bytes:
        return b"".join([part async for part in self.parts(limit)])

    async def parts(self, limit: int) -> AsyncIterator[bytes]:
        """The body as it arrives, refused as soon as it is longer than the limit."""
        size = 0
        async for part in self.http.stream():
            size += len(part)
            if size > limit:
                raise RefusedError("too_large", f"the body is longer than {limit} bytes")
            yield part


@dataclass(frozen=True)
class Endpoint:
    method: Literal["GET", "POST", "PUT"]
    path: str
    callers: Callers
    handle: Callable[[RequestContext], Awaitable[Response]]
    takes: type[Message] | Literal["bytes"] | None = None
    gives: type[Message] | str | None = None  # a message, a media type, or nothing
    parameters: tuple[tuple[str, Any, bool], ...] = ()  # name, kind, whether it is required
    cost: float | None = None  # None: by the method

    def route(self, app: AppState) -> Route:
        async def answer(http: Request) -> Response:
            return await self.handle(RequestContext(http, app, await self._caller(http, app)))

        return Route(self.path, answer, methods=[self.method])

    async def _caller(self, http: Request, app: AppState) -> Caller | None:
        """The worker that calls; None for readers with an invite, and where anyone may call."""
        if self.callers == "anyone":
            return None
        schemes = ("bearer",) if self.callers == "worker" else ("bearer", "invite")
        scheme, _, secret = http.headers.get("authorization", "").partition(" ")
        scheme, secret = scheme.lower(), secret.strip()
        cost = self.cost or (WRITE_COST if self.method == "POST" else READ_COST)
        if scheme not in schemes or not secret:
            raise RefusedError(
                "unauthorized", f"send an Authorization header of: {', '.join(schemes)}"
            )
        if scheme == "bearer":
            caller = app.service.members.caller(secret)
            app.rate_limiter.spend(caller.worker, cost)
            return caller
        app.rate_limiter.spend(identity.hash_secret(secret), cost)
        await app.service.executor.run(app.service.members.check_reader, secret)
        return None


def parse_message(kind: type[M], text: bytes) -> M:
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise _malformed(error, "the body") from None


def parse_parameter(kind: Any, value: str, name: str) -> Any:
    try:
        return _adapter(kind).validate_strings(value)
    except ValidationError as error:
        raise _malformed(error, name) from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _malformed(error: ValidationError, what: str) -> RefusedError:
    field, problem = first_problem(error)
    return RefusedError("malformed", f"{field or what}: {problem}")


BYTES = "application/octet-stream"
SECURITY: dict[str, list[dict[str, list[str]]]] = {
    "anyone": [],
    "reader": [{"bearer": []}, {"invite": []}],
    "worker": [{"bearer": []}],
}
SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "invite": {"type": "apiKey", "in": "header", "name": "Authorization"},
}


def describe(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    kinds = {kind for endpoint in endpoints for kind in (endpoint.takes, endpoint.gives)}
    messages: list[type[Message]] = [Refusal]
    messages += [kind for kind in kinds if isinstance(kind, type)]
    _, schemas = models_json_schema(
        [(message, "validation") for message in sorted(messages, key=lambda kind: kind.__name__)],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "blocktrain coordinator", "version": str(PROTOCOL)},
        "paths": paths,
        "components": {"schemas": schemas["$defs"], "securitySchemes": SCHEMES},
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    path_names = re.findall(r"{(\w+)}", endpoint.path)
    operation: dict[str, Any] = {
        "operationId": endpoint.handle.__name__,
        "security": SECURITY[endpoint.callers],
        "parameters": [
            *(_parameter("path", name, PATH_PARAMETERS[name], True) for name in path_names),
            *(_parameter("query", *parameter) for parameter in endpoint.parameters),
        ],
        "responses": {
            "204" if endpoint.gives is None else "200": _response(endpoint.gives),
            "default": {"description": "A refusal", **_content(Refusal)},
        },
    }
    if endpoint.takes:
        body = BYTES if endpoint.takes == "bytes" else endpoint.takes
        operation["requestBody"] = {"required": True, **_content(body)}
    return operation


def _response(gives: type[Message] | str | None) -> dict[str, Any]:
    if gives is None:
        return {"description": "Done"}
    return {"description": "The answer", **_content(gives)}


def _content(kind: type[Message] | str) -> dict[str, Any]:
    if isinstance(kind, str):
        return {"content": {kind: {"schema": {"type": "string"}}}}
    reference = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"content": {"application/json": {"schema": reference}}}


def _parameter(place: str, name: str, kind: Any, required: bool) -> dict[str, Any]:
    schema = TypeAdapter(kind).json_schema()
    return {"name": name, "in": place, "required": required, "schema": schema}
