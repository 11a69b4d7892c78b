"""How fast a coordinator is: leases and updates a second, each on disk when it is counted.

    PYTHONPATH=src python bench/coordinator.py --out DIR [--db postgresql://...]

Threads, each as many workers in turn, ask for a lease, offer an update of a tiny block, send its
chunk and commit it, against a real server process on the same machine; versions are merged as they
fall due. Writes coordinator.json into DIR, prints a line last.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from blocktrain.config import from_dict
from blocktrain.coordinator.run import found_run, open_run
from blocktrain.coordinator.server import bound_socket, serve
from blocktrain.coordinator.service import Service
from blocktrain.data.corpus import Corpus
from blocktrain.protocol.identity import WorkerKey
from blocktrain.protocol.messages import (
    CHUNK_BYTES,
    PROTOCOL,
    Join,
    Joined,
    Lease,
    LeaseAnswer,
    LeaseRequest,
    Recipe,
    UpdateClaim,
    UpdateOffer,
)
from blocktrain.protocol.tensors import encode
from blocktrain.storage.chunks import LocalChunks, name_of
from blocktrain.storage.ledger import Ledger

BATCHES = 50_000_000  # more than any bench hands out
BLOCKS = 4
QUORUM = 32


def found(folder: Path, db: str, numbers: int) -> None:
    """A run of one block of so many numbers."""
    config = from_dict(
        {
            "model": {"layers": BLOCKS, "blocks": BLOCKS, "width": 8, "heads": 1, "window": 8},
            "train": {"steps": BATCHES, "batch": 1},
            "swarm": {"quorum": QUORUM, "grace_seconds": 1.0, "first_steps": 1, "most_steps": 1},
        }
    )
    data = np.zeros(4096, np.uint8)
    corpus = Corpus("made", dict.fromkeys(("train", "valid", "test"), data), {})
    weights = folder / "first.safetensors"
    with weights.open("wb") as file:
        file.writelines(encode({"w": np.zeros(numbers, np.float32)}))
    ledger = Ledger(db)
    found_run(
        config, corpus, [weights] * BLOCKS, ledger, LocalChunks(folder / "chunks"), time.time()
    )
    ledger.close()


def serve_here(folder: Path, db: str) -> None:
    """The server process: a coordinator, without TLS so that only our own work is measured."""
    run = open_run(Ledger(db), LocalChunks(folder / "chunks"), time.time)
    service = Service(run)
    listener = bound_socket("127.0.0.1", 0)
    secret = service.members.invite("train", 1_000_000, 1e6)
    print(json.dumps({"port": listener.getsockname()[1], "invite": secret}), flush=True)
    serve(service, listener, None)


@contextmanager
def server(folder: Path, db: str) -> Iterator[tuple[str, str, int]]:
    """Address, invite and process id of a coordinator in a process of its own."""
    command = [sys.executable, __file__, "--serve", str(folder), "--db", db]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    told = json.loads(process.stdout.readline())
    try:
        yield f"http://127.0.0.1:{told['port']}", told["invite"], process.pid
    finally:
        process.terminate()
        process.wait(30)


class Worker:
    """The protocol by hand, so that nothing but the coordinator takes time."""

    def __init__(self, http: httpx.Client, run: str, invite: str) -> None:
        self.http = http
        self.key = WorkerKey.create()
        join = Join(
            invite=invite, public_key=self.key.public, name="bench", device="none",
            protocols=(PROTOCOL,), signature=self.key.sign_join(run, invite),
        )  # fmt: skip
        self.headers: dict[str, str] = {}
        self.joined = Joined.model_validate_json(self._post("/v1/join", join.model_dump_json()))
        self.headers = {"authorization": f"Bearer {self.joined.token}"}

    def lease(self) -> Lease | None:
        answer = self._post("/v1/lease", LeaseRequest().model_dump_json())
        found = LeaseAnswer.model_validate_json(answer).answer
        return found if isinstance(found, Lease) else None

    def submit(self, lease: Lease, chunks: dict[str, bytes], recipe: Recipe) -> None:
        claim = UpdateClaim(
            run=self.joined.description.run,
            worker=self.joined.worker,
            lease=lease.lease,
            fence=lease.fence,
            block=lease.block,
            base_version=lease.base_version,
            codec="none",
            recipe=recipe,
        )
        offer = UpdateOffer(claim=claim, signature=self.key.sign_update(claim))
        missing = json.loads(self._post("/v1/updates", offer.model_dump_json()))["missing"]
        for name in missing:
            answer = self.http.put(
                f"/v1/chunks/{name}",
                params={"lease": lease.lease},
                content=chunks[name],
                headers=self.headers,
            )
            answer.raise_for_status()
        self._post(f"/v1/updates/{lease.lease}/commit", "")

    def _post(self, path: str, body: str) -> bytes:
        answer = self.http.post(path, content=body, headers=self.headers)
        answer.raise_for_status()
        return answer.content


def cut(data: bytes) -> tuple[dict[str, bytes], Recipe]:
    parts = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    chunks = {name_of(part): part for part in parts}
    return chunks, Recipe(size=len(data), chunks=tuple(map(name_of, parts)))


def pairs_per_second(
    address: str, invite: str, threads: int, registered: int, seconds: float
) -> float:
    """Lease and submit pairs that so many threads get through, as so many workers in turn."""
    done = [0] * threads
    ready = threading.Barrier(threads + 1)
    ends = 0.0

    def work(index: int) -> None:
        draws = np.random.default_rng(index)
        with httpx.Client(base_url=address, timeout=120) as http:
            run = http.get("/v1/hello").json()["run"]
            crowd = [Worker(http, run, invite) for _ in range(registered // threads)]
            ready.wait()
            ready.wait()
            for worker in itertools.cycle(crowd):
                if time.perf_counter() > ends:
                    return
                lease = worker.lease()
                if lease is None:
                    continue
                update = b"".join(encode({"w": draws.random(16, np.float32)}))
                worker.submit(lease, *cut(update))
                done[index] += 1

    running = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
    for thread in running:
        thread.start()
    ready.wait()
    started = time.perf_counter()
    ends = started + seconds
    ready.wait()
    for thread in running:
        thread.join()
    return sum(done) / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--db", help="default: SQLite in a temporary folder")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--registered", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve_here(args.serve, args.db)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        db = args.db or f"sqlite:///{folder / 'ledger.db'}"
        found(folder, db, 16)
        with server(folder, db) as (address, invite, _):
            rate = pairs_per_second(address, invite, args.threads, args.registered, args.seconds)
    report: dict[str, Any] = {"pairs_per_second": rate, "cpus": os.cpu_count()}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "coordinator.json").write_text(json.dumps(report, indent=1))
    print(f"{rate:.0f} lease and submit pairs a second, {args.threads} threads")


if __name__ == "__main__":
    main()
