"""One thing that can be asked of a coordinator: its address, who may ask, what it takes and gives.

A request becomes an `Asked`, whose sender is known and whose parameters are well-formed, before
the action sees it. What an action takes and gives is a message of the protocol, so that
`coordinator.openapi` can describe it.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from blocktrain.coordinator.executor import LedgerExecutor, VerificationQueue
from blocktrain.coordinator.limits import RateLimiter
from blocktrain.coordinator.members import Caller
from blocktrain.coordinator.reports import CoordinatorMetrics
from blocktrain.coordinator.service import Service
from blocktrain.errors import RefusedError
from blocktrain.protocol import tokens
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

LARGEST_MESSAGE = 8 * 1024 * 1024  # an offer that names every chunk of a large block
USUAL_MESSAGE = 64 * 1024
READING, WRITING = 1.0, 10.0  # what a request costs its caller (coordinator.allowance)
IN_PATH: dict[str, Any] = {"lease": Identifier, "name": Hash}

By = Literal["anyone", "reader", "worker"]


@dataclass(frozen=True)
class AppState:
    """What every action works with."""

    service: Service
    desk: LedgerExecutor
    metrics: CoordinatorMetrics
    verifying: VerificationQueue
    allowance: RateLimiter
    listeners: asyncio.Semaphore  # streams of events that may still be opened


class RequestContext:
    def __init__(self, request: Request, server: AppState, caller: Caller | None) -> None:
        self.request, self._server, self._caller = request, server, caller
        self.service, self.desk, self.metrics = server.service, server.desk, server.metrics
        self.verifying, self.listeners = server.verifying, server.listeners

    @property
    def reader(self) -> Caller | None:
        """The worker that reads; None where it is somebody with an invite."""
        return self._caller

    @property
    def caller(self) -> Caller:
        assert self._caller is not None, "an action for workers alone"
        return self._caller

    def at(self, name: str) -> str:
        """A part of the path."""
        part: str = parse_parameter(IN_PATH[name], self.request.path_params[name], name)
        return part

    def parameter(self, name: str, kind: Any) -> Any:
        """What follows the question mark; None where it was left out."""
        value = self.request.query_params.get(name)
        return None if value is None else parse_parameter(kind, value, name)

    def required(self, name: str, kind: Any) -> Any:
        value = self.parameter(name, kind)
        if value is None:
            raise RefusedError("malformed", f"{name}: it must be named")
        return value

    async def message(self, kind: type[M]) -> M:
        most = LARGEST_MESSAGE if kind is UpdateOffer else USUAL_MESSAGE
        return parse_message(kind, await self.body(most))

    async def body(self, most: int) -> bytes:
        return b"".join([part async for part in self.parts(most)])

    async def parts(self, most: int) -> AsyncIterator[bytes]:
        """A body as it comes, refused as soon as it is longer than it may be."""
        size = 0
        async for part in self.request.stream():
            size += len(part)
            if size > most:
                raise RefusedError("too_large", f"the body is longer than {most} bytes")
            yield part


@dataclass(frozen=True)
class Endpoint:
    method: Literal["GET", "POST", "PUT"]
    path: str
    by: By
    do: Callable[[RequestContext], Awaitable[Response]]
    takes: type[Message] | Literal["bytes"] | None = None
    gives: type[Message] | str | None = None  # a message, a media type, or nothing
    parameters: tuple[tuple[str, Any, bool], ...] = ()  # name, kind, whether it must be there
    cost: float | None = None  # what is usual, where it is not said

    def route(self, server: AppState) -> Route:
        async def answer(request: Request) -> Response:
            caller = await self._caller(request, server)
            return await self.do(RequestContext(request, server, caller))

        return Route(self.path, answer, methods=[self.method])

    async def _caller(self, request: Request, server: AppState) -> Caller | None:
        """Who asks, refused where that is not enough; None for those who only look on."""
        if self.by == "anyone":
            return None
        schemes = ("bearer",) if self.by == "worker" else ("bearer", "invite")
        scheme, _, secret = request.headers.get("authorization", "").partition(" ")
        scheme, secret = scheme.lower(), secret.strip()
        cost = self.cost or (WRITING if self.method == "POST" else READING)
        if scheme not in schemes or not secret:
            raise RefusedError("unauthorized", f"needs an Authorization of: {', '.join(schemes)}")
        if scheme == "bearer":
            caller = server.service.members.caller(secret)
            server.allowance.spend(caller.worker, cost)
            return caller
        server.allowance.spend(tokens.hash_secret(secret), cost)
        await server.desk.run(server.service.members.check_reader, secret)
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


def describe(actions: Sequence[Endpoint]) -> dict[str, Any]:
    kinds = {kind for action in actions for kind in (action.takes, action.gives)}
    messages: list[type[Message]] = [Refusal]
    messages += [kind for kind in kinds if isinstance(kind, type)]
    _, schemas = models_json_schema(
        [(message, "validation") for message in sorted(messages, key=lambda kind: kind.__name__)],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, Any] = {}
    for action in actions:
        paths.setdefault(action.path, {})[action.method.lower()] = _operation(action)
    return {
        "openapi": "3.1.0",
        "info": {"title": "blocktrain coordinator", "version": str(PROTOCOL)},
        "paths": paths,
        "components": {"schemas": schemas["$defs"], "securitySchemes": SCHEMES},
    }


def _operation(action: Endpoint) -> dict[str, Any]:
    in_path = re.findall(r"{(\w+)}", action.path)
    operation: dict[str, Any] = {
        "operationId": action.do.__name__,
        "security": SECURITY[action.by],
        "parameters": [
            *(_parameter("path", name, IN_PATH[name], True) for name in in_path),
            *(_parameter("query", *parameter) for parameter in action.parameters),
        ],
        "responses": {
            "204" if action.gives is None else "200": _answer(action.gives),
            "default": {"description": "A refusal", **_content(Refusal)},
        },
    }
    if action.takes:
        taken = BYTES if action.takes == "bytes" else action.takes
        operation["requestBody"] = {"required": True, **_content(taken)}
    return operation


def _answer(gives: type[Message] | str | None) -> dict[str, Any]:
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
