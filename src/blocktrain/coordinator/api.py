"""The routes of docs/PROTOCOL.md: bytes to messages, messages to bytes.

A route that is one ledger transaction runs it by `on_ledger`. All others await a coroutine of the
service, or read in a thread.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from typing import IO

from starlette.concurrency import run_in_threadpool
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from blocktrain import faults
from blocktrain.coordinator.endpoints import BYTES, Endpoint, RequestContext, parse_message
from blocktrain.coordinator.members import TOKEN_SECONDS
from blocktrain.errors import ProtocolError, RefusedError
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
    RunDescription,
    Score,
    Status,
    Token,
    TokenRequest,
    UpdateOffer,
    UploadState,
    split_whole_update,
)

PIECE_BYTES = 1 << 20  # of a chunk on its way out: all of it that is in memory
RETURN_COST = 500.0  # of reads: a lease that is taken and returned stays in the ledger
EVENT_POLL_SECONDS = 0.5
EVENTS_PER_POLL = 500
NUMBER = re.compile(r"[0-9]{1,18}")


def _answer(message: Message) -> Response:
    return Response(message.model_dump_json(), media_type="application/json")


# Joining


async def hello(request: RequestContext) -> Response:
    return _answer(Hello(run=request.service.run.id, protocols=(PROTOCOL,)))


async def authority(request: RequestContext) -> Response:
    return PlainTextResponse(request.service.run.authority.certificate_pem)


async def join(request: RequestContext) -> Response:
    message = await request.message(Join)
    return _answer(await request.on_ledger(request.service.members.join, message))


async def token(request: RequestContext) -> Response:
    message = await request.message(TokenRequest)
    return _answer(await request.on_ledger(request.service.members.renew, message))


# Leases


async def lease(request: RequestContext) -> Response:
    message = await request.message(LeaseRequest)
    answer = await request.service.leases.request(request.caller, message)
    faults.reached("claimed")
    return _answer(answer)


async def progress(request: RequestContext) -> Response:
    lease_id, message = request.path("lease"), await request.message(LeaseProgress)
    leases = request.service.leases
    return _answer(await request.on_ledger(leases.progress, request.caller, lease_id, message))


async def give_back(request: RequestContext) -> Response:
    lease_id, message = request.path("lease"), await request.message(LeaseReturn)
    leases = request.service.leases
    return _answer(await request.on_ledger(leases.give_back, request.caller, lease_id, message))


# Updates


async def offer(request: RequestContext) -> Response:
    message = await request.message(UpdateOffer)
    return _answer(await request.service.updates.offer(request.caller, message))


async def put_chunk(request: RequestContext) -> Response:
    name, lease_id = request.path("name"), request.required_query("lease", Identifier)
    parts = request.parts(CHUNK_BYTES)
    size = await request.service.updates.receive_chunk(request.caller, lease_id, name, parts)
    request.metrics.received(size)
    return Response(status_code=204)


async def commit(request: RequestContext) -> Response:
    lease_id = request.path("lease")
    return _answer(await request.service.updates.commit(request.caller, lease_id))


async def whole(request: RequestContext) -> Response:
    limit = request.service.run.description.whole_bytes
    try:
        text, data = split_whole_update(await request.body(LARGEST_BODY))
    except ProtocolError as error:
        raise RefusedError("malformed", str(error)) from None
    if len(data) > limit:
        raise RefusedError(
            "too_large", f"updates of more than {limit} bytes are sent in chunks: offer it first"
        )
    message = parse_message(UpdateOffer, text)
    receipt = await request.service.updates.receive_whole(request.caller, message, data)
    request.metrics.received(len(data))
    return _answer(receipt)


# Blobs


async def blob(request: RequestContext) -> Response:
    return _answer(await run_in_threadpool(request.service.reports.blob, request.path("name")))


async def differences(request: RequestContext) -> Response:
    block = request.required_query("block", BlockIndex)
    after, to = request.required_query("after", Count), request.required_query("to", Count)
    reports = request.service.reports
    return _answer(await run_in_threadpool(reports.differences, block, after, to))


async def get_chunk(request: RequestContext) -> Response:
    """The receiver checks the bytes against the name, so they are not checked here."""
    name = request.path("name")
    file, size = await run_in_threadpool(request.service.run.chunks.open, name)
    try:
        start, end = _byte_range(request.http.headers.get("range"), size)
    except RefusedError:
        file.close()
        raise
    headers = {
        "etag": f'"{name}"',
        "accept-ranges": "bytes",
        "content-length": str(end - start),
    }
    is_whole = (start, end) == (0, size)
    if not is_whole:
        headers["content-range"] = f"bytes {start}-{end - 1}/{size}"
    request.metrics.sent(end - start)
    return StreamingResponse(
        _pieces(file, start, end), 200 if is_whole else 206, headers, media_type=BYTES
    )


async def _pieces(file: IO[bytes], start: int, end: int) -> AsyncIterator[bytes]:
    with file:
        file.seek(start)
        while start < end:
            piece = await run_in_threadpool(file.read, min(PIECE_BYTES, end - start))
            if not piece:
                return  # truncated meanwhile; the receiver counts its bytes
            start += len(piece)
            yield piece


# Reports


async def run(request: RequestContext) -> Response:
    return _answer(request.service.run.description)


async def status(request: RequestContext) -> Response:
    reader = request.reader
    if reader and reader.role == "evaluate":  # evaluators poll the status for new versions
        await request.on_ledger(request.service.members.note, reader)
    return _answer(await run_in_threadpool(request.service.reports.status))


async def events(request: RequestContext) -> Response:
    last = request.http.headers.get("last-event-id", "")
    start = int(last) if NUMBER.fullmatch(last) else request.query("after", Count)
    if start is None:
        start = await run_in_threadpool(request.service.reports.last_event)
    if request.event_streams.locked():
        raise RefusedError("slow_down", "too many event streams are open; try again later")
    return StreamingResponse(_event_stream(request, start), media_type="text/event-stream")


async def _event_stream(request: RequestContext, after: int) -> AsyncIterator[str]:
    """Server-sent events. A comment at every poll without events keeps the connection open, and
    shows whether the reader is still there. The stream ends when a token would: a reader that
    connects again is authorized again, and continues from there."""
    until = time.monotonic() + TOKEN_SECONDS
    async with request.event_streams:
        while time.monotonic() < until:
            reports = request.service.reports
            batch = await run_in_threadpool(reports.events, after, EVENTS_PER_POLL)
            for event in batch:
                after = event.number
                data = event.model_dump_json()
                yield f"id: {event.number}\nevent: {event.kind}\ndata: {data}\n\n"
            if not batch:
                yield ": nothing new\n\n"
            await asyncio.sleep(EVENT_POLL_SECONDS)


async def score(request: RequestContext) -> Response:
    message = await request.message(Score)
    await request.on_ledger(request.service.reports.score, request.caller, message)
    return Response(status_code=204)


async def metrics(request: RequestContext) -> Response:
    text, kind = await run_in_threadpool(request.metrics.page)
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
        takes=LeaseReturn, gives=LeaseState, cost=RETURN_COST,
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


def _byte_range(header: str | None, size: int) -> tuple[int, int]:
    """Start and end; all bytes if there is no header."""
    if not header:
        return 0, size
    unit, _, span = header.partition("=")
    first, dash, last = span.strip().partition("-")
    numbers = NUMBER.fullmatch(first) and (not last or NUMBER.fullmatch(last))
    if unit.strip() != "bytes" or not dash or not numbers:
        raise RefusedError(
            "malformed", f"the range {header[:80]!r} is not of the form bytes=FIRST-LAST"
        )
    start, end = int(first), min(int(last) + 1 if last else size, size)
    if start >= end:
        raise RefusedError("malformed", f"the range {header!r} is outside of {size} bytes")
    return start, end
