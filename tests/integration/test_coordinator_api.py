"""The routes, over real sockets: what they give, and how they refuse."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from prometheus_client.parser import text_string_to_metric_families
from schemathesis import GenerationMode
from sqlalchemy import select as sql_select
from tests.support.coordinator import (
    INVITE_SECONDS,
    Made,
    SetClock,
    Signer,
    first_weights,
    join_message,
    make_run,
    moved,
    open_stores,
    running,
    served,
    weights_now,
)

from blocktrain.coordinator import client_limits
from blocktrain.coordinator.api import ENDPOINTS
from blocktrain.coordinator.leases import LONG_POLL_SECONDS, LeaseGrant
from blocktrain.coordinator.members import Caller
from blocktrain.coordinator.run import open_run
from blocktrain.coordinator.server import own_tls
from blocktrain.coordinator.service import Service
from blocktrain.coordinator.updates import UPLOAD_CACHE_SECONDS
from blocktrain.errors import UntrustedError
from blocktrain.ledger.schema import blocks, leases, updates, versions
from blocktrain.protocol.identity import WorkerKey, token_request_text, update_text
from blocktrain.protocol.limited_server import ConnectionLimits
from blocktrain.protocol.messages import (
    CHUNK_BYTES,
    LARGEST_BODY,
    PROTOCOL,
    WHOLE_WEIGHTS_BYTES,
    BlobAnswer,
    Downloaded,
    Hello,
    Joined,
    Lease,
    LeaseAnswer,
    LeaseProgress,
    LeaseRequest,
    LeaseReturn,
    LeaseState,
    Message,
    Receipt,
    Refusal,
    Role,
    RunDescription,
    Token,
    TokenRequest,
    UpdateClaim,
    UpdateOffer,
    UploadState,
    Wait,
    whole_update_head,
)
from blocktrain.protocol.status_messages import Event, Score, Status, WorkerState
from blocktrain.protocol.tls import pinned_context
from blocktrain.storage.chunks import name_of
from blocktrain.storage.tensor_file import decode

M = TypeVar("M", bound=Message)

SOME_HASH = "0" * 64
SOME_ID = "nothing0"
SECONDS = 10.0
# Generated requests come from one address, each on a new connection, faster than limits allow.
MANY_CONNECTIONS = ConnectionLimits(8192, 8192)


@dataclass(frozen=True)
class Api:
    """A coordinator behind a port, and a way to talk to it."""

    service: Service
    clock: SetClock
    address: str
    http: httpx.Client

    def invite(self, role: Role = "train", uses: int = 1) -> str:
        return self.service.operator.invite(role, uses, INVITE_SECONDS)

    def join(self, role: Role = "train") -> "HttpWorker":
        key = WorkerKey.create()
        answer = self.http.post(
            "/v1/join", content=json_of(join_message(self.service.run.id, self.invite(role), key))
        )
        joined = read(Joined, answer)
        return HttpWorker(self, Signer(self.service.run.id, joined.worker, key), joined.token)


@dataclass(frozen=True)
class HttpWorker:
    api: Api
    signer: Signer
    token: str

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}"}

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.api.http.get(path, headers={**self.headers, **headers})

    def post(self, path: str, message: Message | None = None) -> httpx.Response:
        content = json_of(message) if message else b""
        return self.api.http.post(path, content=content, headers=self.headers)

    def put(self, name: str, lease: str, data: bytes) -> httpx.Response:
        params = {"lease": lease}
        return self.api.http.put(
            f"/v1/chunks/{name}", params=params, content=data, headers=self.headers
        )

    def lease(self, **request: Any) -> Lease:
        answer = read(LeaseAnswer, self.post("/v1/lease", LeaseRequest(**request))).answer
        assert isinstance(answer, Lease), answer
        return answer

    def fetch(self, name: str) -> bytes:
        recipe = read(BlobAnswer, self.get(f"/v1/blobs/{name}")).recipe
        return b"".join(self.get(f"/v1/chunks/{chunk}").content for chunk in recipe.chunks)

    def make(self, lease: Lease, by: float = 1.0) -> Made:
        return self.signer.update(lease, moved(decode(self.fetch(lease.base.name)), by))

    def send(self, made: Made) -> Receipt:
        lease = made.offer.claim.lease
        for name in read(UploadState, self.post("/v1/updates", made.offer)).missing:
            assert self.put(name, lease, made.chunks[name]).status_code == 204
        return read(Receipt, self.post(f"/v1/updates/{lease}/commit"))

    def post_whole(self, made: Made, data: bytes | None = None) -> httpx.Response:
        """By one request; `data` in place of its chunk."""
        (chunk,) = made.chunks.values()
        body = whole_update_head(made.offer) + (chunk if data is None else data)
        return self.api.http.post("/v1/updates/whole", content=body, headers=self.headers)


def json_of(message: Message) -> bytes:
    return message.model_dump_json().encode()


def read(kind: type[M], answer: httpx.Response) -> M:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    return kind.model_validate_json(answer.content)


def refused(answer: httpx.Response, status: int, code: str) -> str:
    """Check that an answer is this refusal; its reason."""
    assert answer.status_code == status, answer.text
    told = Refusal.model_validate_json(answer.content)
    assert told.error == code
    assert told.reason
    return told.reason


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """One server for all tests that do not mind each other: a run with work for everybody."""
    clock = SetClock()
    folder = tmp_path_factory.mktemp("run")
    with (
        running(folder, clock, train__steps=100_000) as service,
        served(service) as address,
        httpx.Client(base_url=address, timeout=SECONDS) as http,
    ):
        yield Api(service, clock, address, http)


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    """A server of its own for a test that moves the clock or wants to see all that happens."""
    clock = SetClock()
    with (
        running(tmp_path, clock) as service,
        served(service, limits=MANY_CONNECTIONS) as address,
        httpx.Client(base_url=address, timeout=SECONDS) as http,
    ):
        yield Api(service, clock, address, http)


# The way of a worker


def test_whoever_waits_for_its_version_is_answered_when_it_is_made(api: Api):
    worker = api.join()
    lease = worker.lease()
    worker.send(worker.make(lease))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(worker.lease, held_block=lease.block)
        with pytest.raises(TimeoutError):
            asked.result(LONG_POLL_SECONDS / 4)
        api.service.round()
        began = time.monotonic()
        assert asked.result(SECONDS).base_version == lease.base_version + 1
        assert time.monotonic() - began < LONG_POLL_SECONDS / 2


def test_an_answer_is_not_held_back_for_ever(api: Api):
    worker = api.join()
    lease = worker.lease()
    worker.send(worker.make(lease))
    began = time.monotonic()
    answer = worker.post("/v1/lease", LeaseRequest(held_block=lease.block))
    assert isinstance(read(LeaseAnswer, answer).answer, Wait)
    assert LONG_POLL_SECONDS <= time.monotonic() - began < 3 * LONG_POLL_SECONDS


def test_whoever_has_more_to_send_is_answered_at_once(api: Api):
    worker = api.join()
    lease = worker.lease()
    worker.send(worker.make(lease))
    began = time.monotonic()
    answer = worker.post("/v1/lease", LeaseRequest(held_block=lease.block, at_once=True))
    assert isinstance(read(LeaseAnswer, answer).answer, Wait)
    assert time.monotonic() - began < LONG_POLL_SECONDS / 2


def test_hello_and_the_authority_need_no_authorization(shared: Api):
    assert read(Hello, shared.http.get("/v1/hello")) == Hello(
        run=shared.service.run.id, protocols=(PROTOCOL,)
    )
    answer = shared.http.get("/v1/ca")
    assert answer.text == shared.service.run.authority.certificate_pem
    assert answer.headers["content-type"].startswith("text/plain")


def test_from_joining_to_a_merged_version(api: Api):
    worker = api.join()
    description = read(RunDescription, worker.get("/v1/run"))
    assert description == api.service.run.description
    text = worker.fetch(description.corpus["valid"].name)
    assert len(text) == description.corpus["valid"].size == 600

    lease = worker.lease(steps_per_second=0.5)
    assert (lease.block, lease.steps) == (0, 10)  # whatever it says: it is its first
    told = LeaseProgress(fence=lease.fence, steps_done=3, loss=2.5)
    state = read(LeaseState, worker.post(f"/v1/lease/{lease.lease}/progress", told))
    assert state.open

    made = worker.make(lease, by=0.5)
    assert worker.send(made) == Receipt(state="pending", weight=1.0)
    assert worker.send(made) == Receipt(state="pending", weight=1.0)
    api.service.round()
    assert worker.send(made) == Receipt(state="merged", weight=1.0)

    status = read(Status, worker.get("/v1/status"))
    assert [block.version for block in status.blocks] == [1, 0]
    assert status.blocks[0].bytes_trained == 10 * 16
    assert status.workers[0].updates == 1
    (sent,) = made.chunks.values()
    assert worker.fetch(status.blocks[0].weights.name) == sent

    judge = api.join("evaluate")
    score = Score(block=None, versions=(1, 0), split="valid", windows="windows0", ce=2.25)
    assert judge.post("/v1/scores", score).status_code == 204
    assert read(Status, worker.get("/v1/status")).ce == 2.25


def test_a_chunk_that_comes_in_leaves_time_for_the_next(api: Api):
    worker = api.join()
    lease = worker.lease()
    made = worker.make(lease)
    (name,) = read(UploadState, worker.post("/v1/updates", made.offer)).missing
    api.clock.forward(lease.seconds_left - 10.0)
    assert worker.put(name, lease.lease, made.chunks[name]).status_code == 204
    told = LeaseProgress(fence=lease.fence, steps_done=0)
    state = read(LeaseState, worker.post(f"/v1/lease/{lease.lease}/progress", told))
    assert state.seconds_left == 4 * (lease.seconds_left - 10.0)


def test_a_commit_wakes_the_rounds(api: Api):
    api.service.start()
    try:
        worker = api.join()
        worker.send(worker.make(worker.lease(blocks=(0,))))
        deadline = time.monotonic() + SECONDS
        while read(Status, worker.get("/v1/status")).blocks[0].version == 0:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert worker.lease(blocks=(0,)).base_version == 1
    finally:
        api.service.stop()


def test_a_lease_is_given_back(shared: Api):
    worker = shared.join()
    lease = worker.lease()
    told = LeaseReturn(fence=lease.fence, reason="stopping")
    state = read(LeaseState, worker.post(f"/v1/lease/{lease.lease}/return", told))
    assert (state.open, state.reason) == (False, "the lease was returned")
    assert shared.join().lease(blocks=(lease.block,)).first_batch == lease.first_batch


def test_workers_at_once_share_the_work_without_loss(tmp_path: Path):
    """Six at a time over real connections; every batch is merged once, however late."""
    clock = SetClock()
    patient = {"swarm__most_stale": 1000, "swarm__late_discount": 1.0}
    with (
        running(tmp_path, clock, train__steps=60, **patient) as service,
        served(service) as address,
        httpx.Client(base_url=address, timeout=SECONDS) as http,
    ):
        api = Api(service, clock, address, http)
        workers = [api.join() for _ in range(6)]
        service.start()

        def work(worker: HttpWorker) -> int:
            done, deadline = 0, time.monotonic() + 6 * SECONDS
            while time.monotonic() < deadline:
                asked = LeaseRequest(steps_per_second=0.25)
                answer = read(LeaseAnswer, worker.post("/v1/lease", asked)).answer
                if isinstance(answer, Lease):
                    receipt = worker.send(worker.make(answer))
                    assert receipt.state in ("pending", "merged"), receipt
                    done += answer.steps
                elif answer.kind == "finished":
                    return done
                else:
                    time.sleep(0.01)
            raise AssertionError("the run does not end")

        try:
            with ThreadPoolExecutor(len(workers)) as pool:
                assert sum(pool.map(work, workers)) == 120
        finally:
            service.stop()
        with service.run.ledger.read() as tx:
            states = tx.blocks.states()
            counted = sum(row.batches_merged for row in tx.members.workers())
        assert [state.merged_batches for state in states] == [60, 60]
        assert counted == 120


def test_any_coordinator_of_the_run_answers(api: Api, tmp_path: Path):
    second = Service(open_run(*open_stores(tmp_path), api.clock))
    with served(second) as address, httpx.Client(base_url=address, timeout=SECONDS) as http:
        here = api.join()
        lease = here.lease()
        made = here.make(lease)
        there = HttpWorker(Api(second, api.clock, address, http), here.signer, here.token)
        assert there.lease() == lease
        assert here.post("/v1/updates", made.offer).status_code == 200
        for name, data in made.chunks.items():
            assert there.put(name, lease.lease, data).status_code == 204
        assert read(Receipt, here.post(f"/v1/updates/{lease.lease}/commit")).state == "pending"
        second.round()
        assert read(Status, here.get("/v1/status")).blocks[0].version == 1
    second.run.ledger.close()


# Small updates, in one request


@pytest.fixture
def asked(api: Api, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Leases that were looked for in the ledger before their update was taken in."""
    found: list[str] = []
    find = api.service.updates.find_grant

    def counted(caller: Caller, claim: UpdateClaim) -> LeaseGrant | Receipt:
        found.append(claim.lease)
        return find(caller, claim)

    monkeypatch.setattr(api.service.updates, "find_grant", counted)
    return found


