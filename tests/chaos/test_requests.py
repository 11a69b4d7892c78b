"""What workers may do to a coordinator, on purpose or not: it is a process of its own here, with
its rounds and TLS, and goes on serving everybody else."""

import socket
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import httpx
import numpy as np
import pytest
from tests.support.coordinator import (
    INVITE_SECONDS,
    Made,
    Signer,
    first_weights,
    join,
    join_message,
    make_run,
    moved,
    swarm_config,
    weights_now,
)
from tests.support.cutting_proxy import CuttingProxy
from tests.support.postgres import private_server
from tests.support.processes import Processes, Running, free_port, full_disk

from blocktrain.coordinator.folder import CoordinatorFolder
from blocktrain.coordinator.members import Operator
from blocktrain.coordinator.service import ROUND_SECONDS, Service
from blocktrain.protocol.identity import WorkerKey
from blocktrain.protocol.invite import Invite
from blocktrain.protocol.messages import (
    CHUNK_BYTES,
    Joined,
    Lease,
    LeaseAnswer,
    LeaseRequest,
    Message,
    Receipt,
    UploadState,
)
from blocktrain.protocol.status_messages import Status
from blocktrain.protocol.tls import pinned_context
from blocktrain.storage.tensor_file import decode
from blocktrain.worker.client import Client
from blocktrain.worker.transfer import BlobCache, Transfer

M = TypeVar("M", bound=Message)

SECONDS = 10.0
QUICK = 3.0  # an answer to somebody who does nothing wrong
RACES = 8
CRASHES = 3
TEN_CHUNKS = 10 * CHUNK_BYTES
MANY = 40  # more than a coordinator works on at once


@dataclass(frozen=True)
class Server:
    """A coordinator at a fixed port, to be killed and started again."""

    processes: Processes
    folder: Path
    port: int
    run: str
    secret: str
    context: ssl.SSLContext
    fingerprint: str
    options: tuple[str, ...] = ()

    def start(self) -> Running:
        running = self.processes.coordinator(self.folder, self.port, "", *self.options)
        self.processes.wait_for("the coordinator answers", self._answers)
        return running

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), SECONDS).close()
        except ConnectionRefusedError:
            return False
        return True

    def http(self) -> httpx.Client:
        address = f"https://127.0.0.1:{self.port}"
        return httpx.Client(base_url=address, verify=self.context, timeout=SECONDS, trust_env=False)

    def join(self) -> "Worker":
        key = WorkerKey.create()
        with self.http() as http:
            message = join_message(self.run, self.secret, key)
            joined = _read(Joined, http.post("/v1/join", content=message.model_dump_json()))
        return Worker(self, Signer(self.run, joined.worker, key), joined.token)

    def merged(self) -> list[tuple[str, int, int | None]]:
        """Updates of the run that are in a version: whose, steps, which version."""
        run = CoordinatorFolder(self.folder).open()
        with closing(run.ledger), run.ledger.read() as tx:
            workers = tx.members.workers()
            return [
                (row.worker, row.steps, row.merged_into)
                for worker in workers
                for row in tx.updates.of_worker(worker.id, ("merged",))
            ]


@dataclass(frozen=True)
class Worker:
    """One that opens a new connection for every request."""

    server: Server
    signer: Signer
    token: str

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}"}

    def post(self, path: str, message: Message | None = None) -> httpx.Response:
        with self.server.http() as http:
            body = message.model_dump_json() if message else ""
            return http.post(path, content=body, headers=self.headers)

    def get(self, path: str) -> httpx.Response:
        with self.server.http() as http:
            return http.get(path, headers=self.headers)

    def put(self, name: str, lease: str, data: bytes) -> httpx.Response:
        with self.server.http() as http:
            path = f"/v1/chunks/{name}?lease={lease}"
            return http.put(path, content=data, headers=self.headers)

    def lease(self) -> Lease:
        """Work on block 0; from its own last update on, as soon as that is a version."""
        ends = time.monotonic() + SECONDS
        while time.monotonic() < ends:
            asked = LeaseRequest(blocks=(0,))
            answer = _read(LeaseAnswer, self.post("/v1/lease", asked)).answer
            if isinstance(answer, Lease):
                return answer
            time.sleep(0.05)
        raise AssertionError("no lease")

    def base(self, lease: Lease) -> dict[str, Any]:
        recipe = self.get(f"/v1/blobs/{lease.base.name}").json()["recipe"]
        return decode(b"".join(self.get(f"/v1/chunks/{name}").content for name in recipe["chunks"]))

    def make(self, lease: Lease, by: float = 1.0) -> Made:
        return self.signer.update(lease, moved(self.base(lease), by))

    def offer(self, made: Made) -> UploadState:
        return _read(UploadState, self.post("/v1/updates", made.offer))

    def send_chunks(self, made: Made) -> None:
        for name in self.offer(made).missing:
            answer = self.put(name, made.offer.claim.lease, made.chunks[name])
            assert answer.status_code == 204, answer.text

    def commit(self, made: Made) -> Receipt:
        return _read(Receipt, self.post(f"/v1/updates/{made.offer.claim.lease}/commit"))

    def send(self, made: Made) -> Receipt:
        self.send_chunks(made)
        return self.commit(made)

    def work(self, by: float = 1.0) -> Receipt:
        return self.send(self.make(self.lease(), by))


