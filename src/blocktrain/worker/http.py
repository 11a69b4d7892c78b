"""HTTP requests to the run's coordinators and to presigned URLs, with retries.

Chooses the address, pins the run's certificate, retries transient failures, and turns others into
the project's errors. Knows neither the messages nor who sends them.
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
from blocktrain.protocol.messages import CODE_OF, Refusal
from blocktrain.protocol.tls import pinned_context
from blocktrain.worker.address_book import AddressBook, is_private
from blocktrain.worker.machine import Clock, Deadline

FIRST_PAUSE = 0.5  # seconds; doubles with every failure
LONGEST_PAUSE = 20.0
LONGEST_RETRY_AFTER = 300.0
TIMEOUT = httpx.Timeout(30.0, connect=10.0)
SLOWEST = 512  # bytes per second; a slower response has failed
LARGEST_RESPONSE = 64 * 1024 * 1024
LARGEST_ERROR = 64 * 1024
LARGEST_CERTIFICATE = 64 * 1024
CONNECTIONS = 16
IDLE_SECONDS = 60.0  # shorter than the keep-alive of coordinators and of network routers
TRANSIENT = (408, 425, 429)  # and every status from 500 on

logging.getLogger("httpx").setLevel(
    logging.WARNING
)  # INFO logs URLs, and presigned ones are secret

Result = TypeVar("Result")


class TransientError(UnreachableError):
    """A failure worth a retry. `retry_after`: the seconds that the other side asked to wait."""

    def __init__(self, reason: str, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class HttpResponse:
    """A successful response with an unread body."""

    def __init__(self, response: httpx.Response, clock: Clock) -> None:
        self._response, self._clock = response, clock
        self.status, self.headers = response.status_code, response.headers

    def parts(self, limit: int) -> Iterator[bytes]:
        """Yield the body in parts, at most `limit` bytes. Raises TransientError if the body arrives
        too slowly; only the time spent waiting for bytes counts."""
        waited, received = 0.0, 0
        stream, origin = self._response.iter_raw(), _without_path(self._response.url)
        while True:
            began = self._clock.monotonic()
            part = next(stream, None)
            waited += self._clock.monotonic() - began
            if part is None:
                return
            received += len(part)
            if received > limit:
                raise ProtocolError(f"the answer of {origin} exceeds the limit of {limit} bytes")
            if waited > (TIMEOUT.read or 0.0) + received / SLOWEST:
                raise TransientError(f"{origin} sends too slowly")
            yield part

    def whole(self, limit: int = LARGEST_RESPONSE) -> bytes:
        return b"".join(self.parts(limit))


class HttpRequest(ABC, Generic[Result]):
    """A request that can be sent repeatedly; each attempt makes a new body."""

    method: str

    @abstractmethod
    def headers(self) -> dict[str, str]: ...

    def body(self) -> bytes | Iterable[bytes] | None:
        return None

    @abstractmethod
    def read(self, response: HttpResponse) -> Result:
        """Read the request's result from the response. A TransientError causes a retry."""


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
    """Sends requests to the run's coordinators and to presigned URLs. Thread-safe. Honours
    HTTPS_PROXY and related variables."""

    def __init__(
        self,
        invite: Invite,
        clock: Clock,
        random: Random,
        timeout: httpx.Timeout = TIMEOUT,
        book: AddressBook | None = None,
    ) -> None:
        """`book`: the coordinators' addresses; by default, those of the invite."""
        self._invite, self._clock, self._timeout = invite, clock, timeout
        self._book = book or AddressBook(invite, clock)
        self._retry = Retry(clock, random)
        self._coordinators: httpx.Client | None = None
        self._public: httpx.Client | None = None
        self._lock = threading.Lock()
        self._silent = False
        # Called once when no address answers: the reason, and for how many seconds to retry.
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
            client, address = self._coordinator_client(), self._book.current
            try:
                result = self._exchange(client, request, address + path, headers)
            except TransientError:
                self._book.failed(address)
                raise
            self._silent = False
            return result

        addresses = len(self._book.addresses)
        return self._retry.run(attempt, deadline, addresses, self._report_silence)

    def send_to_url(self, request: HttpRequest[Result], url: str, deadline: Deadline) -> Result:
        """Send a request without credentials to a presigned URL, trusting the system's
        authorities. Not to an address of this machine or its network, unless a coordinator is there
        as well: it could otherwise reach what only this machine can."""
        if not self._may_use(url):
            raise ProtocolError(f"{_without_path(url)} is not a public address")
        with self._lock:
            self._public = self._public or self._new_client(verify=ssl.create_default_context())
            client = self._public
        return self._retry.run(lambda: self._exchange(client, request, url, {}), deadline)

    def close(self) -> None:
        with self._lock:
            for client in (self._coordinators, self._public):
                if client:
                    client.close()

    def _exchange(
        self, client: httpx.Client, request: HttpRequest[Result], url: str, headers: dict[str, str]
    ) -> Result:
        """Send a request once, without a retry, and read its result."""
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
            raise ProtocolError(f"{_without_path(url)!r} is not a valid URL") from None

    def _new_client(self, *, verify: ssl.SSLContext | bool) -> httpx.Client:
        return httpx.Client(
            verify=verify,
            timeout=self._timeout,
            limits=httpx.Limits(max_connections=CONNECTIONS, keepalive_expiry=IDLE_SECONDS),
            headers={"User-Agent": f"blocktrain/{__version__}", "Accept-Encoding": "identity"},
        )

    def _may_use(self, url: str) -> bool:
        return self._book.is_inside or not is_private(url)

    def _report_silence(self, failure: TransientError, seconds: float) -> None:
        if failure.retry_after is not None:  # the coordinator answered: it is only busy
            return
        with self._lock:
            was_silent, self._silent = self._silent, True
        if not was_silent:
            self.on_unreachable(str(failure), seconds)

    def _coordinator_client(self) -> httpx.Client:
        with self._lock:
            self._coordinators = self._coordinators or self._new_client(verify=self._tls_context())
            return self._coordinators

    def _tls_context(self) -> ssl.SSLContext:
        """A TLS context that trusts only the run's certificate authority, whose certificate may
        come from any of the coordinators. If the invite has no fingerprint, it trusts the system's
        authorities."""
        fingerprint = self._invite.fingerprint
        if fingerprint is None:
            return ssl.create_default_context()
        request = JsonRequest("GET", limit=LARGEST_CERTIFICATE)
        failures: list[Exception] = []
        with self._new_client(verify=False) as client:  # the fingerprint is checked
            for address in self._book.addresses:
                try:
                    pem = self._exchange(client, request, address + "/v1/ca", {})
                    return pinned_context(pem.decode("ascii", errors="replace"), fingerprint)
                except (TransientError, ProtocolError) as failure:
                    failures.append(failure)
        # A wrong certificate matters more than an address that does not answer.
        raise next((f for f in failures if isinstance(f, UntrustedError)), failures[-1])


