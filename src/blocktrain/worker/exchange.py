"""One HTTP request and its answer: what can go wrong between them, in the project's own errors.

A failure that may pass (no connection, a cut one, one that trickles, 5xx, 429) is a PassingError,
a refusal is a RefusedError with its code, anything else that is not an answer a ProtocolError.
Knows nothing of routes or of trying again.
"""

import ssl
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from urllib.request import getproxies

import httpx
from pydantic import ValidationError

from blocktrain import __version__
from blocktrain.errors import ProtocolError, RefusedError
from blocktrain.protocol.messages import Refusal
from blocktrain.worker.clock import Clock
from blocktrain.worker.retry import PassingError
from blocktrain.worker.wire import Wire

CONNECT_SECONDS = 10.0
BETWEEN_BYTES_SECONDS = 30.0
SLOWEST = 512  # bytes per second; below that a connection counts as dead
LARGEST_ANSWER = 64 * 1024 * 1024
LARGEST_ERROR = 64 * 1024
CONNECTIONS = 16
PASSING = (408, 425, 429)
# What a status means where something in between, or an object store, gave it.
CODES = {
    401: "unauthorized", 403: "forbidden", 404: "not_found", 409: "conflict", 410: "gone",
    413: "too_large", 422: "malformed",
}  # fmt: skip
IDLE_SECONDS = 60.0  # less than a coordinator keeps a connection, and far less than routers do


def open_http(context: ssl.SSLContext) -> httpx.Client:
    return httpx.Client(
        verify=context,
        transport=None if getproxies() else Wire(context, IDLE_SECONDS),  # httpx knows of proxies
        timeout=httpx.Timeout(BETWEEN_BYTES_SECONDS, connect=CONNECT_SECONDS),
        limits=httpx.Limits(max_connections=CONNECTIONS, keepalive_expiry=IDLE_SECONDS),
        headers={"User-Agent": f"blocktrain/{__version__}", "Accept-Encoding": "identity"},
    )


@contextmanager
def exchange(
    http: httpx.Client,
    clock: Clock,
    method: str,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    content: bytes | Iterable[bytes] | None = None,
    room: memoryview | None = None,
) -> Iterator[httpx.Response]:
    """Send a request; the answer's head, if it is a good one, with its body still to be read.
    `room`: where that may be received (`worker.wire`)."""
    extensions = {"room": room} if room else None
    try:
        with http.stream(
            method, url, headers=headers, content=content, extensions=extensions
        ) as response:
            if not response.is_success:
                raise _failure(response, clock)
            yield response
    except httpx.TransportError as error:
        raise PassingError(f"no answer from {_place(url)}: {_words(error)}") from None
    except httpx.InvalidURL:
        raise ProtocolError(f"{_place(url)!r} is not an address") from None


def pieces(
    response: httpx.Response, most: int, clock: Clock, patience: float = BETWEEN_BYTES_SECONDS
) -> Iterator[bytes]:
    """A body as it arrives, at most so many bytes; one that trickles is given up.

    Only the time spent waiting for bytes counts, not what the caller does between them.
    """
    waited, received = 0.0, 0
    stream = response.iter_raw()
    while True:
        began = clock.monotonic()
        piece = next(stream, None)
        waited += clock.monotonic() - began
        if piece is None:
            return
        received += len(piece)
        if received > most:
            raise ProtocolError(f"{_place(str(response.url))} sent more than {most} bytes")
        if waited > patience + received / SLOWEST:
            raise PassingError(f"{_place(str(response.url))} sends too slowly")
        yield piece


def whole_answer(
    http: httpx.Client,
    clock: Clock,
    method: str,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    content: bytes | Iterable[bytes] | None = None,
    most: int = LARGEST_ANSWER,
) -> bytes:
    with exchange(http, clock, method, url, headers=headers, content=content) as response:
        return b"".join(pieces(response, most, clock))


def _failure(response: httpx.Response, clock: Clock) -> Exception:
    status, place = response.status_code, _place(str(response.url))
    refusal = _refusal(response, clock)
    reason = refusal.reason if refusal else f"{place} answered {status}"
    if status in PASSING or status >= 500:
        return PassingError(reason, _retry_after(response))
    code = refusal.error if refusal else CODES.get(status)
    return RefusedError(code, reason) if code else ProtocolError(reason)


def _refusal(response: httpx.Response, clock: Clock) -> Refusal | None:
    try:
        return Refusal.model_validate_json(b"".join(pieces(response, LARGEST_ERROR, clock)))
    except (ValidationError, ProtocolError):
        return None


def _retry_after(response: httpx.Response) -> float | None:
    """In seconds; the other form, a date, is not used by the protocol."""
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isascii() and text.isdigit() else None


def _place(url: str) -> str:
    """Where it goes, without what comes after: the rest of a link may be a secret."""
    scheme, separator, rest = url.partition("://")
    return scheme + separator + rest.split("/", 1)[0]


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
