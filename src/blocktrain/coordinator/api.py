"""The routes of docs/PROTOCOL.md, and nothing else: bytes to messages, messages to bytes."""

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import IO

from anyio import to_thread
from sqlalchemy.exc import SQLAlchemyError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from blocktrain import faults
from blocktrain.coordinator.endpoints import (
    BYTES,
    AppState,
    Endpoint,
    RequestContext,
    describe,
    parse_message,
)
from blocktrain.coordinator.executor import LedgerExecutor, VerificationQueue
from blocktrain.coordinator.leases import LeaseGrant
from blocktrain.coordinator.limits import RateLimiter
from blocktrain.coordinator.members import TOKEN_SECONDS
from blocktrain.coordinator.reports import CoordinatorMetrics
from blocktrain.coordinator.service import Service
from blocktrain.coordinator.updates import OfferedUpdate
from blocktrain.errors import BlocktrainError, NotFoundError, ProtocolError, RefusedError
from blocktrain.protocol.messages import (
    CHUNK_BYTES,
    LARGEST_BODY,
    PROTOCOL,
    BlobAnswer,
    BlockIndex,
    Count,
    Differences,
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
    UpdateClaim,
    UpdateOffer,
    UploadState,
    Wait,
    split_whole_update,
)

log = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20  # of a chunk on its way in or out: all of it that is in memory
VERIFIED_AT_ONCE = 2  # updates: each has a chunk in memory and keeps a processor busy
THREADS = 20  # fewer than a ledger has connections: the desk always finds one
MOST_LISTENERS = 64  # streams of events, each of which looks into the ledger twice a second
GIVING_BACK = 500.0  # costs as much as 500 looks: a lease taken and given back stays in the ledger
HELD_BACK_SECONDS = 1.0  # at most, of an answer that says to ask again soon
EVENT_POLL_SECONDS = 0.5
EVENTS_AT_ONCE = 500
STATUS_OF = {
    "malformed": 422, "unauthorized": 401, "forbidden": 403, "not_found": 404, "conflict": 409,
    "gone": 410, "too_large": 413, "slow_down": 429, "unavailable": 503, "internal": 500,
}  # fmt: skip
NUMBER = re.compile(r"[0-9]{1,18}")
CODE_OF = {status: code for code, status in STATUS_OF.items()}


def create_app(service: Service) -> Starlette:
    desk, metrics = LedgerExecutor(service.run.ledger), CoordinatorMetrics(service.reports)
    server = AppState(
        service=service,
        desk=desk,
        metrics=metrics,
        verifying=VerificationQueue(VERIFIED_AT_ONCE),
        allowance=RateLimiter(time.monotonic),
        listeners=asyncio.Semaphore(MOST_LISTENERS),
    )

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        to_thread.current_default_thread_limiter().total_tokens = THREADS
        server.desk.start()
        try:
            yield
        finally:
            server.desk.stop()

    document = describe(ENDPOINTS)

    async def openapi(request: Request) -> Response:
        return JSONResponse(document)

    return Starlette(
        routes=[*(action.route(server) for action in ENDPOINTS), Route("/openapi.json", openapi)],
        exception_handlers={
            RefusedError: refused,
            NotFoundError: missing,
            BlocktrainError: failed,
            SQLAlchemyError: no_database,
            HTTPException: by_framework,
            Exception: unforeseen,
        },
        lifespan=lifespan,
    )


def _answer(message: Message) -> Response:
    return Response(message.model_dump_json(), media_type="application/json")


# Joining


async def hello(asked: RequestContext) -> Response:
    return _answer(Hello(run=asked.service.run.id, protocols=(PROTOCOL,)))


async def authority(asked: RequestContext) -> Response:
    return PlainTextResponse(asked.service.run.authority.certificate_pem)


async def join(asked: RequestContext) -> Response:
    return _answer(await asked.desk.run(asked.service.members.join, await asked.message(Join)))


async def token(asked: RequestContext) -> Response:
    told = await asked.message(TokenRequest)
    return _answer(await asked.desk.run(asked.service.members.renew, told))


