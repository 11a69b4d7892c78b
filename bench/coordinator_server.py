"""A coordinator in a process of its own, for the benches: real server, real ledger, real files.

Not run by itself: `server` starts it. Beside the protocol's routes it has `/bare`, which streams a
file out or in. That shows what the same server does without hashes, checks and counters. There is
no TLS, so that only the project's own work is measured.
"""

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from blocktrain.config import from_dict
from blocktrain.coordinator import client_limits
from blocktrain.coordinator.run import create_run, open_run
from blocktrain.coordinator.server import CoordinatorServer
from blocktrain.coordinator.service import Service
from blocktrain.data.corpus import Corpus
from blocktrain.ledger.ledger import Ledger
from blocktrain.protocol.addresses import bound_socket
from blocktrain.protocol.limited_server import ConnectionLimits
from blocktrain.storage.chunks import LocalChunks
from blocktrain.storage.tensor_file import encode

BATCHES = 50_000_000  # more than any bench hands out
BLOCKS = 4
QUORUM = 32
PIECE_BYTES = 1024 * 1024


class Running(NamedTuple):
    address: str
    run: str
    invite: str
    process: int


def found(folder: Path, db: str, numbers: int, blocks: int = BLOCKS, **swarm: Any) -> None:
    """A run of blocks of so many numbers; `swarm`: settings other than the usual ones."""
    usual = {"quorum": QUORUM, "grace_seconds": 1.0, "first_steps": 1, "most_steps": 1}
    config = from_dict(
        {
            "model": {"layers": blocks, "blocks": blocks, "width": 8, "heads": 1, "window": 8},
            "train": {"steps": BATCHES, "batch": 1},
            "swarm": usual | swarm,
        }
    )
    data = np.zeros(4096, np.uint8)
    corpus = Corpus("made", dict.fromkeys(("train", "valid", "test"), data), {})
    weights = folder / "first.safetensors"
    with weights.open("wb") as file:
        file.writelines(encode({"w": first_numbers(np.random.default_rng(0), numbers)}))
    ledger = Ledger(db)
    chunks = LocalChunks(folder / "chunks")
    create_run(config, corpus, [weights] * blocks, ledger, chunks, time.time())
    ledger.close()


def first_numbers(draws: np.random.Generator, count: int) -> np.ndarray:
    """The next numbers of a block's first version. `draws`: from seed 0."""
    return draws.random(count, np.float32)


def learned(draws: np.random.Generator, count: int) -> np.ndarray:
    """What an update adds to them: noise, no larger than what one step may move."""
    return np.float32(1e-4) * draws.random(count, np.float32)


@contextmanager
def server(folder: Path, db: str) -> Iterator[Running]:
    command = [sys.executable, __file__, str(folder), db]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    told = json.loads(process.stdout.readline())
    try:
        yield Running(f"http://127.0.0.1:{told['port']}", told["run"], told["invite"], process.pid)
    finally:
        process.terminate()
        process.wait(30)


def free_port() -> int:
    with bound_socket("127.0.0.1", 0) as listener:
        port: int = listener.getsockname()[1]
    return port


def most_memory(process: int) -> int:
    """Bytes a process has had in memory at most, by Linux's account."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(kilobytes) * 1024


def _serve(folder: Path, db: str) -> None:
    chunks = LocalChunks(folder / "chunks")
    run = open_run(Ledger(db), chunks, time.time)
    client_limits.JOINS_PER_ADDRESS = client_limits.JOINS_PER_INVITE = (
        1e6,
        1e6,
    )  # one machine acts as many
    service = Service(run)
    listener = bound_socket("127.0.0.1", 0)
    secret = service.operator.invite("train", 1_000_000, 1e6)
    server = CoordinatorServer(service, ConnectionLimits(8192, 8192))
    routes = server.app.router.routes
    routes.append(Route("/bare", _bare_get(folder / "bare"), methods=["GET"]))
    routes.append(Route("/bare", _bare_put(folder / "taken"), methods=["PUT"]))
    told = {"port": listener.getsockname()[1], "run": run.id, "invite": secret}
    print(json.dumps(told), flush=True)
    service.start()
    try:
        server.run(sockets=[listener])
    finally:
        service.stop()


def _bare_get(path: Path):  # type: ignore[no-untyped-def]
    async def pieces() -> AsyncIterator[bytes]:
        with path.open("rb", buffering=0) as file:
            while piece := await run_in_threadpool(file.read, PIECE_BYTES):
                yield piece

    async def get(request: Request) -> Response:
        headers = {"content-length": str(path.stat().st_size)}
        return StreamingResponse(pieces(), headers=headers)

    return get


def _bare_put(folder: Path):  # type: ignore[no-untyped-def]
    """Every body into a file of its own, as a store has to keep it."""
    folder.mkdir(exist_ok=True)
    numbers = itertools.count()

    async def put(request: Request) -> Response:
        with (folder / str(next(numbers))).open("wb", buffering=0) as file:
            async for part in request.stream():
                file.write(part)
            await run_in_threadpool(os.fsync, file.fileno())
        return Response(status_code=204)

    return put


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), sys.argv[2])
