"""HTTP requests to the run's coordinators and to presigned URLs, repeated until one succeeds.

Picks the address, pins the run's certificate, retries transient failures, and turns the others into
this project's errors. Knows neither the messages nor who sends them.
"""

import logging
import ssl
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Generic, TypeVar

import httpx
from pydantic import ValidationError

from blocktrain import __version__
from blocktrain.errors import ProtocolError, RefusedError, UnreachableError, UntrustedError
from blocktrain.protocol.invite import Invite
from blocktrain.protocol.messages import Refusal
from blocktrain.protocol.tls import pinned_context
from blocktrain.worker.timing import Clock, Deadline

FIRST_PAUSE = 0.5  # seconds; doubles with every failure
LONGEST_PAUSE = 20.0
LONGEST_RETRY_AFTER = 300.0
POLL_SECONDS = 0.25  # during a pause, how often to check whether the request is still wanted
TIMEOUT = httpx.Timeout(30.0, connect=10.0)
SLOWEST = 512  # bytes per second; a slower response counts as dead
LARGEST_RESPONSE = 64 * 1024 * 1024
LARGEST_ERROR = 64 * 1024
LARGEST_CERTIFICATE = 64 * 1024
CONNECTIONS = 16
IDLE_SECONDS = 60.0  # shorter than the keep-alive of coordinators, and far shorter than routers'
TRANSIENT = (408, 425, 429)  # statuses; so is every status from 500 on
# For responses without a Refusal, from a proxy or an object store.
CODES = {
    401: "unauthorized", 403: "forbidden", 404: "not_found", 409: "conflict", 410: "gone",
    413: "too_large", 422: "malformed",
}  # fmt: skip

logging.getLogger("httpx").setLevel(logging.WARNING)  # at INFO it logs URLs; presigned are secret

Result = TypeVar("Result")


