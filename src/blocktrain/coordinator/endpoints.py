"""An endpoint: its path, its permitted callers, its messages; and the checks of each request.

The annotations of a route's function say what it takes: its `message`, and parameters of the path
or the query by name. The function is called once the caller is known and all of these are
well-formed. `describe` makes the OpenAPI document from the same annotations.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, ParamSpec, TypeVar, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from blocktrain.coordinator.client_limits import READ_COST, WRITE_COST, Requester
from blocktrain.coordinator.members import Caller
from blocktrain.coordinator.service import Service
from blocktrain.errors import RefusedError
from blocktrain.protocol import identity
from blocktrain.protocol.limited_server import connection_of
from blocktrain.protocol.messages import (
    PROTOCOL,
    Message,
    Refusal,
    RevealOffer,
    UpdateOffer,
    first_problem,
)

Method = Literal["GET", "POST", "PUT"]
Callers = Literal["anyone", "viewer", "reader", "worker", "operator"]
Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Message | Response | None]])
M = TypeVar("M", bound=Message)
P = ParamSpec("P")
T = TypeVar("T")

LONG = (UpdateOffer, RevealOffer)
MAX_MESSAGE_BYTES = 64 * 1024
READERS = ("bearer", "invite", "operator")
SCHEMES_OF: Mapping[Callers, Sequence[str]] = {
    "anyone": (),
    "viewer": READERS,  # and without authorization, if the run page is public
    "reader": READERS,
    "worker": ("bearer",),
    "operator": ("operator",),
}


@dataclass(frozen=True)
class RequestContext:
    http: Request
    service: Service
    client: Requester
    reader: Caller | None  # None: an operator, a reader with an invite, or nobody is authorized
    held: ExitStack  # what the request has in use until its response is sent
    take_memory: Callable[[int], None]  # counts the bytes of the body that are in memory

    @property
    def caller(self) -> Caller:
        assert self.reader is not None, "a route for workers"
        return self.reader

    async def on_ledger(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call on the ledger thread, in a transaction shared with other requests."""
        return await self.service.executor.run(call, *args, **kwargs)

    async def message(self, kind: type[M]) -> M:
        limit = self.service.run.offer_bytes if kind in LONG else MAX_MESSAGE_BYTES
        return parse_message(kind, await self.body(limit))

    async def body(self, limit: int) -> bytes:
        parts = []
        async for part in self.parts(limit):
            self.take_memory(len(part))
            parts.append(part)
        return b"".join(parts)

    def parts_on_disk(self, limit: int) -> AsyncIterator[bytes]:
        """The body in parts, which will be on disk before the response is sent."""
        self.held.enter_context(self.service.limits.chunk(self.client))(limit)
        return self.parts(limit)

    async def parts(self, limit: int) -> AsyncIterator[bytes]:
        """Yield the body in parts. Refuse it as soon as it exceeds the limit."""
        size = 0
        async for part in self.http.stream():
            size += len(part)
            if size > limit:
                raise RefusedError("too_large", f"the body is longer than {limit} bytes")
            yield part


