"""What workers may do to a coordinator, on purpose or not: it is a process of its own here, with
its rounds and TLS, and goes on serving everybody else."""

import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import pytest
from tests.support.coordinator import (
    INVITE_SECONDS,
    Made,
    Signer,
    first_weights,
    join_message,
    make_run,
    moved,
    swarm_config,
)
from tests.support.processes import Processes, Running, free_port

from blocktrain.coordinator.home import Home
from blocktrain.coordinator.members import Members
from blocktrain.protocol.identity import WorkerKey
from blocktrain.protocol.messages import (
    Joined,
    Lease,
    LeaseAnswer,
    LeaseRequest,
    Message,
    Receipt,
    Status,
    UploadState,
)
from blocktrain.protocol.tensors import decode
from blocktrain.protocol.trust import pinned_context

M = TypeVar("M", bound=Message)

SECONDS = 10.0
QUICK = 3.0  # an answer to somebody who does nothing wrong
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

    def start(self) -> Running:
        running = self.processes.coordinator(self.folder, self.port)
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
        run = Home(self.folder).open()
        with closing(run.ledger), run.ledger.read() as tx:
            workers = tx.workers()
            return [
                (row.worker, row.steps, row.merged_into)
                for worker in workers
                for row in tx.updates_of(worker.id, ("merged",))
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


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    run = make_run(tmp_path, swarm_config(train__steps=1000))
    with closing(run.ledger), Processes(tmp_path) as processes:
        secret = Members(run).invite("train", 100, INVITE_SECONDS)
        authority = run.authority
        context = pinned_context(authority.certificate_pem, authority.fingerprint)
        yield Server(processes, tmp_path, free_port(), run.id, secret, context)


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
    bad, good = server.join(), server.join()
    for spoilt in (
        {**first_weights(0), "scale": np.asarray(np.nan, np.float32)},
        {**first_weights(0), "body.weight": np.zeros((5, 4), np.float32)},
    ):
        receipt = bad.send(bad.signer.update(bad.lease(), spoilt))
        assert (receipt.state, receipt.weight) == ("refused", 0.0)

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


def test_connections_that_trickle_do_not_hold_up_others(server: Server):
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
