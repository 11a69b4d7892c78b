"""The routes of docs/PROTOCOL.md, and nothing else: bytes to messages, messages to bytes."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from tempfile import SpooledTemporaryFile
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, StreamingResponse
from pydantic import ValidationError
from sqlalchemy.exc import DBAPIError
from starlette.exceptions import HTTPException

from blocktrain.coordinator.members import Caller
from blocktrain.coordinator.metrics import Metrics
from blocktrain.coordinator.service import Service
from blocktrain.core import faults
from blocktrain.errors import BlocktrainError, NotFoundError, ProtocolError, RefusedError
from blocktrain.protocol.messages import (
    CHUNK_BYTES,
    PROTOCOL,
    BlobAnswer,
    Hash,
    Hello,
    Identifier,
    Join,
    Joined,
    LeaseAnswer,
    LeaseProgress,
    LeaseRequest,
    LeaseReturn,
    LeaseState,
    Message,
    Receipt,
    Refusal,
    RunDescription,
    Score,
    Status,
    Token,
    TokenRequest,
    UpdateOffer,
    UploadState,
)

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

LARGEST_MESSAGE = 8 * 1024 * 1024  # an offer that names every chunk of a large block
USUAL_MESSAGE = 64 * 1024
CHUNKS_AT_ONCE = 8  # held in memory to be verified and stored; others wait their turn
SPOOL_BYTES = 64 * 1024  # of a chunk on its way in; more of it is on disk
PIECE_BYTES = 512 * 1024
EVENT_POLL_SECONDS = 0.5
EVENTS_AT_ONCE = 500
STATUS_OF = {
    "malformed": 422, "unauthorized": 401, "forbidden": 403, "not_found": 404, "conflict": 409,
    "gone": 410, "too_large": 413, "slow_down": 429, "unavailable": 503, "internal": 500,
}  # fmt: skip
NUMBER = re.compile(r"[0-9]{1,18}")
CODE_OF = {status: code for code, status in STATUS_OF.items()}


def create_app(service: Service) -> FastAPI:
    app = FastAPI(
        title="blocktrain coordinator",
        version=str(PROTOCOL),
        responses={"default": {"model": Refusal, "description": "A refusal"}},
    )
    app.state.service = service
    app.state.metrics = Metrics(service.reports)
    app.state.chunk_slots = asyncio.Semaphore(CHUNKS_AT_ONCE)
    _add_refusals(app)
    _add_joining(app)
    _add_leases(app)
    _add_updates(app)
    _add_blobs(app)
    _add_reports(app)
    _describe_nested(app)
    return app


# What every route needs


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _credentials(request: Request, *schemes: str) -> tuple[str, str]:
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() not in schemes or not secret:
        raise RefusedError("unauthorized", f"needs an Authorization of: {', '.join(schemes)}")
    return scheme.lower(), secret.strip()


def _caller(request: Request) -> Caller:
    _, token = _credentials(request, "bearer")
    return _service(request).members.caller(token)


def _reader(request: Request) -> None:
    scheme, secret = _credentials(request, "bearer", "invite")
    members = _service(request).members
    if scheme == "bearer":
        members.caller(secret)
    else:
        members.check_reader(secret)


async def _parts(request: Request, most: int) -> AsyncIterator[bytes]:
    """A body as it comes, refused as soon as it is longer than it may be."""
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise RefusedError("too_large", f"the body is longer than {most} bytes")
        yield part


def _read(kind: type[M]) -> Callable[[Request], Awaitable[M]]:
    most = LARGEST_MESSAGE if kind is UpdateOffer else USUAL_MESSAGE

    async def read(request: Request) -> M:
        body = b"".join([part async for part in _parts(request, most)])
        try:
            return kind.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"])) or "the body"
            raise RefusedError("malformed", f"{place}: {first['msg']}") from None

    return read


NESTED: dict[str, Any] = {}  # what bodies are made of and no route answers with


def _describe_nested(app: FastAPI) -> None:
    described = app.openapi

    def openapi() -> dict[str, Any]:
        document = described()
        components = document["components"]
        components["schemas"] = {**NESTED, **components["schemas"]}
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _takes(kind: type[Message]) -> dict[str, Any]:
    """How the OpenAPI document describes a body that is parsed by hand, and strictly."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    NESTED.update(schema.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _answer(message: Message) -> Response:
    return Response(message.model_dump_json(), media_type="application/json")