class TransientError(UnreachableError):
    """A failure that may pass by itself; `retry_after`: seconds the other side asked to wait."""

    def __init__(self, reason: str, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class HttpResponse:
    """A successful response whose body has not been read yet."""

    def __init__(self, response: httpx.Response, clock: Clock) -> None:
        self._response, self._clock = response, clock
        self.status, self.headers = response.status_code, response.headers

    def parts(self, limit: int) -> Iterator[bytes]:
        """The body as it arrives, at most `limit` bytes. One that trickles is given up: only the
        time spent waiting for bytes counts, not what the caller does between them."""
        waited, received = 0.0, 0
        stream = self._response.iter_raw()
        while True:
            began = self._clock.monotonic()
            part = next(stream, None)
            waited += self._clock.monotonic() - began
            if part is None:
                return
            received += len(part)
            if received > limit:
                raise ProtocolError(f"{_origin(self._response)} sent more than {limit} bytes")
            if waited > (TIMEOUT.read or 0.0) + received / SLOWEST:
                raise TransientError(f"{_origin(self._response)} sends too slowly")
            yield part

    def whole(self, limit: int = LARGEST_RESPONSE) -> bytes:
        return b"".join(self.parts(limit))


class HttpRequest(ABC, Generic[Result]):
    """A request that can be sent several times; its parts are made anew for every attempt."""

    method: str

    @abstractmethod
    def headers(self) -> dict[str, str]: ...

    @abstractmethod
    def body(self) -> bytes | Iterable[bytes] | None: ...

    @abstractmethod
    def read(self, response: HttpResponse) -> Result:
        """What the caller gets. A TransientError leads to another attempt."""


@dataclass
class JsonRequest(HttpRequest[bytes]):
    method: str
    content: bytes | None = None
    limit: int = LARGEST_RESPONSE

    def headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json"}

    def body(self) -> bytes | None:
        return self.content

    def read(self, response: HttpResponse) -> bytes:
        return response.whole(self.limit)


class Http:
    """May be used by several threads at once. Honours HTTPS_PROXY and its relatives."""

    def __init__(
        self, invite: Invite, clock: Clock, random: Random, timeout: httpx.Timeout = TIMEOUT
    ) -> None:
        self._invite, self._clock, self._timeout = invite, clock, timeout
        self._retry = Retry(clock, random)
        self._current = 0  # index of the address that answered last
        self._coordinators: httpx.Client | None = None
        self._public: httpx.Client | None = None
        self._lock = threading.Lock()
        self._silent = False
        # Called once when no address answers any more: the reason, and for how many more seconds
        # the request will be tried.
        self.on_unreachable: Callable[[str, float], None] = lambda reason, seconds: None

    def send(
        self,
        request: HttpRequest[Result],
        path: str,
        deadline: Deadline,
        authorization: str | None = None,
    ) -> Result:
        """Send a request to one coordinator address after another until one succeeds."""
        headers = {"Authorization": authorization} if authorization else {}

        def attempt() -> Result:
            client, current = self._coordinator_client(), self._current
            try:
                result = self._exchange(
                    client, request, self._invite.addresses[current] + path, headers
                )
            except TransientError:
                self._skip(current)
                raise
            self._silent = False
            return result

        addresses = len(self._invite.addresses)
        return self._retry.run(attempt, deadline, addresses, self._report_silence)

    def send_to_url(self, request: HttpRequest[Result], url: str, deadline: Deadline) -> Result:
        """Send a request to a presigned URL, without credentials. Its certificate is checked
        against the system's authorities."""
        with self._lock:
            self._public = self._public or self._new_client(ssl.create_default_context())
            client = self._public
        return self._retry.run(lambda: self._exchange(client, request, url, {}), deadline)

    def close(self) -> None:
        with self._lock:
            for client in (self._coordinators, self._public):
                if client:
                    client.close()

    def _exchange(
        self,
        client: httpx.Client,
        request: HttpRequest[Result],
        url: str,
        headers: dict[str, str],
    ) -> Result:
        """One attempt."""
        headers = {**request.headers(), **headers}
        try:
            with client.stream(
                request.method, url, headers=headers, content=request.body()
            ) as response:
                if not response.is_success:
                    raise _failure(response, self._clock)
                return request.read(HttpResponse(response, self._clock))
        except httpx.TransportError as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise TransientError(f"no answer from {_without_path(url)}: {reason}") from None
        except httpx.InvalidURL:
            raise ProtocolError(f"{_without_path(url)!r} is not an address") from None

    def _new_client(self, context: ssl.SSLContext) -> httpx.Client:
        return httpx.Client(
            verify=context,
            timeout=self._timeout,
            limits=httpx.Limits(max_connections=CONNECTIONS, keepalive_expiry=IDLE_SECONDS),
            headers={"User-Agent": f"blocktrain/{__version__}", "Accept-Encoding": "identity"},
        )

    def _report_silence(self, failure: TransientError, seconds: float) -> None:
        if failure.retry_after is not None:  # it answered: it is only busy
            return
        with self._lock:
            was_silent, self._silent = self._silent, True
        if not was_silent:
            self.on_unreachable(str(failure), seconds)

    def _skip(self, address: int) -> None:
        with self._lock:
            if self._current == address:
                self._current = (address + 1) % len(self._invite.addresses)

    def _coordinator_client(self) -> httpx.Client:
        with self._lock:
            self._coordinators = self._coordinators or self._new_client(self._tls_context())
            return self._coordinators

    def _tls_context(self) -> ssl.SSLContext:
        """Trusts the run's own certificate authority, whichever address it was fetched from."""
        fingerprint = self._invite.fingerprint
        if fingerprint is None:
            return ssl.create_default_context()
        request = JsonRequest("GET", limit=LARGEST_CERTIFICATE)
        failures: list[Exception] = []
        with self._new_client(_unverified()) as client:
            for address in self._invite.addresses:
                try:
                    pem = self._exchange(client, request, address + "/v1/ca", {})
                    return pinned_context(pem.decode("ascii", errors="replace"), fingerprint)
                except (TransientError, ProtocolError) as failure:
                    failures.append(failure)
        # A wrong certificate is worth more attention than an address that does not answer.
        raise next((f for f in failures if isinstance(f, UntrustedError)), failures[-1])


class Retry:
    """Pauses grow with every failure and are drawn between nothing and their full length (full
    jitter), so that workers that lost the same coordinator do not all come back at once."""

    def __init__(self, clock: Clock, random: Random) -> None:
        self._clock, self._random = clock, random

    def run(
        self,
        attempt: Callable[[], Result],
        deadline: Deadline,
        attempts_per_round: int = 1,
        on_pause: Callable[[TransientError, float], None] = lambda failure, left: None,
    ) -> Result:
        """Repeat an attempt after transient failures, with a pause between rounds. `on_pause` gets
        the failure and the seconds that are left. UnreachableError: the deadline has passed."""
        failures = 0
        while True:
            try:
                return attempt()
            except TransientError as failure:
                failures += 1
                rounds, in_round = divmod(failures, attempts_per_round)
                pause = 0.0 if in_round else self._draw_pause(rounds)
                left = deadline.at - self._clock.monotonic()
                if not in_round and left > 0.0:
                    on_pause(failure, left)
                if failure.retry_after is not None:
                    pause += min(failure.retry_after, LONGEST_RETRY_AFTER)
                    left -= failure.retry_after
                if left <= 0.0 or not self._sleep(min(pause, left), deadline):
                    raise UnreachableError(str(failure)) from None

    def _draw_pause(self, rounds: int) -> float:
        return self._random.uniform(0.0, min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(rounds - 1, 16)))

    def _sleep(self, seconds: float, deadline: Deadline) -> bool:
        """False: the request is no longer wanted."""
        ends = self._clock.monotonic() + seconds
        while deadline.wanted():
            left = ends - self._clock.monotonic()
            if left <= 0.0:
                return True
            self._clock.sleep(min(left, POLL_SECONDS))
        return False


def _failure(response: httpx.Response, clock: Clock) -> Exception:
    status = response.status_code
    refusal = _refusal(response, clock)
    reason = refusal.reason if refusal else f"{_origin(response)} answered {status}"
    if status in TRANSIENT or status >= 500:
        return TransientError(reason, _retry_after(response))
    code = refusal.error if refusal else CODES.get(status)
    return RefusedError(code, reason) if code else ProtocolError(reason)


def _refusal(response: httpx.Response, clock: Clock) -> Refusal | None:
    try:
        return Refusal.model_validate_json(HttpResponse(response, clock).whole(LARGEST_ERROR))
    except (ValidationError, ProtocolError):
        return None


def _retry_after(response: httpx.Response) -> float | None:
    """In seconds; the protocol does not use the other form, a date."""
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isascii() and text.isdigit() else None


def _origin(response: httpx.Response) -> str:
    return _without_path(str(response.url))


def _without_path(url: str) -> str:
    """Scheme and host: the rest of a presigned URL is a secret."""
    scheme, separator, rest = url.partition("://")
    return scheme + separator + rest.split("/", 1)[0]


def _unverified() -> ssl.SSLContext:
    """For fetching the certificate authority, which is checked by its fingerprint."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