def test_a_small_update_counts_by_one_request(api: Api, asked: list[str]):
    worker = api.join()
    assert read(RunDescription, worker.get("/v1/run")).whole_bytes == WHOLE_WEIGHTS_BYTES
    made = worker.make(worker.lease())
    assert read(Receipt, worker.post_whole(made)).state == "pending"
    assert not asked  # it was handed out a moment ago
    api.service.round()
    status = read(Status, worker.get("/v1/status"))
    assert status.blocks[0].version == 1
    size = made.offer.claim.recipe.size
    assert (status.blocks[0].moved.up, status.blocks[0].moved.up_raw) == (size, size)
    kinds = [event.kind for event in api.service.reports.events(0, 100)]
    assert kinds == ["joined", "leased", "uploaded", "merged"]


def test_a_small_update_sent_again_counts_once(api: Api, asked: list[str]):
    worker = api.join()
    made = worker.make(worker.lease())
    receipts = [read(Receipt, worker.post_whole(made)) for _ in range(2)]
    assert receipts == [receipts[0]] * 2
    assert asked == [made.offer.claim.lease]
    api.service.round()
    assert read(Receipt, worker.post_whole(made)).state == "merged"
    assert read(Receipt, worker.post(f"/v1/updates/{asked[0]}/commit")).state == "merged"
    assert read(Status, worker.get("/v1/status")).blocks[0].version == 1


