"""Trying again: after how long, and until when.

The pause grows with every failure and is drawn between nothing and its full length (full jitter),
so that machines that lost the same coordinator do not all come back at once. Knows no HTTP.
"""

import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import TypeVar
from urllib.request import getproxies

import httpx
from pydantic import ValidationError

from blocktrain import __version__
from blocktrain.errors import ProtocolError, RefusedError, UnreachableError, UntrustedError
from blocktrain.protocol.invite import Invite
from blocktrain.protocol.messages import Refusal
from blocktrain.protocol.tls import pinned_context
from blocktrain.worker.clock import Clock
from blocktrain.worker.wire import Wire

FIRST_PAUSE = 0.5
LONGEST_PAUSE = 20.0
LONGEST_ASKED_PAUSE = 300.0
SLICE = 0.25  # of a pause, after which it is asked whether the call is still wanted

Result = TypeVar("Result")


class PassingError(UnreachableError):
    """A failure that may pass by itself; `after`: seconds the other side asked to wait."""

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


@dataclass(frozen=True)
class Patience:
    """Until when (on the monotonic clock) calls may go on trying, and what ends them before."""

    until: float
    wanted: Callable[[], bool] = lambda: True

    def also(self, wanted: Callable[[], bool]) -> "Patience":
        """One that ends on this as well."""
        return Patience(self.until, lambda: self.wanted() and wanted())


class Retry:
    def __init__(self, clock: Clock, random: Random) -> None:
        self._clock, self._random = clock, random

    def __call__(
        self,
        attempt: Callable[[], Result],
        patience: Patience,
        at_once: int = 1,
        on_pause: Callable[[PassingError, float], None] = lambda failure, left: None,
    ) -> Result:
        """Repeat an attempt while its failures may pass; every `at_once` of them, pause, and say
        why, and for how many seconds more it will be tried."""
        failures = 0
        while True:
            try:
                return attempt()
            except PassingError as failure:
                failures += 1
                rounds, in_round = divmod(failures, at_once)
                pause = 0.0 if in_round else self._drawn(rounds)
                left = patience.until - self._clock.monotonic()
                if not in_round and left > 0.0:
                    on_pause(failure, left)
                if failure.after is not None:
                    pause += min(failure.after, LONGEST_ASKED_PAUSE)
                    left -= failure.after
                if left <= 0.0 or not self._waited(min(pause, left), patience):
                    raise UnreachableError(str(failure)) from None

    def _drawn(self, rounds: int) -> float:
        return self._random.uniform(0.0, min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(rounds - 1, 16)))

    def _waited(self, seconds: float, patience: Patience) -> bool:
        """False: nobody waits for the result any more."""
        ends = self._clock.monotonic() + seconds
        while patience.wanted():
            left = ends - self._clock.monotonic()
            if left <= 0.0:
                return True
            self._clock.sleep(min(left, SLICE))
        return False


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


LARGEST_CERTIFICATE = 64 * 1024

OpenHttp = Callable[[ssl.SSLContext], httpx.Client]


class CoordinatorConnection:
    """May be used by several threads at once."""

    def __init__(self, invite: Invite, open_http: OpenHttp, clock: Clock, random: Random) -> None:
        self.clock = clock
        self.retry = Retry(clock, random)
        self._invite, self._open_http = invite, open_http
        self._current = 0  # the address that answered last
        self._trusted: httpx.Client | None = None
        self._public: httpx.Client | None = None
        self._lock = threading.Lock()
        self._silent = False
        # Told once when no address answers any more: why, and for how many seconds it is tried.
        self.on_silence: Callable[[str, float], None] = lambda reason, seconds: None

    def attempt(self, attempt: Callable[[httpx.Client, str], Result], patience: Patience) -> Result:
        """Try with one address after another until it works or patience ends."""

        def once() -> Result:
            http, current = self._trusted_http(), self._current
            try:
                answer = attempt(http, self._invite.addresses[current])
            except PassingError:
                self._leave(current)
                raise
            self._silent = False
            return answer

        return self.retry(once, patience, len(self._invite.addresses), self._tell_silence)

    def public_http(self) -> httpx.Client:
        """For links to other places, which the machine's own authorities vouch for."""
        with self._lock:
            self._public = self._public or self._open_http(ssl.create_default_context())
            return self._public

    def close(self) -> None:
        with self._lock:
            for http in (self._trusted, self._public):
                if http:
                    http.close()

    def _tell_silence(self, failure: PassingError, seconds: float) -> None:
        if failure.after is not None:  # an answer, if only that it is busy
            return
        with self._lock:
            known, self._silent = self._silent, True
        if not known:
            self.on_silence(str(failure), seconds)

    def _leave(self, address: int) -> None:
        with self._lock:
            if self._current == address:
                self._current = (address + 1) % len(self._invite.addresses)

    def _trusted_http(self) -> httpx.Client:
        with self._lock:
            self._trusted = self._trusted or self._open_http(self._context())
            return self._trusted

    def _context(self) -> ssl.SSLContext:
        if self._invite.fingerprint is None:
            return ssl.create_default_context()
        failures: list[Exception] = []
        with self._open_http(_unverified()) as http:
            for address in self._invite.addresses:
                try:
                    certificate = self._certificate(http, address)
                    return pinned_context(certificate, self._invite.fingerprint)
                except (PassingError, ProtocolError) as failure:
                    failures.append(failure)
        # One that lies is worth more attention than one that does not answer.
        raise next((f for f in failures if isinstance(f, UntrustedError)), failures[-1])

    def _certificate(self, http: httpx.Client, address: str) -> str:
        url = address + "/v1/ca"
        body = whole_answer(http, self.clock, "GET", url, most=LARGEST_CERTIFICATE)
        return body.decode("ascii", errors="replace")


def _unverified() -> ssl.SSLContext:
    """For the one request whose answer is checked by its content."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