# Leases


async def lease(asked: RequestContext) -> Response:
    """Whoever would be told to ask again soon is answered when there is something to say, or after
    a while: a version is then with its workers as soon as it is made."""
    wanted, claim = await asked.message(LeaseRequest), asked.service.leases.claim
    clock = asyncio.get_running_loop().time
    until = clock() + (0.0 if wanted.at_once else HELD_BACK_SECONDS)
    while True:
        version = asked.service.versions_made.next()  # from before it is looked for
        try:
            answer = await asked.desk.run(claim, asked.caller, wanted)
            left, told = until - clock(), answer.answer
            if not isinstance(told, Wait) or told.seconds > HELD_BACK_SECONDS or left <= 0:
                break
            await asyncio.wait([version], timeout=min(told.seconds, left))
        finally:
            version.cancel()
    faults.reached("claimed")
    return _answer(answer)


async def progress(asked: RequestContext) -> Response:
    held, told = asked.at("lease"), await asked.message(LeaseProgress)
    leases = asked.service.leases
    return _answer(await asked.desk.run(leases.progress, asked.caller, held, told))


async def give_back(asked: RequestContext) -> Response:
    held, told = asked.at("lease"), await asked.message(LeaseReturn)
    leases = asked.service.leases
    return _answer(await asked.desk.run(leases.give_back, asked.caller, held, told))


# Updates


async def offer(asked: RequestContext) -> Response:
    offered, updates = await asked.message(UpdateOffer), asked.service.updates
    claim = offered.claim
    if not await asked.desk.run(updates.offer, asked.caller, offered):
        return _answer(UploadState(missing=()))
    return _answer(await run_in_threadpool(updates.upload_state, claim.lease, claim.recipe))


async def whole(asked: RequestContext) -> Response:
    """A small update: offered, sent and committed by one request."""
    updates, most = asked.service.updates, asked.service.run.description.whole_bytes
    try:
        text, data = split_whole_update(await asked.body(LARGEST_BODY))
    except ProtocolError as error:
        raise RefusedError("malformed", str(error)) from None
    if len(data) > most:
        raise RefusedError("too_large", f"updates of more than {most} bytes are sent in chunks")
    offered = parse_message(UpdateOffer, text)
    held = await _held(asked, offered.claim)
    if isinstance(held, Receipt):
        return _answer(held)
    if asked.service.run.config.swarm.codec == "none":  # a few numbers
        fault = await run_in_threadpool(updates.take_whole, held, offered, data)
    else:  # of which few bytes may make many
        fault = await asked.verifying.run(updates.take_whole, held, offered, data)
    asked.metrics.received(len(data))
    receipt = await asked.desk.run(updates.settle_whole, asked.caller, held, offered, fault)
    return _settled(asked, receipt)


async def _held(asked: RequestContext, claim: UpdateClaim) -> LeaseGrant | Receipt:
    updates = asked.service.updates
    if known := updates.held(asked.caller, claim.lease):
        return known
    return await asked.desk.run(updates.find_held, asked.caller, claim)


async def put_chunk(asked: RequestContext) -> Response:
    name, upload = asked.at("name"), asked.required("lease", Identifier)
    updates = asked.service.updates
    coming = await _coming(asked, upload)
    if isinstance(coming, Receipt):
        raise RefusedError("conflict", f"this update is {coming.state} already")
    if name not in coming.chunks:
        raise RefusedError("forbidden", "this chunk is no part of the update that was offered")
    with asked.service.run.chunks.incoming() as arriving:
        piece = bytearray()
        async for part in asked.parts(CHUNK_BYTES):
            piece += part
            if len(piece) >= PIECE_BYTES:  # in a thread, as the disk may be slow
                await run_in_threadpool(arriving.write, piece)
                piece = bytearray()
        await run_in_threadpool(arriving.write, piece)
        await run_in_threadpool(updates.keep_chunk, arriving, name)
    await asked.desk.run(asked.service.leases.chunk_came, asked.caller, upload)
    asked.metrics.received(arriving.size)
    return Response(status_code=204)


