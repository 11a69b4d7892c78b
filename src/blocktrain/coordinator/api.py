"""The HTTP routes of docs/PROTOCOL.md: a request calls the service, whose answer is a message.

A route that is a single ledger transaction runs it through `on_ledger`. Other routes await a
service coroutine, or read in a thread.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import IO

from starlette.concurrency import run_in_threadpool
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from blocktrain import faults
from blocktrain.coordinator.endpoints import (
    BYTES,
    Endpoint,
    RequestContext,
    declare,
    parse_message,
)
from blocktrain.coordinator.members import TOKEN_SECONDS
from blocktrain.coordinator.reports import SCORING_ROLES
from blocktrain.errors import ProtocolError, RefusedError
from blocktrain.protocol import check_messages, identity, messages, status_messages

PIECE_BYTES = 1 << 20  # read size of an outgoing chunk; bounds its memory
RETURN_COST = 500.0  # high: a lease that is taken and returned still leaves a ledger row
EVENT_POLL_SECONDS = 0.5
EVENTS_PER_POLL = 500
NUMBER = re.compile(r"[0-9]{1,18}")
RANGE = re.compile(r"\s*bytes\s*=\s*([0-9]{1,18})-([0-9]{0,18})\s*")

ENDPOINTS: list[Endpoint] = []
endpoint = partial(declare, ENDPOINTS)


# Joining


@endpoint("GET", "/v1/hello", "anyone")
async def hello(request: RequestContext) -> messages.Hello:
    protocols = await request.on_ledger(request.service.members.protocols)
    return messages.Hello(run=request.service.run.id, protocols=protocols)


@endpoint("GET", "/v1/ca", "anyone", gives="text/plain")
async def authority(request: RequestContext) -> Response:
    return PlainTextResponse(request.service.run.authority.certificate_pem)


@endpoint("POST", "/v1/join", "anyone")
async def join(request: RequestContext, message: messages.Join) -> messages.Joined:
    request.service.limits.joining(request.client.address, identity.hash_secret(message.invite))
    return await request.on_ledger(request.service.members.join, message)


@endpoint("POST", "/v1/token", "anyone")
async def token(request: RequestContext, message: messages.TokenRequest) -> messages.Token:
    return await request.on_ledger(request.service.members.renew, message)


# Leases


@endpoint("POST", "/v1/lease", "worker")
async def lease(request: RequestContext, message: messages.LeaseRequest) -> messages.LeaseAnswer:
    answer = await request.service.leases.request(request.caller, message)
    faults.reached("claimed")
    return answer


@endpoint("POST", "/v1/lease/{lease}/progress", "worker")
async def progress(
    request: RequestContext, message: messages.LeaseProgress, lease: messages.Identifier
) -> messages.LeaseState:
    call = request.service.leases.progress
    return await request.on_ledger(call, request.caller, lease, message)


@endpoint("POST", "/v1/lease/{lease}/return", "worker", cost=RETURN_COST)
async def give_back(
    request: RequestContext, message: messages.LeaseReturn, lease: messages.Identifier
) -> messages.LeaseState:
    call = request.service.leases.give_back
    return await request.on_ledger(call, request.caller, lease, message)


# Updates


@endpoint("POST", "/v1/updates", "worker")
async def offer(request: RequestContext, message: messages.UpdateOffer) -> messages.UploadState:
    return await request.service.updates.offer(request.caller, message)


@endpoint("PUT", "/v1/chunks/{name}", "worker", takes="bytes")
async def put_chunk(
    request: RequestContext, name: messages.Hash, lease: messages.Identifier
) -> None:
    parts = request.parts_on_disk
    size = await request.service.updates.receive_chunk(request.caller, lease, name, parts)
    request.service.metrics.received.inc(size)


@endpoint("POST", "/v1/updates/{lease}/commit", "worker")
async def commit(request: RequestContext, lease: messages.Identifier) -> messages.Receipt:
    return await request.service.updates.commit(request.caller, lease)


@endpoint("POST", "/v1/updates/whole", "worker", takes="bytes")
async def whole(request: RequestContext) -> messages.Receipt:
    limit = request.service.run.description.whole_bytes
    try:
        text, data = messages.split_whole_update(await request.body(messages.LARGEST_BODY))
    except ProtocolError as error:
        raise RefusedError("malformed", str(error)) from None
    if len(data) > limit:
        raise RefusedError(
            "too_large",
            f"an update of more than {limit} bytes must be sent in chunks; send its offer first, to"
            " /v1/updates",
        )
    message = parse_message(messages.UpdateOffer, text)
    receipt = await request.service.updates.receive_whole(request.caller, message, data)
    request.service.metrics.received.inc(len(data))
    return receipt


@endpoint("POST", "/v1/updates/{lease}/reveal", "worker")
async def reveal(
    request: RequestContext, message: messages.RevealOffer, lease: messages.Identifier
) -> messages.UploadState:
    state = await request.service.checks.replays.receive(request.caller, lease, message)
    if not state.missing:
        request.service.checks.added.notify()
    return state


# Checks


@endpoint("POST", "/v1/checks", "worker")
async def check(
    request: RequestContext, message: check_messages.CheckRequest
) -> check_messages.CheckAnswer:
    return await request.service.checks.request(request.caller, message)


@endpoint("POST", "/v1/checks/{check}", "worker")
async def report_check(
    request: RequestContext, message: check_messages.CheckResult, check: messages.Identifier
) -> None:
    call = request.service.checks.report
    await request.on_ledger(call, request.caller, check, message)
    request.service.checks.reported()


# Blobs


@endpoint("GET", "/v1/blobs/{name}", "reader")
async def blob(request: RequestContext, name: messages.Hash) -> messages.BlobAnswer:
    return await run_in_threadpool(request.service.reports.blob, name)


@endpoint("GET", "/v1/differences", "reader")
async def differences(
    request: RequestContext, block: messages.BlockIndex, after: messages.Count, to: messages.Count
) -> messages.Differences:
    return await run_in_threadpool(request.service.reports.differences, block, after, to)


@endpoint("GET", "/v1/chunks/{name}", "reader", gives=BYTES)
async def get_chunk(request: RequestContext, name: messages.Hash) -> Response:
    """Send a chunk or a range of it, unverified: the receiver checks its hash."""
    file, size = await run_in_threadpool(request.service.run.chunks.open, name)
    try:
        start, end = _byte_range(request.http.headers.get("range"), size)
    except RefusedError:
        file.close()
        raise
    request.service.metrics.bytes_sent.inc(end - start)
    headers = {"etag": f'"{name}"', "accept-ranges": "bytes", "content-length": str(end - start)}
    status = 200
    if (start, end) != (0, size):
        status, headers["content-range"] = 206, f"bytes {start}-{end - 1}/{size}"
    return StreamingResponse(_pieces(file, start, end), status, headers, media_type=BYTES)


async def _pieces(file: IO[bytes], start: int, end: int) -> AsyncIterator[bytes]:
    with file:
        file.seek(start)
        while start < end:
            piece = await run_in_threadpool(file.read, min(PIECE_BYTES, end - start))
            if not piece:
                return  # the file was truncated; the receiver notices the missing bytes
            start += len(piece)
            yield piece


# Reports


@endpoint("GET", "/v1/run", "reader")
async def run(request: RequestContext) -> messages.RunDescription:
    return request.service.run.description


@endpoint("GET", "/v1/addresses", "reader")
async def addresses(request: RequestContext) -> messages.Addresses:
    draft = request.service.page_settings.draft
    return messages.Addresses(addresses=draft.addresses if draft else ())


@endpoint("GET", "/v1/status", "reader")
async def status(request: RequestContext) -> status_messages.Status:
    reader = request.reader
    if reader and reader.role in SCORING_ROLES:  # polling the status is its heartbeat
        await request.on_ledger(request.service.members.note, reader)
    return await run_in_threadpool(request.service.reports.status)


@endpoint("GET", "/v1/events", "reader", gives="text/event-stream")
async def events(request: RequestContext, after: messages.Count | None) -> Response:
    last = request.http.headers.get("last-event-id", "")
    start = int(last) if NUMBER.fullmatch(last) else after
    if start is None:
        start = await run_in_threadpool(request.service.reports.last_event)
    request.held.enter_context(request.service.limits.event_stream(request.client))
    return StreamingResponse(_event_stream(request, start), media_type="text/event-stream")


async def _event_stream(request: RequestContext, after: int) -> AsyncIterator[str]:
    """Stream the events after number `after` as server-sent events. While there are none, every
    poll sends a comment, which keeps the connection open and detects a reader that has left. The
    stream ends after the lifetime of a token: a reader that reconnects is authorized again, and
    resumes where it stopped."""
    until = time.monotonic() + TOKEN_SECONDS
    while time.monotonic() < until:
        reports = request.service.reports
        batch = await run_in_threadpool(reports.events, after, EVENTS_PER_POLL)
        for event in batch:
            after = event.number
            yield f"id: {after}\nevent: {event.kind}\ndata: {event.model_dump_json()}\n\n"
        if not batch:
            yield ": nothing new\n\n"
        await asyncio.sleep(EVENT_POLL_SECONDS)


@endpoint("POST", "/v1/scores", "worker")
async def score(request: RequestContext, message: status_messages.Score) -> None:
    await request.on_ledger(request.service.reports.score, request.caller, message)


@endpoint("GET", "/metrics", "anyone", gives="text/plain")
async def metrics(request: RequestContext) -> Response:
    text, kind = await run_in_threadpool(request.service.metrics.page)
    return Response(text, media_type=kind)


def _byte_range(header: str | None, size: int) -> tuple[int, int]:
    """The first byte and the end (exclusive) that a Range header requests; the whole chunk without
    a header."""
    if not header:
        return 0, size
    match = RANGE.fullmatch(header)
    if not match:
        problem = f"the range {header[:80]!r} is not of the form bytes=FIRST-LAST"
        raise RefusedError("malformed", problem)
    first, last = match.groups()
    start, end = int(first), min(int(last) + 1 if last else size, size)
    if start >= end:
        raise RefusedError(
            "malformed", f"the range {header!r} is outside of the chunk's {size} bytes"
        )
    return start, end
