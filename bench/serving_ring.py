"""A router and three stages as processes on one device, with TLS, and the memory they use.

Not run by itself. The processes share the device: they take turns on it, so each waits for the
others. Memory is read from outside: the host's from /proc, the device's from nvidia-smi.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx

from blocktrain.protocol.ring_keys import ROUTER, STAGE, Keyring
from serving_limit import ECHO, STAGES, shares

START_SECONDS, POLL_SECONDS, END_SECONDS = 150.0, 0.2, 10.0
ANSWER_SECONDS = 120.0
HOPS = len(STAGES) + 1
PROBE_BYTES = 64 << 20
LOOPBACK_SENT = Path("/sys/class/net/lo/statistics/tx_bytes")
LOG_TAIL = 1500


class ServingRing:
    """`program` takes the arguments of `blocktrain`."""

    def __init__(self, program: Sequence[str], run: Path, folder: Path) -> None:
        self._program, self._run, self._folder = program, run, folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._keys = folder / "keys"
        keyring = Keyring(self._keys)
        keyring.add(ROUTER, ROUTER)
        for name in STAGES:
            keyring.add(STAGE, name)

    def start(self, blocks: int, options: Sequence[str]) -> httpx.Client:
        """All at once; a client of the router when all are there."""
        addresses = [f"127.0.0.1:{free_port()}" for _ in STAGES]
        for name, block, address in zip(STAGES, shares(blocks), addresses, strict=True):
            self._start(name, "stage", "--name", name, "--block", block, "--listen", address,
                        *options)  # fmt: skip
        listen = f"127.0.0.1:{free_port()}"
        self._start(ROUTER, "serve", "--listen", listen, "--stages", ",".join(addresses), *options)
        limits = httpx.Limits(max_connections=None)
        client = httpx.Client(base_url=f"http://{listen}", timeout=ANSWER_SECONDS, limits=limits)
        self._wait(client)
        return client

    def memory(self) -> list[dict[str, Any]]:
        """Of each process, in GB; of the device what the driver counts, its own share included."""
        device = device_memory()
        return [
            {
                "process": name,
                "host_gb": _host_bytes(process.pid) / 1e9,
                "device_gb": device.get(process.pid, float("nan")) / 1e9,
            }
            for name, process in self._processes.items()
        ]

    def stop(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def logs(self) -> str:
        tails = [(path.name, path.read_text(errors="replace")[-LOG_TAIL:])
                 for path in sorted(self._folder.glob("*.log"))]  # fmt: skip
        return "\n".join(f"--- {name}\n{tail}" for name, tail in tails)

    def _start(self, name: str, *arguments: str) -> None:
        verb, *rest = arguments
        command = [*self._program, verb, str(self._run), *rest, "--keys", str(self._keys)]
        threads = str(max(1, (os.cpu_count() or 1) // (HOPS + 1)))
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": threads}
            )

    def _wait(self, client: httpx.Client) -> None:
        ends = time.monotonic() + START_SECONDS
        while not _healthy(client):
            gone = [name for name, each in self._processes.items() if each.poll() is not None]
            if gone or time.monotonic() > ends:
                raise RuntimeError(f"{' and '.join(gone) or 'the ring'} did not start")
            time.sleep(POLL_SECONDS)


@contextmanager
def ring(
    program: Sequence[str], run: Path, blocks: int, folder: Path, options: Sequence[str]
) -> Iterator[tuple[ServingRing, httpx.Client]]:
    """Stopped at the end; when something fails, its logs are printed first."""
    folder.mkdir(parents=True)
    found = ServingRing(program, run, folder)
    try:
        with closing(found.start(blocks, options)) as client:
            yield found, client
    except BaseException:
        print(found.logs(), flush=True)
        raise
    finally:
        found.stop()


def loopback() -> tuple[float, float]:
    """One-way times around the ring, and the rate of a connection in Mbit/s, on this machine."""
    serve = [sys.executable, str(ECHO), "serve", "127.0.0.1"]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        port = server.stdout.readline().strip()
        ask = [sys.executable, str(ECHO), "ask", "127.0.0.1", port, str(PROBE_BYTES)]
        told = json.loads(subprocess.run(ask, capture_output=True, check=True, text=True).stdout)
    return HOPS * min(told["trips_ms"]) / 2e3, told["mbit"]


def free_port() -> int:
    """One that nobody has now; nearly always nobody takes it before it is used."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def loopback_sent() -> int:
    return int(LOOPBACK_SENT.read_text())


def device_memory() -> dict[int, int]:
    """Bytes by process; nothing where nobody tells."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {}
    pairs = [line.split(",") for line in told.splitlines() if line.strip()]
    return {int(pid): int(used) << 20 for pid, used in pairs if used.strip().isdigit()}


def _host_bytes(pid: int) -> int:
    """The most it ever had at once."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def _healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False
