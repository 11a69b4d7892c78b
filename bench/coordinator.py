"""Measures how many leases and updates per second one coordinator serves, each stored on disk.

    PYTHONPATH=src python bench/coordinator.py --out DIR [--history 0 1000000] [--db postgresql://]

A real server process runs on the same machine. Threads act as many workers in turn: each requests a
lease and sends an update of a tiny block in one request. --in-chunks sends an offer, a chunk and a
commit instead, as for larger updates. Versions are merged as usual. --history: how many updates the
ledger holds at the start; every number is a fresh run. A PostgreSQL database must be empty and
takes one history only. Writes coordinator.json into DIR and prints a table.
"""

import argparse
import itertools
import json
import os
import statistics
import tempfile
import threading
import time
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from sqlalchemy import Connection, Engine, Table, insert, text

from blocktrain.ledger.ledger import Ledger
from blocktrain.ledger.schema import WorkerRow, events, leases, updates
from blocktrain.protocol.identity import WorkerKey, join_text, update_text
from blocktrain.protocol.messages import (
    CHUNK_BYTES,
    PROTOCOL,
    Join,
    Joined,
    Lease,
    LeaseAnswer,
    LeaseRequest,
    Receipt,
    Recipe,
    UpdateClaim,
    UpdateOffer,
    whole_update_head,
)
from blocktrain.storage.chunks import LocalChunks, name_of
from blocktrain.storage.tensor_file import encode
from coordinator_server import (
    BLOCKS,
    Running,
    first_numbers,
    found,
    learned,
    most_memory,
    server,
)
from quality import provenance

FILLED_AT_ONCE = 20_000
NUMBERS = 16  # of a block
PAST_WORKER = "pastworker"


class Worker:
    """The protocol by hand, over the standard library's plain connection: what the load itself
    takes of the processors is missing from the coordinator."""

    def __init__(self, http: HTTPConnection, run: str, invite: str, whole: bool) -> None:
        self.http, self.whole = http, whole
        self.key = WorkerKey.create()
        join = Join(
            invite=invite, public_key=self.key.public, name="bench", device="none",
            protocols=(PROTOCOL,), signature=self.key.sign(join_text(run, invite)),
        )  # fmt: skip
        self.headers: dict[str, str] = {}
        self.joined = Joined.model_validate_json(self._post("/v1/join", join.model_dump_json()))
        self.headers = {"authorization": f"Bearer {self.joined.token}"}

    def lease(self) -> Lease | None:
        answer = self._post("/v1/lease", LeaseRequest(steps_per_second=1.0).model_dump_json())
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
        offer = UpdateOffer(claim=claim, signature=self.key.sign(update_text(claim)))
        if self.whole:
            body = whole_update_head(offer) + b"".join(chunks.values())
            _check_accepted(self._ask("POST", "/v1/updates/whole", body))
            return
        missing = json.loads(self._post("/v1/updates", offer.model_dump_json()))["missing"]
        for name in missing:
            self._ask("PUT", f"/v1/chunks/{name}?lease={lease.lease}", chunks[name])
        _check_accepted(self._post(f"/v1/updates/{lease.lease}/commit", ""))

    def _post(self, path: str, body: str) -> bytes:
        return self._ask("POST", path, body.encode())

    def _ask(self, method: str, path: str, body: bytes) -> bytes:
        self.http.request(method, path, body, self.headers)
        answer = self.http.getresponse()
        data = answer.read()
        if answer.status >= HTTPStatus.BAD_REQUEST:
            raise SystemExit(f"{method} {path}: {data.decode()}")
        return data


def _check_accepted(answer: bytes) -> None:
    receipt = Receipt.model_validate_json(answer)
    assert receipt.state != "refused", receipt.reason


def cut(data: bytes) -> tuple[dict[str, bytes], Recipe]:
    parts = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    chunks = {name_of(part): part for part in parts}
    return chunks, Recipe(size=len(data), chunks=tuple(map(name_of, parts)))