async def _coming(asked: RequestContext, lease: str) -> OfferedUpdate | Receipt:
    updates = asked.service.updates
    if known := updates.coming(asked.caller, lease):
        return known
    return await asked.desk.run(updates.find, asked.caller, lease)


async def commit(asked: RequestContext) -> Response:
    sent, updates = asked.at("lease"), asked.service.updates
    coming = await _coming(asked, sent)
    if isinstance(coming, Receipt):
        return _answer(coming)

    async def settled() -> Receipt:
        fault = await asked.verifying.run(updates.verify, coming)
        return await asked.desk.run(updates.settle, asked.caller, sent, fault)

    return _settled(asked, await asked.verifying.run_once(sent, settled))


def _settled(asked: RequestContext, receipt: Receipt) -> Response:
    faults.reached("settled")
    asked.service.wake()
    return _answer(receipt)


# Blobs


async def blob(asked: RequestContext) -> Response:
    try:
        return _answer(await run_in_threadpool(asked.service.reports.blob, asked.at("name")))
    except ProtocolError as error:  # a chunk, but no recipe
        raise NotFoundError(str(error)) from None


async def differences(asked: RequestContext) -> Response:
    block = asked.required("block", BlockIndex)
    after, to = asked.required("after", Count), asked.required("to", Count)
    reports = asked.service.reports
    return _answer(await run_in_threadpool(reports.differences, block, after, to))


async def get_chunk(asked: RequestContext) -> Response:
    """Not checked against its name here: whoever asks for it does that anyway."""
    name = asked.at("name")
    file, size = await run_in_threadpool(asked.service.run.chunks.open, name)
    try:
        start, end = _asked_range(asked.request.headers.get("range"), size)
    except RefusedError:
        file.close()
        raise
    headers = {
        "etag": f'"{name}"',
        "accept-ranges": "bytes",
        "content-length": str(end - start),
        "content-range": f"bytes {start}-{end - 1}/{size}",
    }
    whole = (start, end) == (0, size)
    if whole:
        del headers["content-range"]
    asked.metrics.sent(end - start)
    return StreamingResponse(
        _pieces(file, start, end), 200 if whole else 206, headers, media_type=BYTES
    )


async def _pieces(file: IO[bytes], start: int, end: int) -> AsyncIterator[bytes]:
    with file:
        file.seek(start)
        while start < end:
            piece = await run_in_threadpool(file.read, min(PIECE_BYTES, end - start))
            if not piece:
                return  # cut short meanwhile; the receiver counts what it got
            start += len(piece)
            yield piece


# Reports


async def run(asked: RequestContext) -> Response:
    return _answer(asked.service.run.description)


async def status(asked: RequestContext) -> Response:
    reader = asked.reader
    if reader and reader.role == "evaluate":  # whose way to wait for versions this is
        await asked.desk.run(asked.service.members.note, reader)
    return _answer(await run_in_threadpool(asked.service.reports.status))


async def events(asked: RequestContext) -> Response:
    told = asked.request.headers.get("last-event-id", "")
    start = int(told) if NUMBER.fullmatch(told) else asked.parameter("after", Count)
    if start is None:
        start = await run_in_threadpool(asked.service.reports.last_event)
    if asked.listeners.locked():
        raise RefusedError("slow_down", f"{MOST_LISTENERS} listen already; try again later")
    return StreamingResponse(_event_stream(asked, start), media_type="text/event-stream")


async def _event_stream(asked: RequestContext, after: int) -> AsyncIterator[str]:
    """Server-sent events; a comment now and then keeps the line open and notices who has left. It
    ends when a token would: whoever listens shows again that he may, and goes on from there."""
    until = time.monotonic() + TOKEN_SECONDS
    async with asked.listeners:
        while time.monotonic() < until:
            found = await run_in_threadpool(asked.service.reports.events, after, EVENTS_AT_ONCE)
            for event in found:
                after = event.number
                told = event.model_dump_json()
                yield f"id: {event.number}\nevent: {event.kind}\ndata: {told}\n\n"
            if not found:
                yield ": nothing new\n\n"
            await asyncio.sleep(EVENT_POLL_SECONDS)


