"""The coordinator's routes as calls: messages in, messages out, and a token that stays fresh.

Knows the protocol and who this worker is. How a request reaches a coordinator is the business of
`connection.py`, what is trained or uploaded that of others. Calls may come from several threads.
"""

import itertools
import threading
from collections.abc import Callable, Iterable
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
from blocktrain.worker.clock import Clock
from blocktrain.worker.http import (
    CoordinatorConnection,
    OpenHttp,
    Patience,
    open_http,
    whole_answer,
)

PROTOCOLS = (PROTOCOL,)
RENEW_AFTER = 0.8  # of a token's life
USUAL_PATIENCE = 60.0  # seconds
LONGEST_NAME = 80
JSON = {"Content-Type": "application/json"}
BYTES = {"Content-Type": "application/octet-stream"}

Answer = TypeVar("Answer", bound=Message)
Result = TypeVar("Result")


class Client:
    """Before it has joined, it reads with the invite's secret; afterwards with its own token."""

    def __init__(
        self,
        invite: Invite,
        key: WorkerKey,
        *,
        http: OpenHttp = open_http,
        clock: Clock | None = None,
        random: Random | None = None,
    ) -> None:
        self.invite, self.key = invite, key
        self.clock = clock or Clock()
        self.random = random or Random()
        self.connection = CoordinatorConnection(invite, http, self.clock, self.random)
        self.worker: str | None = None
        self._joined_as: tuple[str, str] | None = None
        self._whole_bytes = 0
        self._token, self._renew_at = "", 0.0
        self._token_lock = threading.Lock()

    def patience(
        self, seconds: float = USUAL_PATIENCE, wanted: Callable[[], bool] = lambda: True
    ) -> Patience:
        return Patience(self.clock.monotonic() + seconds, wanted)

    def hello(self, patience: Patience | None = None) -> Hello:
        """Who answers; refuses another run, and one that speaks no version known here."""
        hello = _parsed(Hello, self._unsigned("GET", "/v1/hello", None, patience), "/v1/hello")
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

    def join(self, name: str, device: str, patience: Patience | None = None) -> Joined:
        """Take part; with the same key again, as the same worker."""
        self.hello(patience)
        with self._token_lock:
            return self._join(name, device, patience)

    def lease(self, request: LeaseRequest, patience: Patience | None = None) -> LeaseAnswer:
        return self._post(LeaseAnswer, "/v1/lease", request, patience)

    def progress(
        self, lease: str, report: LeaseProgress, patience: Patience | None = None
    ) -> LeaseState:
        return self._post(LeaseState, f"/v1/lease/{lease}/progress", report, patience)

    def give_back(
        self, lease: str, reason: LeaseReturn, patience: Patience | None = None
    ) -> LeaseState:
        return self._post(LeaseState, f"/v1/lease/{lease}/return", reason, patience)

    def offer(self, offer: UpdateOffer, patience: Patience | None = None) -> UploadState:
        return self._post(UploadState, "/v1/updates", offer, patience)

    def commit(self, lease: str, patience: Patience | None = None) -> Receipt:
        return self._post(Receipt, f"/v1/updates/{lease}/commit", None, patience)

    def was_accepted(self, lease: str, patience: Patience | None = None) -> bool | None:
        """What became of an update whose receipt was never seen: asked by committing it once more,
        which changes nothing, or counts what has all arrived. None: that cannot be known."""
        try:
            return self.commit(lease, patience).state != "refused"
        except RefusedError as refused:
            never_arrived = refused.code in ("not_found", "conflict")  # it, or some of its chunks
            return False if never_arrived else None
        except ProtocolError:
            return None

    def takes_whole(self, offer: UpdateOffer) -> bool:
        """Whether an update may go with its offer."""
        recipe = offer.claim.recipe
        small = len(recipe.chunks) == 1 and recipe.size <= self._whole_bytes
        return small and len(whole_update_head(offer)) <= LARGEST_OFFER

    def send_whole(
        self,
        offer: UpdateOffer,
        size: int,
        data: Callable[[], Iterable[bytes]],
        patience: Patience,
    ) -> Receipt:
        """Offer, send and commit an update; `data` is asked for at every attempt."""
        path, before = "/v1/updates/whole", whole_update_head(offer)
        length = {"Content-Length": str(len(before) + size)}

        def attempt(http: httpx.Client, address: str, headers: dict[str, str]) -> bytes:
            content = itertools.chain([before], data())
            url, headers = address + path, {**headers, **BYTES, **length}
            return whole_answer(http, self.clock, "POST", url, headers=headers, content=content)

        return _parsed(Receipt, self.authorized(attempt, patience), path)

    def score(self, score: Score, patience: Patience | None = None) -> None:
        self._request("POST", "/v1/scores", score, patience)

    def status(self, patience: Patience | None = None) -> Status:
        return self._get(Status, "/v1/status", patience)

    def run(self, patience: Patience | None = None) -> RunDescription:
        return self._get(RunDescription, "/v1/run", patience)

    def blob(self, name: str, patience: Patience | None = None) -> BlobAnswer:
        return self._get(BlobAnswer, f"/v1/blobs/{name}", patience)

    def differences(
        self, block: int, after: int, to: int, patience: Patience | None = None
    ) -> Differences:
        path = f"/v1/differences?block={block}&after={after}&to={to}"
        return self._get(Differences, path, patience)

    def authorized(
        self,
        attempt: Callable[[httpx.Client, str, dict[str, str]], Result],
        patience: Patience,
    ) -> Result:
        """Try a request of any kind, given a connection, an address and the headers that say who
        asks; a token that has run out is renewed, once."""

        def send(authorization: str) -> Result:
            headers = {"Authorization": authorization}
            return self.connection.attempt(
                lambda http, address: attempt(http, address, headers), patience
            )

        if not self.worker:
            return send(f"Invite {self.invite.secret}")
        token = self._fresh_token(patience)
        try:
            return send(f"Bearer {token}")
        except RefusedError as refused:
            if refused.code != "unauthorized":
                raise
            return send(f"Bearer {self._fresh_token(patience, refused=token)}")

    def close(self) -> None:
        self.connection.close()

    def _get(self, kind: type[Answer], path: str, patience: Patience | None) -> Answer:
        return _parsed(kind, self._request("GET", path, None, patience), path)

    def _post(
        self, kind: type[Answer], path: str, message: Message | None, patience: Patience | None
    ) -> Answer:
        return _parsed(kind, self._request("POST", path, message, patience), path)

    def _request(
        self, method: str, path: str, message: Message | None, patience: Patience | None
    ) -> bytes:
        content = _json(message)

        def attempt(http: httpx.Client, address: str, headers: dict[str, str]) -> bytes:
            url, headers = address + path, {**headers, **JSON}
            return whole_answer(http, self.clock, method, url, headers=headers, content=content)

        return self.authorized(attempt, patience or self.patience())

    def _unsigned(
        self, method: str, path: str, message: Message | None, patience: Patience | None
    ) -> bytes:
        content = _json(message)

        def attempt(http: httpx.Client, address: str) -> bytes:
            url = address + path
            return whole_answer(http, self.clock, method, url, headers=JSON, content=content)

        return self.connection.attempt(attempt, patience or self.patience())

    def _join(self, name: str, device: str, patience: Patience | None) -> Joined:
        message = Join(
            invite=self.invite.secret,
            public_key=self.key.public,
            name=_short(name),
            device=_short(device),
            protocols=PROTOCOLS,
            signature=self.key.sign_join(self.invite.run, self.invite.secret),
        )
        joined = _parsed(Joined, self._unsigned("POST", "/v1/join", message, patience), "/v1/join")
        if joined.description.run != self.invite.run:
            raise ProtocolError(f"joined run {joined.description.run}, not {self.invite.run}")
        self.worker, self._joined_as = joined.worker, (name, device)
        self._whole_bytes = joined.description.whole_bytes
        self._take_token(joined.token, joined.token_seconds)
        return joined

    def _fresh_token(self, patience: Patience, refused: str | None = None) -> str:
        """A token that is good for a while yet, and is not the one that was just refused."""
        with self._token_lock:
            if self.clock.monotonic() >= self._renew_at or self._token == refused:
                self._renew_token(patience)
            return self._token

    def _renew_token(self, patience: Patience) -> None:
        try:
            self._ask_for_token(patience)
        except RefusedError as refused:
            if refused.code != "unauthorized" or not self._joined_as:
                raise
            # A clock that is wrong, or a coordinator that was set back: joining mends both.
            self._join(*self._joined_as, patience)

    def _ask_for_token(self, patience: Patience) -> None:
        assert self.worker, "only a worker that joined has a token"
        time = int(self.clock.wall())
        request = TokenRequest(
            worker=self.worker,
            time=time,
            signature=self.key.sign_token_request(self.invite.run, self.worker, time),
        )
        token = _parsed(Token, self._unsigned("POST", "/v1/token", request, patience), "/v1/token")
        self._take_token(token.token, token.token_seconds)

    def _take_token(self, token: str, seconds: int) -> None:
        self._token = token
        self._renew_at = self.clock.monotonic() + RENEW_AFTER * seconds


def _json(message: Message | None) -> bytes | None:
    return message.model_dump_json().encode() if message else None


def _parsed(kind: type[Answer], body: bytes, path: str) -> Answer:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        field, problem = first_problem(error)
        raise ProtocolError(
            f"the answer to {path} is not understood ({field}: {problem});"
            " are worker and coordinator of the same version?"
        ) from None


def _short(name: str) -> str:
    """What the protocol takes as a name."""
    visible = "".join(letter for letter in name if letter.isprintable())
    return visible[:LONGEST_NAME] or "unnamed"