class Retry:
    """Exponential backoff with full jitter, so that workers that lost the same coordinator do not
    all come back at once."""

    def __init__(self, clock: Clock, random: Random) -> None:
        self._clock, self._random = clock, random

    def run(
        self,
        attempt: Callable[[], Result],
        deadline: Deadline,
        attempts_per_round: int = 1,
        on_pause: Callable[[TransientError, float], None] = lambda failure, left: None,
    ) -> Result:
        """Retry transient failures until the deadline, then raise UnreachableError; pause after
        each round of attempts. `on_pause` gets the failure and the seconds left."""
        failures = 0
        while True:
            try:
                return attempt()
            except TransientError as failure:
                failures += 1
                rounds, in_round = divmod(failures, attempts_per_round)
                longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(rounds - 1, 16))
                pause = 0.0 if in_round else self._random.uniform(0.0, longest)
                left = deadline.at - self._clock.monotonic()
                if not in_round and left > 0.0:
                    on_pause(failure, left)
                if failure.retry_after is not None:
                    pause += min(failure.retry_after, LONGEST_RETRY_AFTER)
                    left -= failure.retry_after
                pause = min(pause, left)
                if left <= 0.0 or not self._clock.sleep_while(deadline.wanted, pause):
                    raise UnreachableError(str(failure)) from None


def _failure(response: httpx.Response, clock: Clock) -> Exception:
    status = response.status_code
    refusal = _refusal(response, clock)
    reason = refusal.reason if refusal else f"{_without_path(response.url)} answered {status}"
    if status in TRANSIENT or status >= 500:
        seconds = response.headers.get("Retry-After", "")  # never a date in this protocol
        is_number = seconds.isascii() and seconds.isdigit()
        return TransientError(reason, float(seconds) if is_number else None)
    code = refusal.error if refusal else CODE_OF.get(status)  # without one: from a proxy or store
    return RefusedError(code, reason) if code else ProtocolError(reason)


def _refusal(response: httpx.Response, clock: Clock) -> Refusal | None:
    try:
        return Refusal.model_validate_json(HttpResponse(response, clock).whole(LARGEST_ERROR))
    except (ValidationError, ProtocolError):
        return None


def _without_path(url: str | httpx.URL) -> str:
    """The scheme and host of a URL, for messages: the rest of a presigned URL is secret."""
    scheme, separator, rest = str(url).partition("://")
    return scheme + separator + rest.split("/", 1)[0]