def test_small_updates_sent_at_once_count_once(api: Api):
    worker = api.join()
    made = worker.make(worker.lease())
    with ThreadPoolExecutor(4) as pool:
        receipts = list(pool.map(lambda _: read(Receipt, worker.post_whole(made)), range(4)))
    assert {receipt.state for receipt in receipts} == {"pending"}
    assert api.service.merger.merge_due() == 1
    assert read(Status, worker.get("/v1/status")).workers[0].updates == 1


def test_another_coordinator_takes_a_small_update(api: Api, tmp_path: Path):
    second = Service(open_run(*open_stores(tmp_path), api.clock))
    with served(second) as address, httpx.Client(base_url=address, timeout=SECONDS) as http:
        here = api.join()
        made = here.make(here.lease())
        there = HttpWorker(Api(second, api.clock, address, http), here.signer, here.token)
        assert read(Receipt, there.post_whole(made)).state == "pending"
        assert read(Receipt, here.post_whole(made)).state == "pending"
    second.run.ledger.close()


def test_an_update_that_was_offered_may_come_whole(api: Api):
    worker = api.join()
    made = worker.make(worker.lease())
    assert worker.post("/v1/updates", made.offer).status_code == 200
    other = worker.signer.update(worker.lease(), first_weights(0))
    refused(worker.post_whole(replaced_lease(worker, made, other)), 409, "conflict")
    assert read(Receipt, worker.post_whole(made)).state == "pending"


def replaced_lease(worker: HttpWorker, made: Made, other: Made) -> Made:
    """What `other` holds, for the lease of `made`."""
    kept = {"recipe": other.offer.claim.recipe}
    claim = made.offer.claim.model_copy(update=kept)
    offer = UpdateOffer(claim=claim, signature=worker.signer.key.sign(update_text(claim)))
    return Made(offer, other.chunks)


def test_refusals_of_small_updates_have_their_codes(api: Api):
    """And nothing of what was refused is kept."""
    worker, other = api.join(), api.join()
    lease = worker.lease()
    made = worker.make(lease)
    (chunk,) = made.chunks.values()
    before = {name for name, _ in api.service.run.chunks.stored()}
    refused(other.post_whole(made), 404, "not_found")
    refused(worker.post_whole(made, chunk[:-1]), 422, "malformed")
    refused(worker.post_whole(made, chunk[:-1] + b"x"), 422, "malformed")
    forged = Made(made.offer.model_copy(update={"signature": "AAAA"}), made.chunks)
    refused(worker.post_whole(forged), 403, "forbidden")
    for size, status, code in ((lease.base.size + 1, 413, "too_large"), (8, 422, "malformed")):
        wrong = worker.signer.update_of_bytes(lease, bytes(size))
        refused(worker.post_whole(wrong), status, code)
    wrong = worker.signer.update(lease, first_weights(0), base_version=7)
    refused(worker.post_whole(wrong), 409, "conflict")
    wrong = worker.signer.update(lease, first_weights(1), fence=99)
    refused(worker.post_whole(wrong), 409, "conflict")
    much = Downloaded(block=4095, whole=1, differences=0, raw=1)
    boasting = made.offer.model_copy(update={"downloads": (much,)})
    refused(worker.post_whole(Made(boasting, made.chunks)), 422, "malformed")
    refused(worker.api.http.post("/v1/updates/whole", headers=worker.headers), 422, "malformed")
    long = bytes(WHOLE_WEIGHTS_BYTES + 1)
    refused(worker.post_whole(made, long), 413, "too_large")
    assert {name for name, _ in api.service.run.chunks.stored()} == before
    assert read(Receipt, worker.post_whole(made)).state == "pending"


