"""Measures a run of 4 honest workers next to hostile clients: its time, memory and disk.

    PYTHONPATH=src:. python bench/hostile_clients.py --out DIR [--scenarios connections hoarders]
        [--rounds 3] [--set SECTION.KEY=VALUE ...]

Coordinator and workers are real processes with TLS; the hostile clients are threads of this one,
from the same address as the workers. They start before the workers and go on until the run ends:

    connections   1,000 connections that say nothing, send half a request or trickle, and are
                  opened again as soon as they are closed
    hoarders      13 keys on one invite that lease all they can, report progress and train nothing
    offers        200 keys on one invite that send 8 MiB as an offer but for its last byte, again
                  and again

The time is that from the first lease of an honest worker to the end of the run, by the ledger.
Scenarios take turns in every round, so that other load on the machine is shared by all. Writes
hostile_clients.json into DIR after every run and prints a table. Linux only.
"""

import argparse
import json
import os
import socket
import sqlite3
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

from blocktrain.errors import BlocktrainError
from blocktrain.protocol.identity import WorkerKey
from blocktrain.protocol.invite import Invite
from blocktrain.protocol.messages import Lease, LeaseProgress, LeaseRequest
from blocktrain.worker.client import Client
from contenders import markdown
from quality import provenance

WORKERS, CONNECTIONS, HOARDERS, OFFERS = 4, 1000, 13, 200
OFFER_BYTES = 8 * 1024 * 1024
COMMAND = (sys.executable, "-m", "blocktrain.cli.main")
SETTINGS = ("train.steps=300", "swarm.lease_seconds=5", "train.device=cpu")
SAMPLE_SECONDS = 0.5
LONGEST_RUN = 1800.0