def _read(kind: type[M], answer: httpx.Response) -> M:
    assert answer.status_code == 200, answer.text
    return kind.model_validate_json(answer.content)


@contextmanager
def made_server(folder: Path, url: str | None = None, **options: Any) -> Iterator[Server]:
    """Of a new run; not started yet."""
    run = make_run(folder, swarm_config(train__steps=1000), url=url, **options)
    with closing(run.ledger), Processes(folder) as processes:
        secret = Operator(run.ledger, run.clock).invite("train", 100, INVITE_SECONDS)
        authority = run.authority
        context = pinned_context(authority.certificate_pem, authority.fingerprint)
        elsewhere = ("--db", url) if url else ()
        yield Server(
            processes, folder, free_port(), run.id, secret, context, authority.fingerprint,
            elsewhere,
        )  # fmt: skip


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with made_server(tmp_path) as server:
        yield server


def test_one_update_sent_over_many_connections_at_once_counts_once(server: Server):
    server.start()
    worker = server.join()
    made = worker.make(worker.lease())

    def send(_: int) -> Receipt:
        for name in worker.offer(made).missing:
            answer = worker.put(name, made.offer.claim.lease, made.chunks[name])
            assert answer.status_code in (204, 409), answer.text  # 409: another had committed
        return worker.commit(made)

    with ThreadPoolExecutor(6) as pool:
        receipts = list(pool.map(send, range(6)))
    assert {receipt.state for receipt in receipts} <= {"pending", "merged"}
    server.processes.wait_for("a merge", lambda: bool(server.merged()), SECONDS)
    assert server.merged() == [(worker.signer.worker, 10, 1)]
    assert worker.commit(made).state == "merged"
    assert worker.lease().base_version == 1


def test_a_coordinator_dies_after_every_request(server: Server):
    """Nothing that was answered is lost, and nothing is bound to the process that answered."""
    running = server.start()

    def again() -> None:
        nonlocal running
        running.kill()
        running = server.start()

    worker = server.join()
    again()
    lease = worker.lease()
    again()
    same = worker.lease()
    assert same == lease.model_copy(update={"seconds_left": same.seconds_left})
    made = worker.make(lease)
    assert worker.offer(made).missing
    again()
    worker.send_chunks(made)
    again()
    assert not worker.offer(made).missing
    assert worker.commit(made).state == "pending"
    again()
    server.processes.wait_for("a merge", lambda: bool(server.merged()), SECONDS)
    again()
    assert worker.commit(made).state == "merged"
    assert server.merged() == [(worker.signer.worker, 10, 1)]


def test_bad_updates_leave_no_trace_in_the_model(server: Server):
    server.start()
    good = server.join()
    for spoilt in (
        {**first_weights(0), "scale": np.asarray(np.nan, np.float32)},
        {**first_weights(0), "body.weight": np.zeros((5, 4), np.float32)},
    ):
        bad = server.join()  # the coordinator pauses a worker whose update it has refused
        receipt = bad.send(bad.signer.update(bad.lease(), spoilt))
        assert (receipt.state, receipt.weight) == ("refused", 0.0)

    bad = server.join()
    lease = bad.lease()
    made = bad.make(lease, by=100.0)
    forged = made.offer.model_copy(update={"signature": good.make(lease).offer.signature})
    assert bad.post("/v1/updates", forged).status_code == 403
    assert bad.offer(made).missing
    ((name, data),) = made.chunks.items()
    assert bad.put(name, lease.lease, bytes(len(data))).status_code == 422
    assert bad.post(f"/v1/updates/{lease.lease}/commit").status_code == 409

    assert good.work(by=1.0).state == "pending"
    server.processes.wait_for("a merge", lambda: bool(server.merged()), SECONDS)
    current = good.base(good.lease())
    assert all(np.array_equal(current[name], tensor) for name, tensor in expected().items())
    assert [worker for worker, _, _ in server.merged()] == [good.signer.worker]