def test_what_a_banned_worker_sends_is_not_kept(api: Api):
    worker = api.join()
    lease = worker.lease()
    api.service.operator.ban(worker.signer.worker)
    for by in (1.0, 2.0, 3.0):  # at most the first of them is, before the ledger is looked at
        refused(worker.post_whole(worker.make(lease, by)), 403, "forbidden")
    made = [worker.make(lease, by) for by in (2.0, 3.0)]
    assert not api.service.run.chunks.has(name for each in made for name in each.chunks)


def test_a_small_update_from_a_version_that_is_gone_is_refused(tmp_path: Path):
    """Its lease had ended, and so nobody kept the version: the block is not held up by it."""
    clock = SetClock()
    with (
        running(tmp_path, clock, train__steps=100_000, swarm__keep_versions=1) as service,
        served(service) as address,
        httpx.Client(base_url=address, timeout=SECONDS) as http,
    ):
        api = Api(service, clock, address, http)
        sleeper, worker = api.join(), api.join()
        made = sleeper.make(sleeper.lease(blocks=(0,)))
        for _ in range(2):
            assert worker.send(worker.make(worker.lease(blocks=(0,)))).state == "pending"
            assert service.merger.merge_due() == 1
        clock.forward(1800.0)  # less than a token's life
        service.leases.expire()
        service.collector.collect()
        refused(sleeper.post_whole(made), 404, "not_found")
        assert service.reports.status().blocks[0].pending_updates == 0


def test_a_small_update_that_is_not_finite_is_refused_for_good(api: Api):
    worker = api.join()
    lease = worker.lease()
    spoiled = worker.signer.update(lease, moved(first_weights(lease.block), float("nan")))
    receipt = read(Receipt, worker.post_whole(spoiled))
    assert receipt.state == "refused" and "finite" in receipt.reason
    assert read(Receipt, worker.post_whole(spoiled)) == receipt
    refused(worker.post_whole(worker.make(lease)), 409, "conflict")
    assert api.join().lease().first_batch == lease.first_batch  # its text is handed out again


# Who may do what

READING = [
    ("GET", "/v1/run"),
    ("GET", "/v1/status"),
    ("GET", "/v1/events"),
    ("GET", f"/v1/blobs/{SOME_HASH}"),
    ("GET", f"/v1/chunks/{SOME_HASH}"),
]
WORKING = [
    ("POST", "/v1/lease"),
    ("POST", f"/v1/lease/{SOME_ID}/progress"),
    ("POST", f"/v1/lease/{SOME_ID}/return"),
    ("POST", "/v1/updates"),
    ("POST", "/v1/updates/whole"),
    ("POST", f"/v1/updates/{SOME_ID}/commit"),
    ("PUT", f"/v1/chunks/{SOME_HASH}?lease={SOME_ID}"),
    ("POST", "/v1/scores"),
]


@pytest.mark.parametrize(("method", "path"), [*READING, *WORKING])
def test_without_a_good_authorization_nothing_opens(shared: Api, method: str, path: str):
    refused(shared.http.request(method, path), 401, "unauthorized")
    for header in ("", "Bearer", "Basic dXNlcjpwYXNz", "Bearer x.y", "Bearer \xe9", "Digest a"):
        headers = {"authorization": header.encode("latin-1")}
        answer = shared.http.request(method, path, headers=headers)
        refused(answer, 401, "unauthorized")


def test_an_unknown_invite_opens_nothing(shared: Api):
    for method, path in READING:
        answer = shared.http.request(method, path, headers={"authorization": "Invite c2VjcmV0"})
        refused(answer, 401, "unauthorized")


def test_an_invite_reads_but_does_not_work(shared: Api):
    headers = {"authorization": f"Invite {shared.invite()}"}
    assert read(Status, shared.http.get("/v1/status", headers=headers)).run
    description = read(RunDescription, shared.http.get("/v1/run", headers=headers))
    name = description.corpus["test"].name
    recipe = read(BlobAnswer, shared.http.get(f"/v1/blobs/{name}", headers=headers)).recipe
    for chunk in recipe.chunks:
        assert shared.http.get(f"/v1/chunks/{chunk}", headers=headers).status_code == 200
    for method, path in WORKING:
        answer = shared.http.request(method, path, headers=headers)
        assert "bearer" in refused(answer, 401, "unauthorized")


def test_schemes_are_read_in_any_case(shared: Api):
    token, invite = shared.join().token, shared.invite()
    for header in (f"bearer {token}", f"BEARER  {token}", f"iNvItE {invite}"):
        answer = shared.http.get("/v1/status", headers={"authorization": header})
        assert answer.status_code == 200


def test_an_invite_that_ended_opens_nothing(api: Api):
    secret = api.invite()
    (state,) = api.service.operator.invites()
    api.service.operator.revoke(state.invite)
    answer = api.http.get("/v1/status", headers={"authorization": f"Invite {secret}"})
    refused(answer, 410, "gone")
    message = join_message(api.service.run.id, secret, WorkerKey.create())
    refused(api.http.post("/v1/join", content=json_of(message)), 410, "gone")


def test_a_token_ends_and_is_renewed(api: Api):
    worker = api.join()
    api.clock.forward(3600)
    refused(worker.get("/v1/status"), 401, "unauthorized")
    refused(worker.post("/v1/lease", LeaseRequest()), 401, "unauthorized")
    now = int(api.clock.now)
    run, name, key = worker.signer.run, worker.signer.worker, worker.signer.key
    asked = TokenRequest(
        worker=name, time=now, signature=key.sign(token_request_text(run, name, now))
    )
    token = read(Token, api.http.post("/v1/token", content=json_of(asked)))
    assert HttpWorker(api, worker.signer, token.token).lease()
    forged = asked.model_copy(update={"time": now + 1})
    refused(api.http.post("/v1/token", content=json_of(forged)), 401, "unauthorized")


def test_a_banned_worker_is_forbidden(shared: Api):
    worker = shared.join()
    lease = worker.lease()
    made = worker.make(lease)
    worker.post("/v1/updates", made.offer)
    shared.service.operator.ban(worker.signer.worker)
    shared.clock.forward(UPLOAD_CACHE_SECONDS)
    ((name, data),) = made.chunks.items()
    for answer in (
        worker.post("/v1/lease", LeaseRequest()),
        worker.post("/v1/updates", made.offer),
        worker.put(name, lease.lease, data),
        worker.post_whole(made),
        worker.post(
            f"/v1/lease/{lease.lease}/return", LeaseReturn(fence=lease.fence, reason="sorry")
        ),
    ):
        assert "banned" in refused(answer, 403, "forbidden")


