"""What tests of the worker share: one run, one key, short timeouts, a server with TLS."""

import hashlib
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import httpx
from tests.support.fault_server import Fault, FaultServer

from blocktrain.config import Config
from blocktrain.data.corpus import Corpus
from blocktrain.protocol.identity import WorkerKey
from blocktrain.protocol.messages import Hello, Joined, RunDescription, Token
from blocktrain.protocol.tls import Authority

RUN, WORKER, SECRET = "run00001", "worker01", "c2VjcmV0"
KEY = WorkerKey.create()


class Eager(Random):
    """Draws a very short pause every time."""

    def uniform(self, a: float, b: float) -> float:
        return a + (b - a) / 100


SHORT_TIMEOUT = httpx.Timeout(1.0)


def described(**changes: object) -> RunDescription:
    fields = {"config": "", "corpus": {}, "corpus_digests": {}, "whole_bytes": 0, **changes}
    return RunDescription(run=RUN, protocol=1, **fields)  # type: ignore[arg-type]


def described_run(server: FaultServer, config: Config, corpus: Corpus) -> RunDescription:
    """A run whose text the server has."""
    splits = {split: data.tobytes() for split, data in corpus.splits.items()}
    return described(
        config=config.to_toml(),
        corpus={split: server.hold(data) for split, data in splits.items()},
        corpus_digests={split: hashlib.sha256(data).hexdigest() for split, data in splits.items()},
    )


def joined(**changes: object) -> Joined:
    fields = {"role": "train", "token_seconds": 100, "description": described(), **changes}
    return Joined(worker=WORKER, token="token1", **fields)  # type: ignore[arg-type]


def answer_joins(server: FaultServer) -> None:
    server.on("GET /v1/hello", lambda body: Hello(run=RUN, protocols=(1,)))
    server.on("POST /v1/join", lambda body: joined())
    server.on("POST /v1/token", lambda body: Token(token="token2", token_seconds=100))


def tls_server(shown: Authority, signer: Authority, folder: Path) -> Iterator[FaultServer]:
    """A server that shows one authority, and has a certificate by the same or another one."""
    issued = signer.issue_server(["elsewhere.example"], time.time())
    folder.mkdir(exist_ok=True)
    (folder / "cert.pem").write_text(issued.cert_pem)
    (folder / "key.pem").write_text(issued.key_pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    server = FaultServer(context)
    server.faults = [
        Fault("GET /v1/ca", status=200, body=shown.certificate_pem.encode(), times=1000)
    ]
    answer_joins(server)
    yield server
    server.close()
