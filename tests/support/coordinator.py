"""A real run in a folder, workers that take part in it, and a real server in front of it.

Nothing is trained: a "trained" block is its base plus a number, so that what a merge must give is
known beforehand.
"""

import hashlib
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.support.blobs import whole
from tests.support.web import listening

from blocktrain.config import Config, from_dict
from blocktrain.coordinator.members import Caller
from blocktrain.coordinator.run import Run, create_run, open_run
from blocktrain.coordinator.server import CoordinatorServer
from blocktrain.coordinator.service import Service
from blocktrain.coordinator.updates import expected_size, upload_state
from blocktrain.data.corpus import Corpus
from blocktrain.errors import ProtocolError, RefusedError
from blocktrain.ledger.ledger import Ledger
from blocktrain.protocol.addresses import bound_socket
from blocktrain.protocol.check_messages import (
    Check,
    CheckRequest,
    CheckResult,
    Losses,
    ReplayResult,
    ScoreResult,
    Unable,
)
from blocktrain.protocol.identity import WorkerKey, join_text, update_text
from blocktrain.protocol.limited_server import ConnectionLimits
from blocktrain.protocol.messages import (
    CHUNK_BYTES,
    PROTOCOL,
    Blob,
    Finished,
    Join,
    Joined,
    Lease,
    LeaseAnswer,
    LeaseRequest,
    Receipt,
    Recipe,
    Role,
    UpdateClaim,
    UpdateOffer,
    Wait,
)
from blocktrain.storage.chunks import ChunkStore, LocalChunks, name_of
from blocktrain.storage.tensor_file import decode, encode

Weights = dict[str, npt.NDArray[np.float32]]

INVITE_SECONDS = 1e6
FEW_CONNECTIONS = ConnectionLimits(512, 256)


@dataclass
class SetClock:
    """A clock that stands still until it is moved. It starts now, because files have real ages;
    at a whole second, so that sums are exact."""

    now: float = field(default_factory=lambda: float(int(time.time())))

    def __call__(self) -> float:
        return self.now

    def forward(self, seconds: float) -> None:
        self.now += seconds


def swarm_config(**settings: Any) -> Config:
    """Two blocks of 40 batches of 2 x 8 bytes; a worker whose speed is unknown gets 10 steps, which
    may move weights by 1,000."""
    base = from_dict(
        {
            "model": {"layers": 2, "blocks": 2, "width": 8, "heads": 2, "window": 8},
            "train": {"steps": 40, "batch": 2, "lr": 100.0},
            "swarm": {"quorum": 1, "grace_seconds": 0.0, "keep_updates": 0},
        }
    )
    return base.with_settings(**settings)