def test_roles_are_kept_apart(shared: Api):
    trainer, judge = shared.join("train"), shared.join("evaluate")
    score = Score(block=0, versions=(0,), split="valid", windows="windows0", ce=1.0)
    refused(trainer.post("/v1/scores", score), 403, "forbidden")
    refused(judge.post("/v1/lease", LeaseRequest()), 403, "forbidden")


# Refusals


def test_refusals_of_updates_have_their_codes(shared: Api):
    worker, other = shared.join(), shared.join()
    lease = worker.lease()
    made = worker.make(lease, by=0.125)
    ((name, data),) = made.chunks.items()
    commit = f"/v1/updates/{lease.lease}/commit"
    refused(worker.post(commit), 404, "not_found")
    refused(worker.put(name, lease.lease, data), 404, "not_found")
    refused(other.post("/v1/updates", made.offer), 403, "forbidden")
    wrong = worker.signer.update(lease, first_weights(0), fence=99)
    refused(worker.post("/v1/updates", wrong.offer), 409, "conflict")
    long = worker.signer.update_of_bytes(lease, bytes(lease.base.size + 1))
    refused(worker.post("/v1/updates", long.offer), 413, "too_large")
    short = worker.signer.update_of_bytes(lease, bytes(8))
    refused(worker.post("/v1/updates", short.offer), 422, "malformed")

    assert worker.post("/v1/updates", made.offer).status_code == 200
    refused(worker.post(commit), 409, "conflict")
    refused(other.post(commit), 404, "not_found")
    refused(worker.put(name_of(b"x"), lease.lease, b"x"), 403, "forbidden")
    refused(worker.put(name, lease.lease, data[:-1]), 422, "malformed")
    refused(other.put(name, lease.lease, data), 404, "not_found")
    assert worker.put(name, lease.lease, data).status_code == 204
    assert worker.post(commit).status_code == 200
    refused(worker.put(name, lease.lease, data), 409, "conflict")


def test_refusals_of_leases_have_their_codes(shared: Api):
    worker, other = shared.join(), shared.join()
    lease = worker.lease()
    progress = f"/v1/lease/{lease.lease}/progress"
    told = LeaseProgress(fence=lease.fence, steps_done=1)
    refused(other.post(progress, told), 404, "not_found")
    refused(worker.post(f"/v1/lease/{SOME_ID}/progress", told), 404, "not_found")
    refused(worker.post(progress, LeaseProgress(fence=99, steps_done=1)), 409, "conflict")


def test_refusals_of_joining_have_their_codes(shared: Api):
    unknown = join_message(shared.service.run.id, "c2VjcmV0", WorkerKey.create())
    refused(shared.http.post("/v1/join", content=json_of(unknown)), 401, "unauthorized")
    old = join_message(shared.service.run.id, shared.invite(), WorkerKey.create()).model_copy(
        update={"protocols": (99,)}
    )
    refused(shared.http.post("/v1/join", content=json_of(old)), 409, "conflict")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"[]", "body"),
        (b"null", "body"),
        (b"\xff\xfe", "body"),
        (b'{"more": 1}', "more"),
        (b'{"held_block": "1"}', "held_block"),
        (b'{"held_block": 1.5}', "held_block"),
        (b'{"held_block": -1}', "held_block"),
        (b'{"held_block": 4096}', "held_block"),
        (b'{"steps_per_second": NaN}', "steps_per_second"),
        (b'{"steps_per_second": 0}', "steps_per_second"),
        (b'{"steps_per_second": 1e999}', "steps_per_second"),
        (b'{"blocks": {}}', "blocks"),
        (b'{"blocks": ' + b"[" * 50_000, ""),
    ],
)
def test_a_message_that_is_none_is_malformed(shared: Api, body: bytes, words: str):
    worker = shared.join()
    answer = shared.http.post("/v1/lease", content=body, headers=worker.headers)
    assert words in refused(answer, 422, "malformed")


@pytest.mark.parametrize("kind", ["join", "token", "updates", "scores", "progress", "return"])
def test_unknown_fields_are_refused_everywhere(shared: Api, kind: str):
    worker = shared.join()
    lease = worker.lease()
    messages: dict[str, tuple[str, Message]] = {
        "join": (
            "/v1/join",
            join_message(shared.service.run.id, shared.invite(), WorkerKey.create()),
        ),
        "token": ("/v1/token", TokenRequest(worker=SOME_ID, time=1, signature="AA")),
        "updates": ("/v1/updates", worker.make(lease).offer),
        "scores": (
            "/v1/scores",
            Score(block=0, versions=(0,), split="valid", windows="windows0", ce=1.0),
        ),
        "progress": (
            f"/v1/lease/{lease.lease}/progress", LeaseProgress(fence=lease.fence, steps_done=1),
        ),
        "return": (
            f"/v1/lease/{lease.lease}/return", LeaseReturn(fence=lease.fence, reason=""),
        ),
    }  # fmt: skip
    path, message = messages[kind]
    fields = {**json.loads(json_of(message)), "surprise": 1}
    answer = shared.http.post(path, json=fields, headers=worker.headers)
    assert "surprise" in refused(answer, 422, "malformed")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/chunks/short"),
        ("GET", "/v1/chunks/" + "G" * 64),
        ("GET", "/v1/chunks/..%2F..%2Fetc%2Fpasswd"),
        ("GET", "/v1/blobs/" + "a" * 63),
        ("GET", "/v1/blobs/" + "A" * 64),
        ("GET", "/v1/events?after=-1"),
        ("GET", "/v1/events?after=x"),
        ("PUT", "/v1/chunks/" + "a" * 64),
        ("PUT", "/v1/chunks/" + "a" * 64 + "?lease=../../etc"),
        ("POST", "/v1/updates/x/commit"),
        ("POST", "/v1/updates/UPPERCASE0/commit"),
    ],
)
def test_a_path_that_is_none_is_refused(shared: Api, method: str, path: str):
    answer = shared.http.request(method, path, headers=shared.join().headers)
    told = Refusal.model_validate_json(answer.content)
    assert (answer.status_code, told.error) in ((422, "malformed"), (404, "not_found"))


