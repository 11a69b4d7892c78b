"""The coordinator's routes as calls: messages in, messages out, and a token that stays fresh.

Knows the protocol and this worker's identity; `http.py` knows how a request reaches a coordinator.
Calls may come from several threads.
"""

import threading
from collections.abc import Callable
from random import Random
from typing import TypeVar

import httpx
from pydantic import ValidationError

from blocktrain.errors import ProtocolError, RefusedError
from blocktrain.protocol.identity import WorkerKey
from blocktrain.protocol.invite import Invite
from blocktrain.protocol.messages import (
    LARGEST_OFFER,
    PROTOCOL,
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
    RunDescription,
    Score,
    Status,
    Token,
    TokenRequest,
    UpdateOffer,
    UploadState,
    first_problem,
    whole_update_head,
)
from blocktrain.worker.http import TIMEOUT, Http, HttpRequest, JsonRequest
from blocktrain.worker.timing import Clock, Deadline

PROTOCOLS = (PROTOCOL,)
RENEW_AFTER = 0.8  # of a token's life
DEFAULT_SECONDS = 60.0  # for how long a call is retried
LONGEST_NAME = 80

Answer = TypeVar("Answer", bound=Message)
Result = TypeVar("Result")


class Client:
    """Before it has joined, it reads with the invite's secret; afterwards with its own token."""

    def __init__(
        self,
        invite: Invite,
        key: WorkerKey,
        *,
        clock: Clock | None = None,
        random: Random | None = None,
        timeout: httpx.Timeout = TIMEOUT,
    ) -> None:
        self.invite, self.key = invite, key
        self.clock = clock or Clock()
        self.random = random or Random()
        self.http = Http(invite, self.clock, self.random, timeout)
        self.worker: str | None = None
        self._joined_as: tuple[str, str] | None = None
        self._whole_bytes = 0
        self._token, self._renew_at = "", 0.0
        self._token_lock = threading.Lock()

    def deadline(
        self, seconds: float = DEFAULT_SECONDS, wanted: Callable[[], bool] = lambda: True
    ) -> Deadline:
        return Deadline(self.clock.monotonic() + seconds, wanted)

    def hello(self, deadline: Deadline | None = None) -> Hello:
        """Who answers. Another run and an unknown protocol version are refused."""
        hello = self._call(Hello, "GET", "/v1/hello", None, deadline, authorized=False)
        if hello.run != self.invite.run:
            raise ProtocolError(
                f"run {hello.run} answers there, not {self.invite.run} that the invite names"
            )
        if not set(hello.protocols) & set(PROTOCOLS):
            theirs, ours = (", ".join(map(str, sorted(p))) for p in (hello.protocols, PROTOCOLS))
            raise ProtocolError(
                f"the coordinator speaks version {theirs} of the protocol, this worker {ours};"
                " install a blocktrain that matches it"
            )
        return hello

    def join(self, name: str, device: str, deadline: Deadline | None = None) -> Joined:
        """Take part in the run; with the same key again, as the same worker."""
        self.hello(deadline)
        with self._token_lock:
            return self._join(name, device, deadline)

    def lease(self, request: LeaseRequest, deadline: Deadline | None = None) -> LeaseAnswer:
        return self._call(LeaseAnswer, "POST", "/v1/lease", request, deadline)

    def progress(
        self, lease: str, progress: LeaseProgress, deadline: Deadline | None = None
    ) -> LeaseState:
        return self._call(LeaseState, "POST", f"/v1/lease/{lease}/progress", progress, deadline)

    def give_back(
        self, lease: str, reason: LeaseReturn, deadline: Deadline | None = None
    ) -> LeaseState:
        return self._call(LeaseState, "POST", f"/v1/lease/{lease}/return", reason, deadline)

    def offer(self, offer: UpdateOffer, deadline: Deadline | None = None) -> UploadState:
        return self._call(UploadState, "POST", "/v1/updates", offer, deadline)

    def commit(self, lease: str, deadline: Deadline | None = None) -> Receipt:
        return self._call(Receipt, "POST", f"/v1/updates/{lease}/commit", None, deadline)

    def was_accepted(self, lease: str, deadline: Deadline | None = None) -> bool | None:
        """What became of an update whose receipt was never seen. Committing it once more tells: it
        changes nothing, or counts an update that has arrived completely. None: unknown."""
        try:
            return self.commit(lease, deadline).state != "refused"
        except RefusedError as refused:
            never_arrived = refused.code in ("not_found", "conflict")  # it, or some of its chunks
            return False if never_arrived else None
        except ProtocolError:
            return None

    def takes_whole(self, offer: UpdateOffer) -> bool:
        """Whether an update is small enough to be sent in one request with its offer."""
        recipe = offer.claim.recipe
        small = len(recipe.chunks) == 1 and recipe.size <= self._whole_bytes
        return small and len(whole_update_head(offer)) <= LARGEST_OFFER

    def send_whole(self, request: HttpRequest[bytes], deadline: Deadline) -> Receipt:
        """Offer, send and commit an update in one request."""
        path = "/v1/updates/whole"
        return _parsed(Receipt, self.send(request, path, deadline), path)

    def score(self, score: Score, deadline: Deadline | None = None) -> None:
        self.send(_json("POST", score), "/v1/scores", deadline or self.deadline())

    def status(self, deadline: Deadline | None = None) -> Status:
        return self._call(Status, "GET", "/v1/status", None, deadline)

    def run(self, deadline: Deadline | None = None) -> RunDescription:
        return self._call(RunDescription, "GET", "/v1/run", None, deadline)

    def blob(self, name: str, deadline: Deadline | None = None) -> BlobAnswer:
        return self._call(BlobAnswer, "GET", f"/v1/blobs/{name}", None, deadline)

    def deltas(
        self, block: int, after: int, to: int, deadline: Deadline | None = None
    ) -> Differences:
        path = f"/v1/differences?block={block}&after={after}&to={to}"
        return self._call(Differences, "GET", path, None, deadline)

    def send(self, request: HttpRequest[Result], path: str, deadline: Deadline) -> Result:
        """Send any request with this worker's credentials. A refused token is renewed once."""
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
        request, deadline = _json(method, message), deadline or self.deadline()
        if authorized:
            return _parsed(kind, self.send(request, path, deadline), path)
        return _parsed(kind, self.http.send(request, path, deadline), path)

    def _join(self, name: str, device: str, deadline: Deadline | None) -> Joined:
        message = Join(
            invite=self.invite.secret,
            public_key=self.key.public,
            name=_valid_name(name),
            device=_valid_name(device),
            protocols=PROTOCOLS,
            signature=self.key.sign_join(self.invite.run, self.invite.secret),
        )
        joined = self._call(Joined, "POST", "/v1/join", message, deadline, authorized=False)
        if joined.description.run != self.invite.run:
            raise ProtocolError(f"joined run {joined.description.run}, not {self.invite.run}")
        self.worker, self._joined_as = joined.worker, (name, device)
        self._whole_bytes = joined.description.whole_bytes
        self._keep_token(joined.token, joined.token_seconds)
        return joined

    def _fresh_token(self, deadline: Deadline, refused: str | None = None) -> str:
        """A token that stays valid for a while, and is not the one that was just refused."""
        with self._token_lock:
            if self.clock.monotonic() >= self._renew_at or self._token == refused:
                self._renew_token(deadline)
            return self._token

    def _renew_token(self, deadline: Deadline) -> None:
        try:
            self._request_token(deadline)
        except RefusedError as refused:
            if refused.code != "unauthorized" or not self._joined_as:
                raise
            # A wrong clock, or a coordinator restored from a backup: joining again mends both.
            self._join(*self._joined_as, deadline)

    def _request_token(self, deadline: Deadline) -> None:
        assert self.worker, "only a worker that has joined has a token"
        time = int(self.clock.wall())
        request = TokenRequest(
            worker=self.worker,
            time=time,
            signature=self.key.sign_token_request(self.invite.run, self.worker, time),
        )
        token = self._call(Token, "POST", "/v1/token", request, deadline, authorized=False)
        self._keep_token(token.token, token.token_seconds)

    def _keep_token(self, token: str, seconds: int) -> None:
        self._token = token
        self._renew_at = self.clock.monotonic() + RENEW_AFTER * seconds


def _json(method: str, message: Message | None) -> JsonRequest:
    return JsonRequest(method, message.model_dump_json().encode() if message else None)


def _parsed(kind: type[Answer], body: bytes, path: str) -> Answer:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        field, problem = first_problem(error)
        raise ProtocolError(
            f"the answer to {path} is not understood ({field}: {problem});"
            " are worker and coordinator of the same version?"
        ) from None


def _valid_name(name: str) -> str:
    """As the protocol takes it: printable, and not too long."""
    visible = "".join(letter for letter in name if letter.isprintable())
    return visible[:LONGEST_NAME] or "unnamed"
