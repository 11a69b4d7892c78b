"""Measures download and upload of blocks through the protocol, beside bare streams.

    PYTHONPATH=src python bench/transfer.py --out DIR [--megabytes 1000] [--workers 8]

A worker's own client fetches a block and sends an update of it, until it has the receipt. The
baseline is one stream of as many bytes from and to files of the same server process. Then several
workers do both at once, and the coordinator's peak memory is read. Writes transfer.json into DIR
and prints a table.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import numpy as np

from blocktrain.protocol.identity import WorkerKey, update_text
from blocktrain.protocol.invite import Invite
from blocktrain.protocol.messages import Lease, LeaseRequest, UpdateClaim, UpdateOffer
from blocktrain.storage.tensor_file import header_bytes
from blocktrain.worker.client import Client
from blocktrain.worker.transfer import BlobCache, Transfer
from coordinator_server import Running, first_numbers, found, learned, most_memory, server
from quality import provenance

PIECE_BYTES = 1024 * 1024
PATIENCE = 600.0


class Worker:
    """One that has joined, with a cache of its own. An update is the block and some noise."""

    def __init__(self, running: Running, folder: Path, name: int, numbers: int) -> None:
        self.numbers = numbers
        self.key = WorkerKey.create()
        invite = Invite((running.address,), running.invite, None, running.run)
        self.client = Client(invite, self.key)
        self.joined = self.client.join(f"worker {name}", "none")
        self.cache = BlobCache(folder / f"cache-{name}")
        self.transfer = Transfer(self.client, self.cache)
        self.draws = np.random.default_rng(1 + name)
        lease = self.client.lease(LeaseRequest()).answer
        assert isinstance(lease, Lease)
        self.lease = lease

    def download(self) -> None:
        self.transfer.fetch(self.lease.base, self.client.deadline(PATIENCE))

    def make_update(self) -> UpdateOffer:
        """The block's numbers with noise, in the cache, as if it had been trained."""
        blob = self.cache.write(self._parts())
        claim = UpdateClaim(
            run=self.joined.description.run,
            worker=self.joined.worker,
            lease=self.lease.lease,
            fence=self.lease.fence,
            block=self.lease.block,
            base_version=self.lease.base_version,
            codec="none",
            recipe=self.cache.recipe(blob.name),
        )
        return UpdateOffer(claim=claim, signature=self.key.sign(update_text(claim)))

    def upload(self, offer: UpdateOffer) -> None:
        receipt = self.transfer.send(offer, self.client.deadline(PATIENCE))
        assert receipt.state in ("pending", "merged"), receipt

    def wait_for_merge(self) -> None:
        """The coordinator is at rest again."""
        while any(block.pending_updates for block in self.client.status().blocks):
            time.sleep(0.1)

    def forget(self) -> None:
        self.transfer.cache.keep_only([])

    def _parts(self) -> Iterator[bytes]:
        yield header_bytes([("w", "F32", (self.numbers,))])
        first = np.random.default_rng(0)
        for start in range(0, self.numbers, PIECE_BYTES):
            count = min(PIECE_BYTES, self.numbers - start)
            yield (first_numbers(first, count) + learned(self.draws, count)).tobytes()


def seconds(call: Callable[[], object]) -> float:
    os.sync()  # what others left to be written is not this one's time
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def bare_get(address: str, path: Path) -> None:
    with httpx.stream("GET", f"{address}/bare", timeout=120) as answer, path.open("wb") as file:
        for piece in answer.iter_raw():
            file.write(piece)


def bare_put(address: str, path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        with path.open("rb", buffering=0) as file:
            while piece := file.read(PIECE_BYTES):
                yield piece

    headers = {"content-length": str(path.stat().st_size)}
    answer = httpx.put(f"{address}/bare", content=pieces(), headers=headers, timeout=120)
    answer.raise_for_status()


def side_by_side(
    running: Running, folder: Path, rounds: int, numbers: int
) -> dict[str, list[float]]:
    """Seconds of every direction, ours and bare in turn; who goes first changes, because a disk
    that was just written to is slower."""
    taken: dict[str, list[float]] = {"download": [], "upload": [], "bare get": [], "bare put": []}
    for number in range(rounds):
        worker = Worker(running, folder, number, numbers)
        down = [
            ("bare get", partial(bare_get, running.address, folder / "received")),
            ("download", worker.download),
        ]
        for name, call in down[:: 1 if number % 2 else -1]:
            taken[name].append(seconds(call))
        offer = worker.make_update()
        up = [
            ("bare put", partial(bare_put, running.address, folder / "received")),
            ("upload", partial(worker.upload, offer)),
        ]
        for name, call in up[:: 1 if number % 2 else -1]:
            taken[name].append(seconds(call))
            worker.wait_for_merge()
        worker.forget()
    return taken


def all_at_once(running: Running, folder: Path, count: int, numbers: int) -> float:
    """Seconds in which so many workers each fetch a block and send an update."""
    workers = [Worker(running, folder, 1000 + number, numbers) for number in range(count)]

    def work(worker: Worker) -> None:
        worker.download()
        offer = worker.make_update()
        worker.upload(offer)
        worker.forget()

    with ThreadPoolExecutor(count) as pool:
        started = time.perf_counter()
        list(pool.map(work, workers))
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--scratch", type=Path, help="where there is room for 30 blocks")
    args = parser.parse_args()
    size = args.megabytes * 1_000_000
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        folder = Path(scratch)
        db = f"sqlite:///{folder / 'ledger.db'}"
        found(folder, db, size // 4)
        shutil.move(folder / "first.safetensors", folder / "bare")
        with server(folder, db) as running:
            taken = side_by_side(running, folder, args.rounds, size // 4)
            alone = most_memory(running.process)
            together = all_at_once(running, folder, args.workers, size // 4)
            memory = most_memory(running.process)
    report = {
        **provenance(), "cpus": os.cpu_count(), "bytes": size, "seconds": taken,
        "memory_one_worker": alone, "workers": args.workers, "seconds_all": together,
        "memory_all": memory,
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "transfer.json").write_text(json.dumps(report, indent=1))
    print(f"| {args.megabytes} MB | protocol, MB/s | bare, MB/s | ratio, median of pairs |")
    print("|---|---|---|---|")
    for ours, bare in (("download", "bare get"), ("upload", "bare put")):
        rates = [statistics.median(size / 1e6 / s for s in taken[name]) for name in (ours, bare)]
        ratio = statistics.median(b / o for o, b in zip(taken[ours], taken[bare], strict=True))
        print(f"| {ours} | {rates[0]:.0f} | {rates[1]:.0f} | {ratio:.2f} |")
    moved = 2 * args.workers * size / 1e6 / together
    print(f"scratch on {args.scratch or tempfile.gettempdir()}")
    print(
        f"coordinator memory at its peak: one worker {alone / 1e6:.0f} MB,"
        f" {args.workers} workers at once {memory / 1e6:.0f} MB ({moved:.0f} MB/s in all)"
    )


if __name__ == "__main__":
    main()