def expected() -> dict[str, Any]:
    return moved(first_weights(0), 1.0)


def stalled(worker: Worker, name: str, lease: str, size: int, most: int) -> Sequence[ssl.SSLSocket]:
    """Connections that have begun to send a chunk and go no further."""
    head = (
        f"PUT /v1/chunks/{name}?lease={lease} HTTP/1.1\r\nhost: x\r\ncontent-length: {size}\r\n"
        f"authorization: Bearer {worker.token}\r\n\r\n"
    )
    lines = []
    for _ in range(most):
        plain = socket.create_connection(("127.0.0.1", worker.server.port), SECONDS)
        line = worker.server.context.wrap_socket(plain)
        line.sendall(head.encode() + b"x")
        lines.append(line)
    return lines


def test_trickling_connections_do_not_delay_others(server: Server):
    server.start()
    slow, quick = server.join(), server.join()
    made = slow.make(slow.lease())
    slow.offer(made)
    ((name, data),) = made.chunks.items()
    with ExitStack() as open_lines:
        lines = stalled(slow, name, made.offer.claim.lease, len(data), MANY)
        for line in lines:
            open_lines.enter_context(closing(line))
        for _ in range(3):
            for line in lines:
                line.sendall(b"x")
            began = time.monotonic()
            assert quick.work().state == "pending"
            assert _read(Status, quick.get("/v1/status")).state == "running"
            assert time.monotonic() - began < QUICK
    slow.send_chunks(made)  # the lines were cut in the middle: nothing of theirs was taken
    assert slow.commit(made).state == "pending"


def test_an_update_for_an_old_version_is_refused_and_its_text_leased_again(server: Server):
    server.start()
    slow, quick = server.join(), server.join()
    lease = slow.lease()
    made = slow.make(lease)
    most_stale = swarm_config().swarm.most_stale
    for version in range(1, most_stale + 2):
        assert quick.work().state == "pending"
        server.processes.wait_for("a merge", lambda v=version: len(server.merged()) == v, SECONDS)
    receipt = slow.send(made)
    assert (receipt.state, receipt.weight) == ("refused", 0.0)
    behind = f"the update is {most_stale + 1} versions behind, more than {most_stale}"
    assert receipt.reason == f"{behind}; request a new lease"
    assert {worker for worker, _, _ in server.merged()} == {quick.signer.worker}
    assert quick.lease().first_batch == lease.first_batch