def pairs_per_second(
    running: Running, threads: int, registered: int, seconds: float, whole: bool
) -> float:
    """Lease and submit pairs that so many threads get through, as so many workers in turn."""
    done = [0] * threads
    ready = threading.Barrier(threads + 1)
    ends = 0.0

    def work(index: int) -> None:
        draws = np.random.default_rng(index)
        with closing(HTTPConnection(urlsplit(running.address).netloc, timeout=120)) as http:
            share = range(registered // threads)
            crowd = [Worker(http, running.run, running.invite, whole) for _ in share]
            ready.wait()
            ready.wait()
            for worker in itertools.cycle(crowd):
                if time.perf_counter() > ends:
                    return
                lease = worker.lease()
                if lease is None:
                    continue
                first = first_numbers(np.random.default_rng(0), NUMBERS)
                update = b"".join(encode({"w": first + learned(draws, NUMBERS)}))
                worker.submit(lease, *cut(update))
                done[index] += 1

    crew = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
    for thread in crew:
        thread.start()
    ready.wait()
    started = time.perf_counter()
    ends = started + seconds
    ready.wait()
    for thread in crew:
        thread.join()
    return sum(done) / (time.perf_counter() - started)


def fill(db: str, count: int) -> None:
    """A ledger in which so many updates were merged long ago."""
    ledger = Ledger(db)
    with ledger.write() as tx:
        tx.members.add_worker(
            WorkerRow(
                id=PAST_WORKER, public_key="", name="past", device="none", role="train",
                joined=0.0, seen=0.0,
            )
        )  # fmt: skip
    draws = np.random.default_rng(0)
    for start in range(0, count, FILLED_AT_ONCE):
        here = range(start, min(start + FILLED_AT_ONCE, count))
        names = [draws.bytes(16).hex() for _ in here]
        with ledger.engine.begin() as connection:
            _add(connection, leases, [_lease(name, n) for name, n in zip(names, here, strict=True)])
            _add(
                connection, updates, [_update(name, n) for name, n in zip(names, here, strict=True)]
            )
            _add(
                connection, events, [_event(kind) for kind in ("leased", "uploaded") for _ in here]
            )
    if ledger.engine.dialect.name == "postgresql":
        _settle(ledger.engine)
    ledger.close()


def _settle(engine: Engine) -> None:
    """As after so many updates over weeks: what a server does after a bulk load is not measured."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE"))
        connection.execute(text("CHECKPOINT"))


def _add(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> None:
    connection.execute(insert(table), rows)


def _lease(name: str, number: int) -> dict[str, Any]:
    return {
        "id": name, "worker": PAST_WORKER, "block": number % BLOCKS, "base_version": 0,
        "first_batch": number, "steps": 1, "schedule_start": 0, "schedule_stride": 1,
        "fence": number, "deadline": 0.0, "state": "submitted", "created": 0.0,
    }  # fmt: skip


def _update(name: str, number: int) -> dict[str, Any]:
    return {
        "lease": name, "worker": PAST_WORKER, "block": number % BLOCKS, "base_version": 0,
        "steps": 1, "offer": "x" * 500, "signature": "x" * 86, "state": "merged", "reason": "",
        "weight": 1.0, "loss": None, "committed": 0.0, "merged_into": 1,
    }  # fmt: skip


def _event(kind: str) -> dict[str, Any]:
    return {"time": 0.0, "kind": kind, "worker": PAST_WORKER, "block": 0, "detail": "1 steps"}


def measure(args: argparse.Namespace, history: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        db = args.db or f"sqlite:///{folder / 'ledger.db'}"
        found(folder, db, NUMBERS)
        if history:
            fill(db, history)
        sync = seconds_to_keep_a_file(folder)
        with server(folder, db) as running:
            rate = pairs_per_second(
                running, args.threads, args.registered, args.seconds, not args.in_chunks
            )
            memory = most_memory(running.process)
    return {"history": history, "pairs_per_second": rate, "memory": memory, "sync_seconds": sync}


def seconds_to_keep_a_file(folder: Path, count: int = 50) -> float:
    """What the disk takes for a small file that survives a power cut: a pair needs one."""
    chunks, draws = LocalChunks(folder / "probe"), np.random.default_rng(0)
    os.sync()
    taken = []
    for _ in range(count):
        started = time.perf_counter()
        chunks.put(draws.bytes(100))
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--db", help="default: SQLite in a temporary folder")
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--registered", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--in-chunks", action="store_true", help="offer, chunk and commit apart")
    parser.add_argument("--history", type=int, nargs="+", default=[0])
    args = parser.parse_args()
    results = []
    for history in args.history:
        results.append(measure(args, history))
    args.out.mkdir(parents=True, exist_ok=True)
    report = {**provenance(), "cpus": os.cpu_count(), "results": results}
    (args.out / "coordinator.json").write_text(json.dumps(report, indent=1))
    print("| updates before | pairs a second | coordinator memory | disk: ms to keep a file |")
    print("|---|---|---|---|")
    for result in results:
        megabytes = result["memory"] / 1e6
        row = f"| {result['history']:,} | {result['pairs_per_second']:.0f} | {megabytes:.0f} MB |"
        print(f"{row} {result['sync_seconds'] * 1e3:.1f} |")
    print(f"{args.registered} workers, {args.threads} threads, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
