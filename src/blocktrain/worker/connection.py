"""The way to a run's coordinators: their addresses in turn, and only those the invite vouches for.

The run's certificate is fetched from whoever answers, over a connection that is used for nothing
else, and compared with the fingerprint in the invite (`protocol.trust`); from then on no other
certificate is believed. Knows no routes but that one.
"""

import ssl
import threading
from collections.abc import Callable
from random import Random
from typing import TypeVar

import httpx

from blocktrain.errors import ProtocolError, UntrustedError
from blocktrain.protocol.invite import Invite
from blocktrain.protocol.trust import pinned_context
from blocktrain.worker.clock import Clock
from blocktrain.worker.exchange import whole_answer
from blocktrain.worker.retry import PassingError, Patience, Retry

LARGEST_CERTIFICATE = 64 * 1024

OpenHttp = Callable[[ssl.SSLContext], httpx.Client]
Result = TypeVar("Result")


class Connection:
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