def test_two_coordinators_race_to_merge_every_version(tmp_path: Path):
    """Both sleep while an update arrives, and wake up together. The block is large enough for the
    second to begin before the first is done."""
    expected_now = {"large": np.zeros(TEN_CHUNKS // 40, np.float32)}
    with ExitStack() as stack:
        weights = [expected_now, first_weights(1)]
        server = stack.enter_context(made_server(tmp_path, weights=weights))
        run = CoordinatorFolder(server.folder).open()
        stack.enter_context(closing(run.ledger))
        racers = [server.start(), replace(server, port=free_port()).start()]
        member = join(Service(run))
        for version in range(1, RACES + 1):
            with run.ledger.write():  # so neither stops in the middle of a transaction
                for racer in racers:
                    racer.freeze()
            member.work(blocks=(0,))
            time.sleep(ROUND_SECONDS)  # the next round of both is due
            for racer in racers:
                racer.thaw()
            server.processes.wait_for(
                "a merge", lambda v=version: len(server.merged()) == v, SECONDS
            )
            expected_now = moved(expected_now, 1.0)
        assert server.merged() == [(member.id, 10, version) for version in range(1, RACES + 1)]
        with run.ledger.read() as tx:
            made = [version.version for version in tx.versions.all() if version.block == 0]
        assert sorted(made) == list(range(RACES + 1))
        assert np.array_equal(weights_now(run, 0)["large"], expected_now["large"])


@pytest.mark.parametrize(("what", "threads"), [("connections", 1), ("coordinator", 4)])
def test_an_upload_cut_at_90_percent_continues_from_there(what: str, threads: int):
    """What was under way is lost, which is a chunk at most for every thread that sends."""
    weights = np.random.default_rng(0).random(TEN_CHUNKS // 4 - 100, np.float32)
    with (
        TemporaryDirectory() as large,  # too much to be left behind
        made_server(Path(large), weights=[{"large": weights}, first_weights(1)]) as server,
    ):
        running = [server.start()]

        def break_more() -> None:
            if what == "coordinator":
                running.pop().kill()
                running.append(server.start())

        proxy = CuttingProxy(server.port, int(0.905 * TEN_CHUNKS), break_more)
        address = (f"https://127.0.0.1:{proxy.port}",)
        invite = Invite(address, server.secret, server.fingerprint, server.run)
        key = WorkerKey.create()
        with closing(proxy), closing(Client(invite, key)) as client:
            joined = client.join("tester", "cpu")
            lease = client.lease(LeaseRequest(blocks=(0,))).answer
            assert isinstance(lease, Lease)
            made = Signer(server.run, joined.worker, key).update(lease, {"large": weights + 1})
            cache = BlobCache(Path(large) / "cache")
            for chunk in made.chunks.values():
                cache.chunks.put(chunk)
            transfer = Transfer(client, cache, threads=threads)
            assert transfer.send(made.offer, client.deadline(SECONDS)).state == "pending"
        under_way = 0.005 * TEN_CHUNKS if threads == 1 else threads * CHUNK_BYTES
        assert proxy.up < 1.005 * TEN_CHUNKS + under_way  # half a percent for TLS
        server.processes.wait_for("a merge", lambda: bool(server.merged()), SECONDS)
        assert server.merged() == [(joined.worker, 10, 1)]


@pytest.mark.skipif(sys.platform != "linux", reason="no process can limit another here")
def test_a_full_disk_is_a_transient_error(server: Server):
    running = server.start()
    worker = server.join()
    made = worker.make(worker.lease())
    worker.offer(made)
    ((name, data),) = made.chunks.items()
    upload = made.offer.claim.lease

    def commit() -> httpx.Response:
        return worker.post(f"/v1/updates/{upload}/commit")

    with full_disk(running):
        told_to_try_again(worker.put(name, upload, data))
        told_to_try_again(worker.post("/v1/lease", LeaseRequest()))
        assert _read(Status, worker.get("/v1/status")).state == "running"
    assert worker.put(name, upload, data).status_code == 204
    with full_disk(running):
        told_to_try_again(commit())
    assert _read(Receipt, commit()).state == "pending"
    server.processes.wait_for("a merge", lambda: bool(server.merged()), SECONDS)
    assert server.merged() == [(worker.signer.worker, 10, 1)]


def told_to_try_again(answer: httpx.Response) -> None:
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1"), answer.text


def test_no_request_fails_for_good_while_the_database_crashes(tmp_path: Path):
    """Many at once, so that some are in the middle of a transaction."""
    with private_server() as database, made_server(tmp_path, database.url) as server:
        server.start()
        workers = [server.join() for _ in range(6)]
        over = threading.Event()

        def keep_asking(worker: Worker) -> "Counter[int]":
            found: Counter[int] = Counter()
            with server.http() as http:
                while not over.is_set():
                    for path in ("/v1/lease", "/v1/status"):
                        method, body = ("POST", "{}") if path == "/v1/lease" else ("GET", None)
                        answer = http.request(method, path, content=body, headers=worker.headers)
                        found[answer.status_code] += 1
            return found

        with ThreadPoolExecutor(len(workers)) as pool:
            asking = [pool.submit(keep_asking, worker) for worker in workers]
            try:
                for _ in range(CRASHES):
                    time.sleep(0.5)
                    database.crash()
                    time.sleep(0.3)
                    database.start()
                time.sleep(0.5)
            finally:
                over.set()
            answers = sum((future.result() for future in asking), Counter[int]())
        assert set(answers) == {200, 503}, answers
        leases = [worker.lease() for worker in workers]
        ranges = {(lease.block, lease.first_batch) for lease in leases}
        assert len(ranges) == len(workers)  # nobody's work was handed out twice
        assert workers[0].work().state == "pending"