def test_what_is_not_there_is_not_found(shared: Api):
    worker = shared.join()
    refused(worker.get(f"/v1/blobs/{SOME_HASH}"), 404, "not_found")
    refused(worker.get(f"/v1/chunks/{SOME_HASH}"), 404, "not_found")
    refused(worker.get("/v1/nothing"), 404, "not_found")
    refused(worker.get("/page/"), 404, "not_found")


def test_a_wrong_method_is_refused_as_everything_is(shared: Api):
    answer = shared.http.delete("/v1/status")
    assert answer.status_code == 405
    assert Refusal.model_validate_json(answer.content).error == "malformed"


def test_a_ledger_that_does_not_answer_is_unavailable(api: Api):
    """Broken under a running server: its answer says to try again."""
    worker = api.join()
    with api.service.run.ledger.engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE blocks RENAME TO elsewhere")
    answer = worker.get("/v1/status")
    refused(answer, 503, "unavailable")
    assert answer.headers["retry-after"] == "1"
    with api.service.run.ledger.engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE elsewhere RENAME TO blocks")
    assert worker.get("/v1/status").status_code == 200


# Sizes


def flood(api: Api, request_line: str, headers: dict[str, str], most: int) -> tuple[bytes, int]:
    """Send an endless body until the server answers; its answer, and how much was sent."""
    place = urlsplit(api.address)
    whole_update_head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    with socket.create_connection((place.hostname, place.port), timeout=SECONDS) as line:
        line.sendall(f"{request_line} HTTP/1.1\r\nhost: x\r\n{whole_update_head}\r\n".encode())
        line.setblocking(False)
        sent, answer, piece = 0, b"", b"x" * (1 << 16)
        while sent < most and not answer:
            readable, writable, _ = select.select([line], [line], [], SECONDS)
            if readable:
                answer = line.recv(1 << 16)
            elif writable:
                sent += line.send(piece)
    return answer, sent


def offered_chunk(worker: HttpWorker) -> tuple[str, str]:
    """A lease and the name of a chunk that is waited for."""
    made = worker.make(worker.lease())
    worker.post("/v1/updates", made.offer).raise_for_status()
    return made.offer.claim.lease, next(iter(made.chunks))


@pytest.mark.parametrize(
    ("request_line", "limit"),
    [
        ("POST /v1/lease", 8 * 1024 * 1024),
        ("POST /v1/join", 8 * 1024 * 1024),
        ("POST /v1/updates", 256 * 1024),
        ("POST /v1/updates/whole", LARGEST_BODY),
        ("PUT /v1/chunks/{name}?lease={lease}", CHUNK_BYTES),
    ],
)
def test_a_body_without_end_is_refused_before_its_end(api: Api, request_line: str, limit: int):
    worker = api.join()
    lease, name = offered_chunk(worker)
    headers = {**worker.headers, "content-length": str(1 << 40)}
    request_line = request_line.format(name=name, lease=lease)
    answer, sent = flood(api, request_line, headers, most=limit + 3 * CHUNK_BYTES)
    assert answer.startswith(b"HTTP/1.1 413 "), answer[:100]
    assert b'"too_large"' in answer
    assert sent < limit + 2 * CHUNK_BYTES  # what was taken in, and lay in buffers on the way


def test_a_stranger_sends_nothing_at_all(shared: Api):
    headers = {"content-length": str(1 << 40)}
    request_line = f"PUT /v1/chunks/{SOME_HASH}?lease={SOME_ID}"
    answer, sent = flood(shared, request_line, headers, most=CHUNK_BYTES)
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert sent < CHUNK_BYTES // 2


def test_a_chunk_has_at_most_the_size_that_was_offered(api: Api):
    worker = api.join()
    lease, name = offered_chunk(worker)
    refused(worker.put(name, lease, bytes(CHUNK_BYTES)), 413, "too_large")
    refused(worker.put(name, lease, bytes(100)), 422, "malformed")
    refused(worker.put(SOME_HASH, SOME_ID, bytes(CHUNK_BYTES)), 404, "not_found")


# Chunks and ranges

CHUNK = np.random.default_rng(0).bytes(1_200_000)  # more than one piece of an answer


@pytest.fixture(scope="module")
def chunk(shared: Api) -> str:
    return shared.service.run.chunks.put(CHUNK)


@pytest.fixture(scope="module")
def reader(shared: Api) -> HttpWorker:
    return shared.join()


def test_a_whole_chunk(reader: HttpWorker, chunk: str):
    answer = reader.get(f"/v1/chunks/{chunk}")
    assert (answer.status_code, answer.content) == (200, CHUNK)
    assert answer.headers["etag"] == f'"{chunk}"'
    assert answer.headers["accept-ranges"] == "bytes"
    assert answer.headers["content-length"] == str(len(CHUNK))
    assert answer.headers["content-type"] == "application/octet-stream"
    assert "content-range" not in answer.headers


@pytest.mark.parametrize(
    ("asked", "start", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=5-", 5, len(CHUNK)),
        ("bytes=100-600000", 100, 600_001),
        (f"bytes={len(CHUNK) - 1}-", len(CHUNK) - 1, len(CHUNK)),
        ("bytes=7-99999999999999", 7, len(CHUNK)),
        ("bytes= 1-2", 1, 3),
    ],
)
def test_part_of_a_chunk(reader: HttpWorker, chunk: str, asked: str, start: int, end: int):
    answer = reader.get(f"/v1/chunks/{chunk}", range=asked)
    assert (answer.status_code, answer.content) == (206, CHUNK[start:end])
    assert answer.headers["content-range"] == f"bytes {start}-{end - 1}/{len(CHUNK)}"
    assert answer.headers["content-length"] == str(end - start)
    assert answer.headers["etag"] == f'"{chunk}"'


def test_a_range_of_everything_is_the_whole(reader: HttpWorker, chunk: str):
    answer = reader.get(f"/v1/chunks/{chunk}", range="bytes=0-")
    assert (answer.status_code, answer.content) == (200, CHUNK)