class Run:
    """A coordinator and honest workers, as processes; what they use is sampled."""

    def __init__(self, folder: Path, settings: list[str]) -> None:
        self.folder, self.data = folder, folder / "data"
        self._settings = settings
        self._processes: list[subprocess.Popen[bytes]] = []
        self.peak_disk = self.peak_memory = 0
        self.finished = threading.Event()

    def __enter__(self) -> "Run":
        overrides = [part for setting in self._settings for part in ("--set", setting)]
        self.coordinator = self._start(
            "coordinator", "--config", "tiny", *overrides, "--data-dir", str(self.data),
            "--listen", "127.0.0.1:0", "--json", "--no-validate",
        )  # fmt: skip
        self.invite = self._first_line("invite")
        threading.Thread(target=self._sample, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.finished.set()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait()

    def new_invite(self, uses: int) -> Invite:
        command = [*COMMAND, "invite", "new", "--data-dir", str(self.data), "--uses", str(uses)]
        made = subprocess.run([*command, "--json"], capture_output=True, check=True)
        return Invite.decode(json.loads(made.stdout)["invite"])

    def train(self) -> None:
        """Start the honest workers, and wait until the run is finished."""
        for number in range(WORKERS):
            folder = str(self.folder / f"worker-{number}")
            self._start("worker", self.invite, "--name", f"honest-{number}", "--folder", folder,
                        "--device", "cpu", "--json")  # fmt: skip
        ends = time.monotonic() + LONGEST_RUN
        while self.seconds() is None:
            if time.monotonic() > ends:
                raise SystemExit(f"the run did not end; its logs are in {self.folder}")
            time.sleep(SAMPLE_SECONDS)

    def seconds(self) -> float | None:
        """From the first lease of an honest worker to the end of the run."""
        query = """SELECT (SELECT finished FROM runs) - MIN(events.time) FROM events
            JOIN workers ON workers.id = events.worker
            WHERE kind = 'leased' AND name LIKE 'honest%'"""
        with closing(sqlite3.connect(self.data / "ledger.db", timeout=30)) as ledger:
            found: float | None = ledger.execute(query).fetchone()[0]
        return found

    def _sample(self) -> None:
        status = Path(f"/proc/{self.coordinator.pid}/status")
        while not self.finished.wait(SAMPLE_SECONDS):
            with suppress(OSError):
                lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
                self.peak_memory = int(lines["VmHWM"].split()[0]) * 1024
            self.peak_disk = max(self.peak_disk, bytes_in(self.data))

    def _start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        name = f"{arguments[0]}-{len(self._processes)}.log"
        with (self.folder / name).open("wb") as log:
            process = subprocess.Popen(
                [*COMMAND, *arguments], stdout=log, stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self._processes.append(process)
        return process

    def _first_line(self, field: str) -> str:
        log, ends = self.folder / "coordinator-0.log", time.monotonic() + 120
        while time.monotonic() < ends and self.coordinator.poll() is None:
            for line in log.read_text().splitlines():
                if line.startswith("{"):
                    text: str = json.loads(line)[field]
                    return text
            time.sleep(0.1)
        raise SystemExit(f"the coordinator does not start: {log.read_text()}")


def bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.stat().st_blocks * 512
    return total


# Hostile clients


def again_and_again(stop: threading.Event, act: Callable[[], None], pause: float) -> None:
    while not stop.is_set():
        with suppress(OSError, BlocktrainError):
            act()
        stop.wait(pause)


def connected(place: tuple[str, int], *, tls: bool) -> socket.socket:
    plain = socket.create_connection(place, timeout=20)
    if not tls:
        return plain
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(plain)


def hold_connection(place: tuple[str, int], kind: int, stop: threading.Event) -> None:
    """Until the coordinator closes it: silent, silent after TLS, half a head, or a slow body."""
    with connected(place, tls=kind > 0) as connection:
        if kind == 2:
            connection.sendall(b"POST /v1/join HTTP/1.1\r\nhost: x\r\n")
        if kind == 3:
            connection.sendall(
                b"POST /v1/join HTTP/1.1\r\nhost: x\r\ncontent-length: 60000\r\n\r\n"
            )
        connection.settimeout(2.0)
        while not stop.is_set():
            with suppress(TimeoutError):
                if not connection.recv(4096):
                    return
            if kind == 3:
                connection.sendall(b" ")


def connections(run: Run, stop: threading.Event) -> None:
    place = place_of(Invite.decode(run.invite))
    for number in range(CONNECTIONS):
        kind = (0, 0, 0, 1, 2, 3)[number % 6]
        start(again_and_again, stop, lambda kind=kind: hold_connection(place, kind, stop), 0.5)


def hoard(invite: Invite, stop: threading.Event, number: int) -> None:
    client = Client(invite, WorkerKey.create(), random=Random(number))
    client.join(f"hoarder-{number}", "cpu")
    lease, done = None, 0

    def act() -> None:
        nonlocal lease, done
        request = LeaseRequest(steps_per_second=1e5, transfer_seconds=1e5, at_once=True)
        answer = client.lease(request).answer
        if isinstance(answer, Lease):
            if lease is None or answer.lease != lease.lease:
                lease, done = answer, 0
            done = min(done + 1, lease.steps - 1)
            progress = LeaseProgress(fence=lease.fence, steps_done=done, loss=1.0)
            client.progress(lease.lease, progress, client.deadline())

    again_and_again(stop, act, 1.0)


def hoarders(run: Run, stop: threading.Event) -> None:
    invite = run.new_invite(HOARDERS)
    for number in range(HOARDERS):
        start(hoard, invite, stop, number)


def offer(invite: Invite, stop: threading.Event, number: int) -> None:
    client = Client(invite, WorkerKey.create(), random=Random(number))
    token = client.join(f"offers-{number}", "cpu").token
    head = (
        f"POST /v1/updates HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\n"
        f"content-length: {OFFER_BYTES}\r\n\r\n"
    ).encode()

    def act() -> None:
        with connected(place_of(invite), tls=True) as connection:
            connection.sendall(head)
            connection.sendall(bytes(OFFER_BYTES - 1).replace(b"\0", b" "))
            while not stop.is_set() and connection.recv(4096):
                pass

    again_and_again(stop, act, 5.0)


def offers(run: Run, stop: threading.Event) -> None:
    invite = run.new_invite(OFFERS)
    for number in range(OFFERS):
        start(offer, invite, stop, number)


def place_of(invite: Invite) -> tuple[str, int]:
    parts = urlsplit(invite.addresses[0])
    return parts.hostname or "", parts.port or 0


def start(work: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=work, args=arguments, daemon=True).start()


SCENARIOS: dict[str, Callable[[Run, threading.Event], None]] = {
    "normal": lambda run, stop: None,
    "connections": connections,
    "hoarders": hoarders,
    "offers": offers,
}


# Measuring


@contextmanager
def attacked(run: Run, scenario: str, seconds: float) -> Iterator[None]:
    """The hostile clients have this long before the honest workers start."""
    stop = threading.Event()
    SCENARIOS[scenario](run, stop)
    time.sleep(seconds)
    try:
        yield
    finally:
        stop.set()


def measure(scenario: str, settings: list[str], lead: float) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory() as folder,
        Run(Path(folder), settings) as run,
        attacked(run, scenario, lead),
    ):
        run.train()
        return {
            "scenario": scenario,
            "seconds": run.seconds(),
            "memory": run.peak_memory,
            "disk": run.peak_disk,
        }


def table(rows: list[dict[str, Any]]) -> list[str]:
    by_scenario = {name: [r for r in rows if r["scenario"] == name] for name in SCENARIOS}
    normal = [row["seconds"] for row in by_scenario["normal"]]
    lines = []
    for name, found in by_scenario.items():
        if found:
            seconds = [row["seconds"] for row in found]
            ratio = statistics.median(seconds) / statistics.median(normal)
            lines.append(
                [name, ", ".join(f"{each:.0f}" for each in seconds), f"{ratio:.2f}"]
                + [f"{max(row[what] for row in found) / 1e6:.0f}" for what in ("memory", "disk")]
            )
    header = (
        "next to 4 honest workers | seconds of each run | median, relative | memory, MB | disk, MB"
    )
    return markdown("Hostile clients", header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--lead", type=float, default=3.0, help="seconds before the workers start")
    parser.add_argument("--set", nargs="+", default=[], metavar="SETTING")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    settings, rows = [*SETTINGS, *args.set], []
    for _ in range(args.rounds):
        for scenario in dict.fromkeys(["normal", *args.scenarios]):
            rows.append(measure(scenario, settings, args.lead))
            print(json.dumps(rows[-1]), flush=True)
            report = {**provenance(), "cores": os.cpu_count(), "settings": settings, "runs": rows}
            (args.out / "hostile_clients.json").write_text(json.dumps(report, indent=1))
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