@dataclass(frozen=True)
class Endpoint:
    method: Method
    path: str
    callers: Callers
    handle: Callable[..., Awaitable[Message | Response | None]]
    parameters: Mapping[str, Any]  # by name, the type; one that allows None is optional
    takes: type[Message] | Literal["bytes"] | None = None
    gives: type[Message] | str | None = None  # a message, a media type, or nothing
    cost: float | None = None  # None: by the method, READ_COST or WRITE_COST

    def route(self, service: Service) -> Route:
        async def respond(http: Request) -> ASGIApp:
            client, caller = await self._caller(http, service)
            with ExitStack() as held:
                held.enter_context(service.limits.request(client))
                take_memory = held.enter_context(service.limits.body(client))
                request = RequestContext(http, service, client, caller, held, take_memory)
                arguments = self._parsed(http)
                if isinstance(self.takes, type):
                    arguments["message"] = await request.message(self.takes)
                answer = await self.handle(request, **arguments)
                if isinstance(answer, Message):
                    answer = Response(answer.model_dump_json(), media_type="application/json")
                return _holding(held.pop_all(), answer or Response(status_code=204))

        return Route(self.path, respond, methods=[self.method])

    async def _caller(self, http: Request, service: Service) -> tuple[Requester, Caller | None]:
        """Authorize and rate-limit a request. Returns its client; and the worker, or None for an
        operator, for a reader with an invite, or if the route needs no authorization."""
        connection = connection_of(http.scope)
        stranger, limits = Requester(connection.address), service.limits
        schemes, authorization = SCHEMES_OF[self.callers], http.headers.get("authorization", "")
        if self.callers == "viewer" and service.page_settings.is_public and not authorization:
            schemes = ()
        if not schemes or not connection.is_trusted:
            limits.spend(f"address {stranger.address}", READ_COST)
        if not schemes:
            return stranger, None
        scheme, _, secret = authorization.partition(" ")
        scheme, secret = scheme.lower(), secret.strip()
        cost = self.cost or (WRITE_COST if self.method == "POST" else READ_COST)
        if scheme not in schemes or not secret:
            raise RefusedError(
                "unauthorized", f"send an Authorization header with scheme {' or '.join(schemes)}"
            )
        if scheme == "bearer":
            caller = service.members.caller(secret)
            limits.spend(caller.worker, cost)
            connection.trust()
            invite = service.members.cached_invite(caller.worker)
            if invite is None:
                invite = await service.executor.run(service.members.invite_of, caller.worker)
            return Requester(stranger.address, caller.worker, invite), caller
        reader = identity.hash_secret(secret)
        limits.spend(reader, cost)
        if scheme == "operator":
            service.page_settings.check_operator(secret)
            connection.trust()
            return Requester(stranger.address, reader, is_operator=True), None
        invite = await service.executor.run(service.members.check_reader, secret)
        connection.trust()
        return Requester(stranger.address, reader, invite), None

    def _parsed(self, http: Request) -> dict[str, Any]:
        """The parsed parameters of the path and of the query."""
        parsed, arguments = {}, {**http.query_params, **http.path_params}
        for name, kind in self.parameters.items():
            if name not in arguments and not _is_optional(kind):
                raise RefusedError("malformed", f"{name}: this parameter is required")
            parsed[name] = (
                _parse_parameter(kind, arguments[name], name) if name in arguments else None
            )
        return parsed


def _holding(held: ExitStack, response: ASGIApp) -> ASGIApp:
    """The same response, which releases what is held once it is sent."""

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        with held:
            await response(scope, receive, send)

    return respond


def _is_optional(kind: Any) -> bool:
    return type(None) in get_args(kind)


def declare(
    endpoints: list[Endpoint], method: Method, path: str, callers: Callers, **more: Any
) -> Callable[[Handler], Handler]:
    """A decorator that adds a function to the endpoints. `more`: fields of the Endpoint that do not
    follow from the function's annotations."""

    def add(handle: Handler) -> Handler:
        hints = get_type_hints(handle, include_extras=True)
        del hints["request"]
        takes, gives = hints.pop("message", None), hints.pop("return")
        kinds = {"takes": takes, "gives": gives if issubclass(gives, Message) else None, **more}
        endpoints.append(Endpoint(method, path, callers, handle, hints, **kinds))
        return handle

    return add


def parse_message(kind: type[M], text: bytes) -> M:
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise _malformed(error, "the body") from None


def _parse_parameter(kind: Any, value: str, name: str) -> Any:
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
SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "invite": {"type": "apiKey", "in": "header", "name": "Authorization"},
    "operator": {"type": "apiKey", "in": "header", "name": "Authorization"},
}


def describe(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The OpenAPI document of these endpoints."""
    kinds = {Refusal, *(kind for each in endpoints for kind in (each.takes, each.gives))}
    messages = [kind for kind in kinds if isinstance(kind, type)]
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
    operation: dict[str, Any] = {
        "operationId": endpoint.handle.__name__,
        "security": [
            *([{}] if endpoint.callers == "viewer" else []),  # unless the run page is private
            *({scheme: []} for scheme in SCHEMES_OF[endpoint.callers]),
        ],
        "parameters": [
            _parameter("path" if f"{{{name}}}" in endpoint.path else "query", name, kind)
            for name, kind in endpoint.parameters.items()
        ],
        "responses": {
            **(
                {"200": {"description": "Success", **_content(endpoint.gives)}}
                if endpoint.gives
                else {"204": {"description": "Done"}}
            ),
            "default": {"description": "Error", **_content(Refusal)},
        },
    }
    if endpoint.takes:
        body = BYTES if endpoint.takes == "bytes" else endpoint.takes
        operation["requestBody"] = {"required": True, **_content(body)}
    return operation


def _content(kind: type[Message] | str) -> dict[str, Any]:
    if isinstance(kind, str):
        return {"content": {kind: {"schema": {"type": "string"}}}}
    reference = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"content": {"application/json": {"schema": reference}}}


def _parameter(place: str, name: str, kind: Any) -> dict[str, Any]:
    required = not _is_optional(kind)
    schema = TypeAdapter(kind if required else get_args(kind)[0]).json_schema()
    return {"name": name, "in": place, "required": required, "schema": schema}
