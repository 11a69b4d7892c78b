"""The routes of the run page: its files, what it shows, and the operator's actions.

The page authorizes itself by a header, never by a cookie, so that no other web site can act through
a browser that has it open.
"""

import gzip
import hashlib
import io
import mimetypes
from dataclasses import replace
from importlib.resources import files
from typing import get_args

import segno
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from blocktrain.coordinator.api import NUMBER, endpoint
from blocktrain.coordinator.control import set_control
from blocktrain.coordinator.endpoints import RequestContext
from blocktrain.coordinator.members import DAY
from blocktrain.coordinator.unmerger import Unmerged, Unmerger
from blocktrain.errors import RefusedError
from blocktrain.protocol import page_messages
from blocktrain.protocol.messages import BlockIndex, Count, Identifier, Reason
from blocktrain.protocol.status_messages import EventKind

SEARCH_COST = 20.0  # a search reads thousands of events
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "vary": "accept-encoding",
    "x-content-type-options": "nosniff",
}
KINDS = frozenset(get_args(EventKind))


# Files


def page_routes() -> list[Route]:
    folder = files("blocktrain.coordinator") / "page"
    contents = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    routes = [_file(f"/page/{name}", name, content) for name, content in contents.items()]
    return [_file("/", "index.html", contents["index.html"]), *routes]


def _file(path: str, name: str, content: bytes) -> Route:
    media_type, compressed = mimetypes.guess_type(name)[0], gzip.compress(content)
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'

    async def handler(request: Request) -> Response:
        headers = {**HEADERS, "etag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(None, 304, headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(compressed, 200, {**headers, "content-encoding": "gzip"}, media_type)
        return Response(content, 200, headers, media_type)

    return Route(path, handler)


# What it shows


@endpoint("GET", "/health", "anyone")
async def health(request: RequestContext) -> page_messages.Health:
    return await request.on_ledger(request.service.reports.health)


@endpoint("GET", "/v1/page/overview", "viewer", gives=page_messages.Overview)
async def overview(request: RequestContext) -> Response:
    return (await request.service.feed.overview.get()).response(request.http)


@endpoint("GET", "/v1/page/charts", "viewer", gives=page_messages.Charts)
async def charts(request: RequestContext) -> Response:
    return (await request.service.feed.charts.get()).response(request.http)


@endpoint("GET", "/v1/page/workers", "viewer", gives=page_messages.Contributors)
async def contributors(request: RequestContext) -> Response:
    workers = request.service.feed.workers(private=request.client.is_operator)
    return (await workers.get()).response(request.http)


@endpoint("GET", "/v1/page/workers/{number}", "viewer")
async def contribution(request: RequestContext, number: Count) -> page_messages.ContributionCurve:
    feed = request.service.feed
    return await feed.call(lambda: feed.page.contribution(number))


@endpoint("GET", "/v1/page/events", "viewer")
async def search_events(
    request: RequestContext,
    before: Count | None,
    kinds: Reason | None,
    worker: Count | None,
    block: BlockIndex | None,
) -> page_messages.PageEvents:
    """`kinds`: separated by commas."""
    wanted = frozenset(kinds.split(",")) if kinds else frozenset()
    if unknown := sorted(wanted - KINDS):
        raise RefusedError("malformed", f"kinds: there are no events of kind {unknown[0]!r}")
    request.service.limits.spend(f"search {request.client.address}", SEARCH_COST)
    feed, private = request.service.feed, request.client.is_operator
    return await feed.call(lambda: feed.page.search(before, wanted, worker, block, private=private))


@endpoint("GET", "/v1/page/live", "viewer", gives="text/event-stream")
async def live(request: RequestContext, after: Count | None) -> Response:
    last = request.http.headers.get("last-event-id", "")
    feed, private = request.service.feed, request.client.is_operator
    start = int(last) if NUMBER.fullmatch(last) else after
    if start is None:
        start = await feed.call(lambda: feed.page.last_event)
    request.held.enter_context(request.service.limits.page_stream(request.client))
    stream = feed.stream(start, private=private)
    return StreamingResponse(stream, media_type="text/event-stream")


# The operator


@endpoint("POST", "/v1/operator/control", "operator")
async def control(
    request: RequestContext, message: page_messages.ControlRequest
) -> page_messages.ControlAnswer:
    run = request.service.run
    ended = await request.on_ledger(set_control, run.ledger, run.clock, message.control)
    request.service.feed.expire()
    return page_messages.ControlAnswer(control=message.control, ended_leases=ended)


@endpoint("POST", "/v1/operator/ban", "operator")
async def ban(request: RequestContext, message: page_messages.BanRequest) -> None:
    await request.on_ledger(request.service.operator.ban, message.worker)
    request.service.feed.expire()


@endpoint("POST", "/v1/operator/unmerge", "operator")
async def unmerge(
    request: RequestContext, message: page_messages.UnmergeRequest
) -> page_messages.UnmergeAnswer:
    """Remove a worker's merged updates, as far back as updates are kept."""
    run, reason = request.service.run, message.reason or "removed by the operator"

    def remove() -> list[Unmerged]:
        done = (
            Unmerger(run).unmerge(block, lambda row: row.worker == message.worker, reason)
            for block in range(run.config.block_count)
        )
        return [each for each in done if each]

    unmerged = await run_in_threadpool(remove)
    request.service.feed.expire()
    request.service.new_versions.notify()
    return page_messages.UnmergeAnswer(
        updates=sum(len(each.removed) for each in unmerged),
        blocks=tuple(each.block for each in unmerged),
    )


@endpoint("GET", "/v1/operator/invites", "operator")
async def invites(request: RequestContext) -> page_messages.Invites:
    rows = await request.on_ledger(request.service.operator.invites)
    return page_messages.Invites(
        invites=tuple(
            page_messages.InviteSummary(
                id=row.invite,
                role=row.role,
                uses_left=row.uses_left,
                seconds_left=row.seconds_left,
                revoked=row.revoked,
            )
            for row in rows
        )
    )


@endpoint("POST", "/v1/operator/invites", "operator")
async def new_invite(
    request: RequestContext, message: page_messages.InviteRequest
) -> page_messages.NewInvite:
    draft = request.service.page_settings.draft
    if draft is None:
        raise RefusedError(
            "conflict",
            "this coordinator does not know its own address; start it with --advertise HOST",
        )
    operator, uses = request.service.operator, message.uses
    made = await request.on_ledger(operator.new_invite, message.role, uses, message.days * DAY)
    text = replace(draft, secret=made.secret).encode()
    return page_messages.NewInvite(
        id=made.invite, invite=text, command=f"blocktrain worker {text}", qr=_qr_code(text)
    )


@endpoint("POST", "/v1/operator/invites/{invite}/revoke", "operator")
async def revoke(request: RequestContext, invite: Identifier) -> None:
    await request.on_ledger(request.service.operator.revoke, invite)


def _qr_code(text: str) -> str:
    """A text's QR code as SVG. It is dark on white in every theme, since some cameras cannot read
    the inverse."""
    out = io.BytesIO()
    segno.make(text, error="m").save(
        out, kind="svg", xmldecl=False, border=4, light="#fff", omitsize=True
    )
    return out.getvalue().decode()