By = Annotated[Caller, Depends(_caller)]
Serving = Annotated[Service, Depends(_service)]
READERS = [Depends(_reader)]


# The routes


def _add_joining(app: FastAPI) -> None:
    @app.get("/v1/hello", response_model=Hello)
    def hello(service: Serving) -> Response:
        return _answer(Hello(run=service.run.id, protocols=(PROTOCOL,)))

    @app.get("/v1/ca", response_class=PlainTextResponse)
    def authority(service: Serving) -> str:
        return service.run.authority.certificate_pem

    @app.post("/v1/join", response_model=Joined, openapi_extra=_takes(Join))
    def join(service: Serving, asked: Annotated[Join, Depends(_read(Join))]) -> Response:
        return _answer(service.members.join(asked))

    @app.post("/v1/token", response_model=Token, openapi_extra=_takes(TokenRequest))
    def token(
        service: Serving, asked: Annotated[TokenRequest, Depends(_read(TokenRequest))]
    ) -> Response:
        return _answer(service.members.renew(asked))


def _add_leases(app: FastAPI) -> None:
    @app.post("/v1/lease", response_model=LeaseAnswer, openapi_extra=_takes(LeaseRequest))
    def lease(
        service: Serving,
        caller: By,
        asked: Annotated[LeaseRequest, Depends(_read(LeaseRequest))],
    ) -> Response:
        answer = service.leases.claim(caller, asked)
        faults.reached("claimed")
        return _answer(answer)

    @app.post(
        "/v1/lease/{lease}/progress",
        response_model=LeaseState,
        openapi_extra=_takes(LeaseProgress),
    )
    def progress(
        service: Serving,
        caller: By,
        lease: Identifier,
        told: Annotated[LeaseProgress, Depends(_read(LeaseProgress))],
    ) -> Response:
        return _answer(service.leases.progress(caller, lease, told))

    @app.post(
        "/v1/lease/{lease}/return", response_model=LeaseState, openapi_extra=_takes(LeaseReturn)
    )
    def give_back(
        service: Serving,
        caller: By,
        lease: Identifier,
        told: Annotated[LeaseReturn, Depends(_read(LeaseReturn))],
    ) -> Response:
        return _answer(service.leases.give_back(caller, lease, told))


def _add_updates(app: FastAPI) -> None:
    @app.post("/v1/updates", response_model=UploadState, openapi_extra=_takes(UpdateOffer))
    def offer(
        service: Serving,
        caller: By,
        offered: Annotated[UpdateOffer, Depends(_read(UpdateOffer))],
    ) -> Response:
        return _answer(service.updates.offer(caller, offered))

    @app.put("/v1/chunks/{name}", status_code=204)
    async def put_chunk(
        request: Request, service: Serving, caller: By, name: Hash, lease: Identifier
    ) -> Response:
        # On disk while it comes: a slow line takes up no memory and nobody else's turn.
        with SpooledTemporaryFile(SPOOL_BYTES) as arrived:
            async for part in _parts(request, CHUNK_BYTES):
                arrived.write(part)
            async with request.app.state.chunk_slots:
                arrived.seek(0)
                data = arrived.read()
                await run_in_threadpool(service.updates.put_chunk, caller, lease, name, data)
        request.app.state.metrics.received(len(data))
        return Response(status_code=204)

    @app.post("/v1/updates/{lease}/commit", response_model=Receipt)
    def commit(service: Serving, caller: By, lease: Identifier) -> Response:
        receipt = service.updates.commit(caller, lease)
        faults.reached("settled")
        service.wake()
        return _answer(receipt)


def _add_blobs(app: FastAPI) -> None:
    @app.get("/v1/blobs/{name}", response_model=BlobAnswer, dependencies=READERS)
    def blob(service: Serving, name: Hash) -> Response:
        try:
            return _answer(service.reports.blob(name))
        except ProtocolError as error:  # a chunk, but no recipe
            raise NotFoundError(str(error)) from None

    @app.get("/v1/chunks/{name}", dependencies=READERS)
    def chunk(request: Request, service: Serving, name: Hash) -> Response:
        data = memoryview(service.run.chunks.get(name))
        start, end = _asked_range(request.headers.get("range"), len(data))
        headers = {
            "etag": f'"{name}"',
            "accept-ranges": "bytes",
            "content-length": str(end - start),
            "content-range": f"bytes {start}-{end - 1}/{len(data)}",
        }
        whole = (start, end) == (0, len(data))
        if whole:
            del headers["content-range"]
        request.app.state.metrics.sent(end - start)
        pieces = (
            bytes(data[at : min(at + PIECE_BYTES, end)]) for at in range(start, end, PIECE_BYTES)
        )
        return StreamingResponse(
            pieces,
            status_code=200 if whole else 206,
            headers=headers,
            media_type="application/octet-stream",
        )