def first_weights(block: int) -> Weights:
    draws = np.random.default_rng(block)
    shapes: dict[str, tuple[int, ...]] = {"head.bias": (3,), "body.weight": (4, 5), "scale": ()}
    return {name: draws.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def make_corpus() -> Corpus:
    data = np.arange(4000, dtype=np.uint16).astype(np.uint8)
    splits = {"train": data[:3000], "valid": data[3000:3600], "test": data[3600:]}
    digests = {split: hashlib.sha256(text).hexdigest() for split, text in splits.items()}
    return Corpus("made", splits, digests)


def make_run(
    folder: Path,
    config: Config | None = None,
    *,
    url: str | None = None,
    clock: SetClock | None = None,
    weights: Sequence[Weights] | None = None,
) -> Run:
    """Found a run whose blocks are a few small tensors, and open it."""
    config, clock = config or swarm_config(), clock or SetClock()
    weights = weights or [first_weights(block) for block in range(config.block_count)]
    files = []
    for block, tensors in enumerate(weights):
        files.append(folder / f"block-{block}.safetensors")
        with files[-1].open("wb") as file:
            file.writelines(encode(tensors))
    ledger, chunks = open_stores(folder, url)
    create_run(config, make_corpus(), files, ledger, chunks, clock())
    return open_run(ledger, chunks, clock)


@contextmanager
def running(
    folder: Path,
    clock: SetClock,
    *,
    url: str | None = None,
    weights: Sequence[Weights] | None = None,
    requires_checks: bool = False,
    **settings: Any,
) -> Iterator[Service]:
    """A coordinator of a new run; its rounds are made by hand. Settings as section__key."""
    run = make_run(folder, swarm_config(**settings), url=url, clock=clock, weights=weights)
    try:
        yield Service(run, requires_checks=requires_checks)
    finally:
        run.ledger.close()


def open_stores(folder: Path, url: str | None = None) -> tuple[Ledger, ChunkStore]:
    ledger = Ledger(url or f"sqlite:///{folder / 'ledger.db'}")
    return ledger, LocalChunks(folder / "chunks", sync=False)


def tensors_of(run: Run, blob: Blob) -> Weights:
    return decode(whole(run.blobs, blob))


def weights_now(run: Run, block: int) -> Weights:
    with run.ledger.read() as tx:
        blob = tx.versions.get(block).weights
    return tensors_of(run, blob)


def moved(weights: Weights, by: float) -> Weights:
    """What "training" makes of weights."""
    return {name: np.asarray(tensor + np.float32(by)) for name, tensor in weights.items()}


@dataclass(frozen=True)
class Made:
    """An update before it is sent: its signed offer, and its chunks by name."""

    offer: UpdateOffer
    chunks: dict[str, bytes]


@dataclass(frozen=True)
class Signer:
    """What a worker needs to make updates: who it is, where, and its key."""

    run: str
    worker: str
    key: WorkerKey

    def update(self, lease: Lease, weights: Weights, /, **changes: Any) -> Made:
        """A valid update for a lease; `changes` replace fields of its claim before it is signed."""
        return self.update_of_bytes(lease, b"".join(encode(weights)), **changes)

    def update_of_bytes(self, lease: Lease, data: bytes, /, **changes: Any) -> Made:
        parts = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
        names = [name_of(part) for part in parts]
        claim: dict[str, Any] = {
            "run": self.run,
            "worker": self.worker,
            "lease": lease.lease,
            "fence": lease.fence,
            "block": lease.block,
            "base_version": lease.base_version,
            "codec": "none",
            "recipe": Recipe(size=len(data), chunks=tuple(names)),
            "loss": 1.5,
        }
        signed = UpdateClaim(**{**claim, **changes})
        offer = UpdateOffer(claim=signed, signature=self.key.sign(update_text(signed)))
        return Made(offer, dict(zip(names, parts, strict=True)))


def missing_chunks(service: Service, caller: Caller, offer: UpdateOffer) -> tuple[str, ...]:
    """The chunks that are still to be sent after an offer."""
    if not service.updates.record_offer(caller, offer):
        return ()
    return upload_state(service.run, offer.claim.lease, [offer.claim.recipe]).missing


def put_chunk(service: Service, caller: Caller, lease: str, name: str, data: bytes) -> None:
    """Without a server, and so without `Updates.receive_chunk`."""
    upload = service.updates.find_upload(caller, lease)
    if isinstance(upload, Receipt):
        raise RefusedError("conflict", f"this update is {upload.state} already")
    expected_size(upload, name)  # refuses another chunk
    with service.run.chunks.incoming() as chunk:
        chunk.write(data)
        try:
            chunk.keep(name)
        except ProtocolError as error:
            raise RefusedError("malformed", str(error)) from None


def commit(service: Service, caller: Caller, lease: str) -> Receipt:
    upload = service.updates.find_upload(caller, lease)
    if isinstance(upload, Receipt):
        return upload
    return service.updates.settle(caller, upload, service.updates.verify(upload))


def losses(gain: float, before: float = 2.0, error: float = 0.001) -> Losses:
    return Losses(before=before, after=before - gain, error=error)


@dataclass(frozen=True)
class Member:
    """A worker or validator that calls the coordinator's parts directly."""

    service: Service
    signer: Signer
    joined: Joined

    @property
    def id(self) -> str:
        return self.joined.worker

    @property
    def caller(self) -> Caller:
        return Caller(self.joined.worker, self.joined.role)

    def ask(self, **request: Any) -> LeaseAnswer:
        return self.service.leases.claim(self.caller, LeaseRequest(**request))

    def lease(self, **request: Any) -> Lease:
        answer = self.ask(**request).answer
        assert isinstance(answer, Lease), answer
        return answer

    def request_check(self, **request: Any) -> Check | Wait | Finished:
        answer, _ = self.service.checks.claim(self.caller, CheckRequest(**request))
        return answer.answer

    def check(self, **request: Any) -> Check:
        check = self.request_check(**request)
        assert isinstance(check, Check), check
        return check

    def report(self, check: Check, result: ScoreResult | ReplayResult | Unable) -> None:
        message = CheckResult(result=result, seconds=2.0, device="cpu")
        self.service.checks.report(self.caller, check.check, message)

    def score(self, gain: float = 0.02, own_gain: float = 0.1, **losses_: Any) -> Check:
        """Take a check and report a score."""
        check = self.check()
        hidden, own = losses(gain, **losses_), losses(own_gain, **losses_)
        self.report(check, ScoreResult(hidden=hidden, own=own))
        return check

    def trained(self, lease: Lease, by: float = 1.0) -> Weights:
        return moved(tensors_of(self.service.run, lease.base), by)

    def make(self, lease: Lease, /, by: float = 1.0, **changes: Any) -> Made:
        return self.signer.update(lease, self.trained(lease, by), **changes)

    def send(self, made: Made) -> Receipt:
        """Offer, send what is missing, commit."""
        lease = made.offer.claim.lease
        for name in missing_chunks(self.service, self.caller, made.offer):
            put_chunk(self.service, self.caller, lease, name, made.chunks[name])
        return commit(self.service, self.caller, lease)

    def work(self, by: float = 1.0, **request: Any) -> Lease:
        """A lease from the asking to the receipt."""
        lease = self.lease(**request)
        receipt = self.send(self.make(lease, by))
        assert receipt.state == "pending", receipt
        return lease


def join_message(run: str, secret: str, key: WorkerKey, name: str = "tester") -> Join:
    return Join(
        invite=secret,
        public_key=key.public,
        name=name,
        device="cpu",
        protocols=(PROTOCOL,),
        signature=key.sign(join_text(run, secret)),
    )


def join(
    service: Service, role: Role = "train", name: str = "tester", invite: str | None = None
) -> Member:
    key = WorkerKey.create()
    secret = invite or service.operator.invite(role, 1, INVITE_SECONDS)
    joined = service.members.join(join_message(service.run.id, secret, key, name))
    return Member(service, Signer(service.run.id, joined.worker, key), joined)


def join_proven(service: Service) -> Member:
    """A worker that has completed leases before, so that its claims of speed are believed."""
    member = join(service)
    service.leases.speeds.completed(member.id, steps=1000, seconds=1.0)
    return member


@contextmanager
def served(
    service: Service,
    tls: ssl.SSLContext | None = None,
    limits: ConnectionLimits = FEW_CONNECTIONS,
) -> Iterator[str]:
    """The routes behind a real port of this machine; the address. The rounds are not started:
    a test makes them when it wants one."""
    listener = bound_socket("127.0.0.1", 0)
    server = CoordinatorServer(service, limits, tls)
    server.config.timeout_graceful_shutdown = 1
    with listening(server, listener) as place:
        yield f"{'https' if tls else 'http'}://{place}"