async def score(asked: RequestContext) -> Response:
    told = await asked.message(Score)
    await asked.desk.run(asked.service.reports.score, asked.caller, told)
    return Response(status_code=204)


async def metrics(asked: RequestContext) -> Response:
    text, kind = await run_in_threadpool(asked.metrics.page)
    return Response(text, media_type=kind)


ENDPOINTS = (
    Endpoint("GET", "/v1/hello", "anyone", hello, gives=Hello),
    Endpoint("GET", "/v1/ca", "anyone", authority, gives="text/plain"),
    Endpoint("POST", "/v1/join", "anyone", join, takes=Join, gives=Joined),
    Endpoint("POST", "/v1/token", "anyone", token, takes=TokenRequest, gives=Token),
    Endpoint("POST", "/v1/lease", "worker", lease, takes=LeaseRequest, gives=LeaseAnswer),
    Endpoint(
        "POST", "/v1/lease/{lease}/progress", "worker", progress,
        takes=LeaseProgress, gives=LeaseState,
    ),
    Endpoint(
        "POST", "/v1/lease/{lease}/return", "worker", give_back,
        takes=LeaseReturn, gives=LeaseState, cost=GIVING_BACK,
    ),
    Endpoint("POST", "/v1/updates", "worker", offer, takes=UpdateOffer, gives=UploadState),
    Endpoint("POST", "/v1/updates/whole", "worker", whole, takes="bytes", gives=Receipt),
    Endpoint(
        "PUT", "/v1/chunks/{name}", "worker", put_chunk,
        takes="bytes", parameters=(("lease", Identifier, True),),
    ),
    Endpoint("POST", "/v1/updates/{lease}/commit", "worker", commit, gives=Receipt),
    Endpoint("GET", "/v1/blobs/{name}", "reader", blob, gives=BlobAnswer),
    Endpoint(
        "GET", "/v1/differences", "reader", differences, gives=Differences,
        parameters=(("block", BlockIndex, True), ("after", Count, True), ("to", Count, True)),
    ),
    Endpoint("GET", "/v1/chunks/{name}", "reader", get_chunk, gives=BYTES),
    Endpoint("GET", "/v1/run", "reader", run, gives=RunDescription),
    Endpoint("GET", "/v1/status", "reader", status, gives=Status),
    Endpoint(
        "GET", "/v1/events", "reader", events,
        gives="text/event-stream", parameters=(("after", Count, False),),
    ),
    Endpoint("POST", "/v1/scores", "worker", score, takes=Score),
    Endpoint("GET", "/metrics", "anyone", metrics, gives="text/plain"),
)  # fmt: skip


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


async def refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return _refusal(error.code, str(error))


async def missing(request: Request, error: Exception) -> Response:
    return _refusal("not_found", str(error))


async def no_database(request: Request, error: Exception) -> Response:
    return _refusal("unavailable", "the ledger does not answer; try again")


async def failed(request: Request, error: Exception) -> Response:
    return _refusal("unavailable", str(error))


async def by_framework(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = _refusal(CODE_OF.get(error.status_code, "malformed"), str(error.detail))
    answer.status_code = error.status_code
    return answer


async def unforeseen(request: Request, error: Exception) -> Response:
    log.error("%s %s", request.method, request.url.path, exc_info=error)
    return _refusal("internal", "a bug of the coordinator; its log tells more")


def _refusal(code: str, reason: str) -> Response:
    body = json.dumps(Refusal(error=code, reason=reason).model_dump())  # type: ignore[arg-type]
    headers = {"retry-after": "1"} if code in ("slow_down", "unavailable") else None
    return Response(body, STATUS_OF[code], headers, media_type="application/json")