def _add_reports(app: FastAPI) -> None:
    @app.get("/v1/run", response_model=RunDescription, dependencies=READERS)
    def run(service: Serving) -> Response:
        return _answer(service.run.description)

    @app.get("/v1/status", response_model=Status, dependencies=READERS)
    def status(service: Serving) -> Response:
        return _answer(service.reports.status())

    @app.get("/v1/events", dependencies=READERS)
    async def events(
        request: Request,
        service: Serving,
        after: Annotated[int | None, Query(ge=0, le=2**53)] = None,
    ) -> StreamingResponse:
        told = request.headers.get("last-event-id", "")
        start = int(told) if NUMBER.fullmatch(told) else after
        if start is None:
            start = await run_in_threadpool(service.reports.last_event)
        return StreamingResponse(_event_stream(service, start), media_type="text/event-stream")

    @app.post("/v1/scores", status_code=204, openapi_extra=_takes(Score))
    def score(
        service: Serving, caller: By, told: Annotated[Score, Depends(_read(Score))]
    ) -> Response:
        service.reports.score(caller, told)
        return Response(status_code=204)

    @app.get("/metrics", response_class=PlainTextResponse)
    def metrics(request: Request) -> Response:
        text, kind = request.app.state.metrics.page()
        return Response(text, media_type=kind)


async def _event_stream(service: Service, after: int) -> AsyncIterator[str]:
    """Server-sent events; a comment now and then keeps the line open and notices who has left."""
    while True:
        found = await run_in_threadpool(service.reports.events, after, EVENTS_AT_ONCE)
        for event in found:
            after = event.number
            yield f"id: {event.number}\nevent: {event.kind}\ndata: {event.model_dump_json()}\n\n"
        if not found:
            yield ": nothing new\n\n"
        await asyncio.sleep(EVENT_POLL_SECONDS)


def _asked_range(header: str | None, size: int) -> tuple[int, int]:
    """Start and end of a byte range; the whole where none was asked for."""
    if not header:
        return 0, size
    unit, _, span = header.partition("=")
    first, dash, last = span.strip().partition("-")
    numbers = NUMBER.fullmatch(first) and (not last or NUMBER.fullmatch(last))
    if unit.strip() != "bytes" or not dash or not numbers:
        raise RefusedError("malformed", f"cannot give the range {header[:80]!r}")
    start, end = int(first), min(int(last) + 1 if last else size, size)
    if start >= end:
        raise RefusedError("malformed", f"the range {header!r} is outside of {size} bytes")
    return start, end


# Every error as a Refusal


def _add_refusals(app: FastAPI) -> None:
    @app.exception_handler(RefusedError)
    async def refused(request: Request, error: RefusedError) -> Response:
        return _refusal(error.code, str(error))

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return _refusal("malformed", f"{'.'.join(map(str, first['loc']))}: {first['msg']}")

    @app.exception_handler(NotFoundError)
    async def missing(request: Request, error: NotFoundError) -> Response:
        return _refusal("not_found", str(error))

    @app.exception_handler(DBAPIError)
    async def no_database(request: Request, error: DBAPIError) -> Response:
        return _refusal("unavailable", "the ledger does not answer; try again")

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        log.error("%s %s", request.method, request.url.path, exc_info=error)
        return _refusal("internal", "a bug of the coordinator; its log tells more")

    @app.exception_handler(BlocktrainError)
    async def failed(request: Request, error: BlocktrainError) -> Response:
        return _refusal("unavailable", str(error))

    @app.exception_handler(HTTPException)
    async def by_framework(request: Request, error: HTTPException) -> Response:
        answer = _refusal(CODE_OF.get(error.status_code, "malformed"), str(error.detail))
        answer.status_code = error.status_code
        return answer


def _refusal(code: str, reason: str) -> Response:
    body = json.dumps(Refusal(error=code, reason=reason).model_dump())  # type: ignore[arg-type]
    headers = {"retry-after": "1"} if code in ("slow_down", "unavailable") else None
    return Response(body, STATUS_OF[code], headers, media_type="application/json")
