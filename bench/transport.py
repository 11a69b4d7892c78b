"""Measures round trips and throughput of a serving connection on one machine, with and without TLS.

    PYTHONPATH=src python bench/transport.py --out DIR [--seconds 2]

Another process answers. A round trip is one message there and back, one at a time. Throughput is of
messages pushed one way, as fast as credit allows, ended by one answer. Writes transport.json into
DIR and prints a table.
"""

import argparse
import asyncio
import json
import multiprocessing
import socket
import ssl
import tempfile
import time
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import numpy as np

from blocktrain.protocol.framing import FrameKind, FrameMessage
from blocktrain.protocol.ring_keys import ROUTER, STAGE, Keyring, client_context, server_context
from blocktrain.serve.ring.connection import RingConnection
from blocktrain.serve.ring.handshake import RingListener, dial
from quality import provenance

SIZES = {"64 B": 64, "4 kB": 4096, "1 MB": 1 << 20}
STAGE_NAME = "stage-1"


async def answer(connection: RingConnection) -> None:
    """A STEP comes back as it is; of PREFILLs only one that asks is answered."""
    while True:
        said = await connection.receive()
        if said.kind is FrameKind.STEP:
            await connection.send(FrameMessage(FrameKind.RESULT, arrays=said.arrays))
        elif said.sequence:
            await connection.send(FrameMessage(FrameKind.RESULT))


def serve(keys: Path, tls: bool, port: Pipe) -> None:
    async def live() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        context = server_context(keys, STAGE_NAME) if tls else None
        hello = {"role": STAGE, "name": STAGE_NAME}
        server = RingListener(
            listener, context, lambda: hello, answer, roles=[ROUTER], check=lambda hello: None
        )
        port.send(listener.getsockname()[1])
        try:
            await asyncio.Event().wait()
        finally:
            await server.close()

    asyncio.run(live())


async def round_trips(connection: RingConnection, size: int, seconds: float) -> float:
    """A second's."""
    message = FrameMessage(FrameKind.STEP, arrays=(np.zeros(size, np.uint8),))
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        await connection.send(message)
        await connection.receive()
        done += 1
    return done / (time.perf_counter() - began)


async def pushed(connection: RingConnection, size: int, seconds: float) -> float:
    """Bytes a second."""
    message = FrameMessage(FrameKind.PREFILL, arrays=(np.zeros(size, np.uint8),))
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        await connection.send(message)
        done += 1
    await connection.send(FrameMessage(FrameKind.PREFILL, sequence=1))
    await connection.receive()
    return done * size / (time.perf_counter() - began)


async def measured(
    port: int, context: ssl.SSLContext | None, seconds: float
) -> list[dict[str, Any]]:
    hello = {"role": ROUTER, "name": "router"}
    connection = await dial(
        f"127.0.0.1:{port}", context, hello, roles=[STAGE], check=lambda hello: None
    )
    rows = []
    for label, size in SIZES.items():
        trips = await round_trips(connection, size, seconds)
        rate = await pushed(connection, size, seconds)
        rows.append({"message": label, "round_trips_per_s": trips, "bytes_per_s": rate})
    connection.close()
    await connection.wait_closed()
    return rows


def measure(keys: Path, tls: bool, seconds: float) -> list[dict[str, Any]]:
    near, far = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(keys, tls, far))
    process.start()
    try:
        context = client_context(keys, "router") if tls else None
        rows = asyncio.run(measured(near.recv(), context, seconds))
    finally:
        process.kill()
        process.join()
    return [{"tls": tls, **row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=2.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keyring = Keyring(Path(folder))
        keyring.add(ROUTER, "router")
        keyring.add(STAGE, STAGE_NAME)
        rows = [row for tls in (False, True) for row in measure(Path(folder), tls, asked.seconds)]
    asked.out.mkdir(parents=True, exist_ok=True)
    result = {**provenance(), "rows": rows}
    (asked.out / "transport.json").write_text(json.dumps(result, indent=1))
    print(f"{'TLS':5s} {'message':8s} {'round trips/s':>14s} {'MB/s one way':>14s}")
    for row in rows:
        trips, rate = row["round_trips_per_s"], row["bytes_per_s"] / 1e6
        print(f"{'yes' if row['tls'] else 'no':5s} {row['message']:8s} {trips:14.0f} {rate:14.1f}")


if __name__ == "__main__":
    main()