@pytest.mark.parametrize(
    "asked",
    ["bytes=5-2", f"bytes={len(CHUNK)}-", "bytes=-5", "bytes=a-b", "bytes=1", "bytes=", "bytes",
     "lines=0-1", "bytes=0-1,5-6", "bytes=0-+1", "bytes=1e3-", "bytes=--1"],
)  # fmt: skip
def test_a_range_that_is_none_is_refused(reader: HttpWorker, chunk: str, asked: str):
    refused(reader.get(f"/v1/chunks/{chunk}", range=asked), 422, "malformed")


# Events


def stream(api: Api, count: int, path: str = "/v1/events", **headers: str) -> list[Event]:
    """The first so many events of a stream."""
    found: list[Event] = []
    fields: dict[str, str] = {}
    sent = {"authorization": f"Invite {api.invite()}", **headers}
    with api.http.stream("GET", path, headers=sent) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            name, colon, value = line.partition(": ")
            if name and colon:
                fields[name] = value
            elif not line and "data" in fields:
                event = Event.model_validate_json(fields["data"])
                assert (fields["id"], fields["event"]) == (str(event.number), event.kind)
                found.append(event)
                fields = {}
            if len(found) == count:
                return found
    raise AssertionError("the stream ended")


def test_events_from_the_beginning_or_from_where_one_left_off(api: Api):
    worker = api.join()
    worker.send(worker.make(worker.lease()))
    api.service.round()
    events = stream(api, 4, "/v1/events?after=0")
    assert [event.kind for event in events] == ["joined", "leased", "uploaded", "merged"]
    assert events == api.service.reports.events(0, 100)
    assert stream(api, 2, **{"last-event-id": str(events[1].number)}) == events[2:]
    both = {"last-event-id": str(events[2].number)}
    assert stream(api, 1, "/v1/events?after=0", **both) == events[3:]


def test_without_a_number_events_begin_with_what_comes_next(api: Api):
    api.join()
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(stream, api, 1)
        time.sleep(0.3)
        worker = api.join()
        (event,) = watching.result()
    assert (event.kind, event.worker) == ("joined", worker.signer.worker)


def test_no_more_listen_than_there_are_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    most = client_limits.EVENT_STREAMS._replace(client=1)
    monkeypatch.setattr(client_limits, "EVENT_STREAMS", most)
    clock = SetClock()
    with (
        running(tmp_path, clock) as service,
        served(service) as address,
        httpx.Client(base_url=address, timeout=SECONDS) as http,
    ):
        api = Api(service, clock, address, http)
        headers = {"authorization": f"Invite {api.invite()}"}
        with http.stream("GET", "/v1/events", headers=headers) as first:
            lines = first.iter_lines()
            assert next(lines)  # it listens
            refused = http.get("/v1/events", headers=headers)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert "too many event streams" in refused.text
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:  # the place of one who has left is free again
            with http.stream("GET", "/v1/events", headers=headers) as another:
                if another.status_code == 200:
                    return
            time.sleep(0.1)
        raise AssertionError("the place of one who left stayed taken")


def test_who_takes_leases_and_gives_them_back_in_a_loop_is_slowed_down(api: Api):
    """Each of them stays in the ledger."""
    worker = api.join()
    answers = []
    for _ in range(25):
        lease = worker.lease()
        told = LeaseReturn(fence=lease.fence, reason="")
        answers.append(worker.post(f"/v1/lease/{lease.lease}/return", told).status_code)
        if answers[-1] != 200:
            break
    assert answers[0] == 200
    assert answers[-1] == 429
    assert api.join().lease()


# Metrics


def test_metrics_can_be_read_by_prometheus(api: Api):
    worker = api.join()
    api.join("evaluate")
    made = worker.make(worker.lease(blocks=(0,)))
    worker.send(made)
    api.service.round()
    answer = api.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert found["blocktrain_block_version", "0"] == 1
    assert found["blocktrain_block_version", "1"] == 0
    assert found["blocktrain_block_bytes_trained", "0"] == 160
    assert found["blocktrain_block_participation", "0"] == 1.0
    assert ("blocktrain_block_participation", "1") not in found
    assert ("blocktrain_block_ce", "0") not in found
    assert found["blocktrain_workers", "waiting"] == 2
    assert found["blocktrain_workers", "banned"] == 0
    states = {key[1] for key in found if key[0] == "blocktrain_workers"}
    assert states == set(get_args(WorkerState))
    received = sum(len(data) for data in made.chunks.values())
    assert found["blocktrain_chunk_bytes_total", "received"] == received
    assert found["blocktrain_chunk_bytes_total", "sent"] == received  # its base, as long
    assert found["blocktrain_moved_bytes_total", "0", "none", "up"] == received
    assert found["blocktrain_moved_bytes_total", "0", "none", "down"] == 0  # nothing was reported
    assert found["blocktrain_moved_raw_bytes_total", "0", "up"] == received


