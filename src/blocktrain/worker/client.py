"""A client of the coordinator's API: its routes as methods, with a token that is renewed in time.

Knows the protocol and this worker's identity; `http.py` knows how a request reaches a coordinator.
Thread-safe.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TypeVar

import httpx
from pydantic import ValidationError

from blocktrain.errors import ProtocolError, RefusedError, UnreachableError
from blocktrain.protocol.check_messages import CheckAnswer, CheckRequest, CheckResult
from blocktrain.protocol.identity import WorkerKey, join_text, token_request_text
from blocktrain.protocol.invite import Invite
from blocktrain.protocol.messages import (
    LARGEST_OFFER,
    PROTOCOL,
    PROTOCOL_WITH_COMMITMENTS,
    Addresses,
    BlobAnswer,
    Differences,
    Hello,
    Join,
    Joined,
    LeaseAnswer,
    LeaseProgress,
    LeaseRequest,
    LeaseReturn,
    LeaseState,
    Message,
    Receipt,
    RevealOffer,
    RunDescription,
    Token,
    TokenRequest,
    UpdateOffer,
    UploadState,
    first_problem,
    whole_update_head,
)
from blocktrain.protocol.page_messages import Overview
from blocktrain.protocol.status_messages import Score, Status
from blocktrain.worker.address_book import AddressBook
from blocktrain.worker.http import TIMEOUT, Http, HttpRequest, JsonRequest
from blocktrain.worker.machine import Clock, Deadline

PROTOCOLS = (PROTOCOL,)
RENEW_AFTER = 0.8  # share of a token's lifetime
DEFAULT_SECONDS = 60.0  # how long a call is retried
ADDRESSES_SECONDS = 5.0  # the same for the question for addresses, which is repeated later
LONGEST_NAME = 80
MOST_ANSWER_BYTES = 4 * 1024 * 1024
LONG_ANSWERS = (BlobAnswer, Status)  # with a URL for each chunk, or a row for each worker

Answer = TypeVar("Answer", bound=Message)
Result = TypeVar("Result")


class Client:
    """The routes of a run's coordinators as methods. A client authenticates with the invite's
    secret before it has joined, and with a token of its own afterwards."""

    def __init__(
        self,
        invite: Invite,
        key: WorkerKey,
        *,
        clock: Clock | None = None,
        random: Random | None = None,
        timeout: httpx.Timeout = TIMEOUT,
        folder: Path | None = None,
    ) -> None:
        """`folder`: where addresses are remembered that a coordinator names; None: they are not."""
        self.invite, self.key = invite, key
        self.clock = clock or Clock()
        self.random = random or Random()
        self._book = AddressBook(invite, self.clock, folder)
        self.http = Http(invite, self.clock, self.random, timeout, self._book)
        self.worker: str | None = None
        self.takes_commitments = False  # whether the coordinator does, by its `hello`
        self._joined_as: tuple[str, str] | None = None
        self._whole_bytes = 0
        self._token, self._renew_at = "", 0.0
        self._token_lock = threading.Lock()

    def deadline(
        self, seconds: float = DEFAULT_SECONDS, wanted: Callable[[], bool] = lambda: True
    ) -> Deadline:
        return Deadline(self.clock.monotonic() + seconds, wanted)

    def hello(self, deadline: Deadline | None = None) -> Hello:
        """The run and protocol versions of the coordinator. Raises if either is not as expected."""
        hello = self._call(Hello, "GET", "/v1/hello", None, deadline, authorized=False)
        if hello.run != self.invite.run:
            raise ProtocolError(
                f"the coordinator serves run {hello.run}, but the invite is for run"
                f" {self.invite.run}; check the address and the invite"
            )
        if not set(hello.protocols) & set(PROTOCOLS):
            theirs, ours = (", ".join(map(str, sorted(p))) for p in (hello.protocols, PROTOCOLS))
            raise ProtocolError(
                f"the coordinator speaks protocol {theirs}, this worker protocol {ours};"
                " install the coordinator's version of blocktrain"
            )
        self.takes_commitments = PROTOCOL_WITH_COMMITMENTS in hello.protocols
        return hello

    def join(self, name: str, device: str, deadline: Deadline | None = None) -> Joined:
        """Join the run. A worker that has joined before, with the same key, gets its old id."""
        self.hello(deadline)
        with self._token_lock:
            return self._join(name, device, deadline)

    def lease(self, request: LeaseRequest, deadline: Deadline | None = None) -> LeaseAnswer:
        answer = self._call(LeaseAnswer, "POST", "/v1/lease", request, deadline)
        self._learn_addresses()
        return answer

    def progress(self, lease: str, progress: LeaseProgress, deadline: Deadline) -> LeaseState:
        return self._call(LeaseState, "POST", f"/v1/lease/{lease}/progress", progress, deadline)

    def give_back(self, lease: str, reason: LeaseReturn, deadline: Deadline) -> LeaseState:
        return self._call(LeaseState, "POST", f"/v1/lease/{lease}/return", reason, deadline)

    def offer(self, offer: UpdateOffer, deadline: Deadline | None = None) -> UploadState:
        return self._call(UploadState, "POST", "/v1/updates", offer, deadline)

    def commit(self, lease: str, deadline: Deadline | None = None) -> Receipt:
        return self._call(Receipt, "POST", f"/v1/updates/{lease}/commit", None, deadline)

    def was_accepted(self, lease: str, deadline: Deadline | None = None) -> bool | None:
        """Whether an update whose receipt did not arrive was accepted. Committing again is safe: it
        changes nothing, or settles an update that has arrived completely. None: unknown, or no
        coordinator answered in time."""
        deadline = deadline or self.deadline()
        try:
            return self.commit(lease, deadline).state != "refused"
        except RefusedError as refused:
            never_arrived = refused.code in ("not_found", "conflict")  # or not completely
            return False if never_arrived else None
        except ProtocolError:
            return None
        except UnreachableError:
            if not deadline.wanted():
                raise
            return None

    def reveal(self, lease: str, offer: RevealOffer, deadline: Deadline) -> UploadState:
        return self._call(UploadState, "POST", f"/v1/updates/{lease}/reveal", offer, deadline)

    def takes_whole(self, offer: UpdateOffer) -> bool:
        """Whether an update is small enough to be sent in one request."""
        recipe = offer.claim.recipe
        small = len(recipe.chunks) == 1 and recipe.size <= self._whole_bytes
        return small and len(whole_update_head(offer)) <= LARGEST_OFFER

    def send_whole(self, request: HttpRequest[bytes], deadline: Deadline) -> Receipt:
        """Offer, send and commit an update in one request."""
        path = "/v1/updates/whole"
        return _parsed(Receipt, self.send(request, path, deadline), path)

    def request_check(self, request: CheckRequest, deadline: Deadline) -> CheckAnswer:
        answer = self._call(CheckAnswer, "POST", "/v1/checks", request, deadline)
        self._learn_addresses()
        return answer

    def report_check(self, check: str, result: CheckResult, deadline: Deadline) -> None:
        self.send(_json("POST", result), f"/v1/checks/{check}", deadline)

    def score(self, score: Score, deadline: Deadline | None = None) -> None:
        self.send(_json("POST", score), "/v1/scores", deadline or self.deadline())

    def status(self, deadline: Deadline | None = None) -> Status:
        status = self._call(Status, "GET", "/v1/status", None, deadline)
        self._learn_addresses()
        return status

    def overview(self, deadline: Deadline | None = None) -> Overview | None:
        """The progress of the run; None if the coordinator is too old to tell."""
        try:
            return self._call(Overview, "GET", "/v1/page/overview", None, deadline)
        except RefusedError as refused:
            if refused.code != "not_found":
                raise
            return None

    def run(self, deadline: Deadline | None = None) -> RunDescription:
        return self._call(RunDescription, "GET", "/v1/run", None, deadline)

    def blob(self, name: str, deadline: Deadline | None = None) -> BlobAnswer:
        return self._call(BlobAnswer, "GET", f"/v1/blobs/{name}", None, deadline)

    def deltas(self, block: int, after: int, to: int, deadline: Deadline) -> Differences:
        path = f"/v1/differences?block={block}&after={after}&to={to}"
        return self._call(Differences, "GET", path, None, deadline)

    def send(self, request: HttpRequest[Result], path: str, deadline: Deadline) -> Result:
        """Send a request with this worker's credentials. If the token is refused, renew it once."""
        if not self.worker:
            return self.http.send(request, path, deadline, f"Invite {self.invite.secret}")
        token = self._fresh_token(deadline)
        try:
            return self.http.send(request, path, deadline, f"Bearer {token}")
        except RefusedError as refused:
            if refused.code != "unauthorized":
                raise
            token = self._fresh_token(deadline, refused=token)
            return self.http.send(request, path, deadline, f"Bearer {token}")

    def close(self) -> None:
        self.http.close()

    def _learn_addresses(self) -> None:
        """Ask the coordinator for its addresses, from time to time. Older coordinators refuse."""
        if not self._book.take_question():
            return
        try:
            deadline = self.deadline(ADDRESSES_SECONDS)
            answer = self._call(Addresses, "GET", "/v1/addresses", None, deadline)
        except (RefusedError, UnreachableError, ProtocolError):
            return
        self._book.learn(answer.addresses)

    def _call(
        self,
        kind: type[Answer],
        method: str,
        path: str,
        message: Message | None,
        deadline: Deadline | None,
        *,
        authorized: bool = True,
    ) -> Answer:
        send = self.send if authorized else self.http.send
        request = _json(method, message)
        if kind not in LONG_ANSWERS:
            request.limit = MOST_ANSWER_BYTES
        return _parsed(kind, send(request, path, deadline or self.deadline()), path)

    def _join(self, name: str, device: str, deadline: Deadline | None) -> Joined:
        message = Join(
            invite=self.invite.secret,
            public_key=self.key.public,
            name=_valid_name(name),
            device=_valid_name(device),
            protocols=PROTOCOLS,
            signature=self.key.sign(join_text(self.invite.run, self.invite.secret)),
        )
        joined = self._call(Joined, "POST", "/v1/join", message, deadline, authorized=False)
        if joined.description.run != self.invite.run:
            raise ProtocolError(
                f"the coordinator registered this worker for run {joined.description.run}, but the"
                f" invite is for {self.invite.run}; ask for a new invite"
            )
        self.worker, self._joined_as = joined.worker, (name, device)
        self._whole_bytes = joined.description.whole_bytes
        self._keep_token(joined)
        return joined

    def _fresh_token(self, deadline: Deadline, refused: str | None = None) -> str:
        """A token that is valid for a while longer, and is not `refused`."""
        with self._token_lock:
            if self.clock.monotonic() >= self._renew_at or self._token == refused:
                self._renew_token(deadline)
            return self._token

    def _renew_token(self, deadline: Deadline) -> None:
        assert self.worker and self._joined_as, "only a worker that has joined has a token"
        time = int(self.clock.wall())
        signature = self.key.sign(token_request_text(self.invite.run, self.worker, time))
        request = TokenRequest(worker=self.worker, time=time, signature=signature)
        try:
            token = self._call(Token, "POST", "/v1/token", request, deadline, authorized=False)
        except RefusedError as refused:
            if refused.code != "unauthorized":
                raise
            # The clock is wrong, or the coordinator was restored from a backup: join again.
            self._join(*self._joined_as, deadline)
        else:
            self._keep_token(token)

    def _keep_token(self, answer: Token | Joined) -> None:
        self._token = answer.token
        self._renew_at = self.clock.monotonic() + RENEW_AFTER * answer.token_seconds


def _json(method: str, message: Message | None) -> JsonRequest:
    return JsonRequest(method, message.model_dump_json().encode() if message else None)


def _parsed(kind: type[Answer], body: bytes, path: str) -> Answer:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        field, problem = first_problem(error)
        raise ProtocolError(
            f"the coordinator's answer to {path} is invalid ({field}: {problem});"
            " install the same version of blocktrain as the coordinator's"
        ) from None


def _valid_name(name: str) -> str:
    """A name that the protocol accepts: printable and not too long."""
    visible = "".join(letter for letter in name if letter.isprintable())
    return visible[:LONGEST_NAME] or "unnamed"