def test_a_page_of_metrics_is_made_once_a_second(api: Api, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("blocktrain.coordinator.reports.METRICS_SECONDS", 60.0)
    first = api.http.get("/metrics").text
    api.join()
    assert api.http.get("/metrics").text == first


# TLS


def test_tls_with_the_runs_own_authority(tmp_path: Path):
    clock = SetClock()
    with (
        running(tmp_path, clock) as service,
        served(service, own_tls(service.run, ["127.0.0.1"])) as address,
    ):
        with httpx.Client(base_url=address, verify=False, timeout=SECONDS) as stranger:
            ca_pem = stranger.get("/v1/ca").text
        fingerprint = service.run.authority.fingerprint
        context = pinned_context(ca_pem, fingerprint)
        with httpx.Client(base_url=address, verify=context, timeout=SECONDS) as http:
            assert read(Hello, http.get("/v1/hello")).run == service.run.id
            worker = Api(service, clock, address, http).join()
            assert worker.send(worker.make(worker.lease())).state == "pending"
        with pytest.raises(UntrustedError):
            pinned_context(ca_pem, "0" * 64)
        with (
            httpx.Client(base_url=address, timeout=SECONDS) as unaware,
            pytest.raises(httpx.ConnectError),
        ):
            unaware.get("/v1/hello")


def test_a_coordinator_of_another_run_is_not_believed(tmp_path: Path):
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    ours = make_run(tmp_path / "ours")
    ours.ledger.close()
    with running(tmp_path / "theirs", SetClock()) as service:
        context = pinned_context(ours.authority.certificate_pem, ours.authority.fingerprint)
        with (
            served(service, own_tls(service.run, ["127.0.0.1"])) as address,
            httpx.Client(base_url=address, verify=context, timeout=SECONDS) as http,
            pytest.raises(httpx.ConnectError),
        ):
            http.get("/v1/hello")


# The process

SERVE = """
import sys, time
from pathlib import Path
from blocktrain.coordinator.run import open_run
from blocktrain.coordinator.server import serve
from blocktrain.coordinator.service import Service
from blocktrain.coordinator.updates import UPLOAD_CACHE_SECONDS
from blocktrain.protocol.addresses import bound_socket
from blocktrain.protocol.limited_server import ConnectionLimits
from blocktrain.storage.chunks import LocalChunks
from blocktrain.ledger.ledger import Ledger

folder = Path(sys.argv[1])
ledger = Ledger(f"sqlite:///{folder / 'ledger.db'}")
run = open_run(ledger, LocalChunks(folder / "chunks"), time.time)
listener = bound_socket("127.0.0.1", 0)
print(listener.getsockname()[1], flush=True)
try:
    serve(Service(run), listener, None, ConnectionLimits(64, 64))
except KeyboardInterrupt:
    pass
print("torch" in sys.modules, "numpy" in sys.modules, flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGINT for one process")
def test_the_process_that_serves_never_loads_torch(tmp_path: Path):
    """A worker goes all the way to a merged version, then the coordinator is stopped and tells."""
    run = make_run(tmp_path)
    service = Service(run)
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with process, httpx.Client(timeout=SECONDS) as http:
        assert process.stdout is not None
        http.base_url = httpx.URL(f"http://127.0.0.1:{process.stdout.readline().strip()}")
        try:
            worker = Api(service, SetClock(), str(http.base_url), http).join()
            made = worker.make(worker.lease())
            worker.send(made)
            deadline = time.monotonic() + SECONDS
            while worker.send(made).state != "merged":
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert worker.get("/metrics").status_code == 200
        finally:
            process.send_signal(signal.SIGINT)
        assert process.stdout.read().split() == ["False", "True"]
    assert process.returncode == 0
    assert np.array_equal(
        weights_now(run, 0)["head.bias"], moved(first_weights(0), 1.0)["head.bias"]
    )
    run.ledger.close()


# Whatever the served description allows, and what it does not

# Of each kind, valid and invalid, for each route and 3 roles; `make fuzz` asks for more.
CASES_OF_A_ROUTE = int(os.environ.get("BLOCKTRAIN_FUZZ_CASES", "7"))
ASKED = {"positive": CASES_OF_A_ROUTE, "negative": CASES_OF_A_ROUTE}
TAKES_NOTHING = (  # nor needs any authorization
    "GET /v1/hello", "GET /v1/ca", "GET /metrics", "GET /health", "GET /v1/page/overview",
    "GET /v1/page/charts", "GET /v1/page/workers",
)  # fmt: skip


def rows(api: Api, *tables: Any) -> list[list[Any]]:
    with api.service.run.ledger.engine.connect() as connection:
        return [sorted(map(tuple, connection.execute(sql_select(table)))) for table in tables]


def answer_to(case: Any, headers: dict[str, str]) -> requests.Response:
    """Make a generated request; a stream of events is not read to its end."""
    request = case.as_transport_kwargs(headers=headers)
    with requests.request(**request, stream=True, timeout=SECONDS) as response:
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            _ = response.content
        return response


def statuses(operation: Any, mode: GenerationMode, headers: dict[str, str]) -> "Counter[int]":
    """How a route answers to generated requests; none of it may be its own fault."""
    found: Counter[int] = Counter()

    @settings(
        max_examples=CASES_OF_A_ROUTE,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        response = answer_to(case, headers)
        found[response.status_code] += 1
        assert response.status_code < 500, (operation.label, case, response.content)

    with suppress(Unsatisfiable):  # a route that takes nothing cannot be asked wrongly
        check()
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("role", ["train", "evaluate", "validate"])
def test_no_request_breaks_the_coordinator(api: Api, role: Role):
    """Only a worker that trains may change leases and updates."""
    worker = api.join()
    worker.post("/v1/updates", worker.make(worker.lease()).offer)
    headers = api.join(role).headers
    schema = schemathesis.openapi.from_url(f"{api.address}/openapi.json")
    before = rows(api, versions, blocks, leases, updates)
    seen: dict[str, dict[str, Counter[int]]] = {}
    for found in schema.get_all_operations():
        operation = found.ok()
        modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
        seen[operation.label] = {mode.value: statuses(operation, mode, headers) for mode in modes}
    assert_all_were_made(seen)
    assert 200 in seen["GET /v1/status"]["positive"] and 422 in seen["POST /v1/join"]["negative"]
    after = rows(api, versions, blocks, leases, updates)
    assert after[0] == before[0]
    if role != "train":
        assert after == before
    with api.service.run.ledger.read() as tx:
        for state in tx.blocks.states():
            assert state.under_way + state.to_hand_out == state.total_batches
    assert worker.get("/v1/status").status_code == 200


def assert_all_were_made(seen: dict[str, dict[str, "Counter[int]"]]) -> None:
    """As many requests as were asked for; told by status, for those who look (`pytest -rP`)."""
    assert seen.keys() == {f"{endpoint.method} {endpoint.path}" for endpoint in ENDPOINTS}
    for route, by_mode in seen.items():
        asked = {"positive": 1, "negative": 0} if route in TAKES_NOTHING else ASKED
        assert {mode: found.total() for mode, found in by_mode.items()} == asked, route
    for mode in ASKED:
        found = sum((by_mode[mode] for by_mode in seen.values()), Counter[int]())
        refused_ones = sum(count for status, count in found.items() if status >= 400)
        told = f"{found.total()} {mode}, {refused_ones} of them refused: {sorted(found.items())}"
        sys.stdout.write(f"{told}\n")
