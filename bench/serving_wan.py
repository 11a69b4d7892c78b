"""Measures a router and three stages on four hosts of an emulated WAN, beside the design's limit.

Not run by itself: it is the part `wan` of bench/serving.py. Hosts are network namespaces
(tests/support/wan.py; Linux and root). The round trip is that between any two hosts. A traversal
goes router, stage, stage, stage, router: four hops of half a round trip each. In the limit
(serving_limit.py) R is measured: for each hop, half the shortest of nine round trips over an open
connection. Memory and arithmetic are measured with one thread, which is what a stage has. Bytes are
those of all packets that left a host.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from tests.support.wan import Wan, why_not

from blocktrain.protocol.ring_keys import ROUTER, STAGE, Keyring
from blocktrain.storage.run_dir import RunDir
from serving_limit import ECHO, STAGES, Hardware, Limit, parameters_of, rated, request, shares

COMMAND = [sys.executable, "-m", "blocktrain.cli.main"]
CLIENT = Path(__file__).with_name("serving_client.py")
PORT, HTTP_PORT = 7101, 8000
START_SECONDS, POLL_SECONDS = 180.0, 0.2
WARM_SECONDS = 10.0  # in which connections learn their lines' speed, by themselves
CPU = ("--device", "cpu", "--precision", "fp32")
# Mode and temperature, and how often it is measured: a sequential answer is many traversals anyway.
ASKED = [
    ("ar", 0.0, 1),
    ("sweep K=1", 0.0, 5),
    ("sweep K=2", 0.0, 5),
    ("sweep K=4", 0.0, 3),
    ("sweep converged", 0.0, 1),
    ("speculative", 0.0, 3),
    ("speculative", 1.0, 3),
]
FIRST = "sweep K=1, first ever"


class Hosts:
    """A served run on a WAN: its processes, and a client beside the router."""

    def __init__(self, wan: Wan, run: Path, blocks: int, folder: Path) -> None:
        self.wan, self._run, self._folder = wan, run, folder
        self.run = RunDir.open(run)
        self._keys = folder / "keys"
        self._blocks = dict(zip(STAGES, shares(blocks), strict=True))
        keyring = Keyring(self._keys)
        keyring.add(ROUTER, ROUTER)
        for name in STAGES:
            keyring.add(STAGE, name)

    def start(self) -> None:
        for name in STAGES:
            where = ["--listen", f"{self.wan.address(name)}:{PORT}", "--block", self._blocks[name]]
            self._start(name, ["stage", self._run, "--name", name, *where])
        addresses = ",".join(f"{self.wan.address(name)}:{PORT}" for name in STAGES)
        listen = f"{self.wan.address(ROUTER)}:{HTTP_PORT}"
        self._start(ROUTER, ["serve", self._run, "--listen", listen, "--stages", addresses])
        self._client = self.wan.popen(
            ROUTER,
            [sys.executable, str(CLIENT), f"http://{listen}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._wait_for_router()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._client.stdin and self._client.stdout
        self._client.stdin.write(json.dumps(request) + "\n")
        self._client.stdin.flush()
        line = self._client.stdout.readline()
        if not line:
            raise RuntimeError(f"no answer:\n{self._log(ROUTER).read_text()[-2000:]}")
        told: dict[str, Any] = json.loads(line)
        return told

    def sent(self) -> int:
        """Bytes of all packets that left a host so far."""
        return sum(self.wan.traffic(host).up.bytes for host in (ROUTER, *STAGES))

    def ring_seconds(self) -> float:
        """One-way times around the ring."""
        ring = (ROUTER, *STAGES, ROUTER)
        return sum(self._round_trip(a, b) / 2 for a, b in pairwise(ring))

    def _round_trip(self, one: str, other: str) -> float:
        address = self.wan.address(other)
        serve = [sys.executable, str(ECHO), "serve", address]
        with self.wan.popen(other, serve, stdout=subprocess.PIPE, text=True) as server:
            port = server.stdout.readline().strip()
            ask = [sys.executable, str(ECHO), "ask", address, port, "1"]
            with self.wan.popen(one, ask, stdout=subprocess.PIPE, text=True) as asking:
                told = json.loads(asking.stdout.readline())
        return float(min(told["trips_ms"])) / 1e3

    def _start(self, host: str, arguments: list[Any]) -> None:
        command = [*COMMAND, *map(str, arguments), "--keys", str(self._keys), *CPU]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self._log(host).open("ab") as file:
            self.wan.popen(host, command, stdout=file, stderr=file, env=environment)

    def _log(self, host: str) -> Path:
        return self._folder / f"{host}.log"

    def _wait_for_router(self) -> None:
        """For its stages it waits by itself."""
        ends = time.monotonic() + START_SECONDS
        while "serving" not in self._log(ROUTER).read_text():
            if time.monotonic() > ends:
                raise RuntimeError(f"no router:\n{self._log(ROUTER).read_text()[-2000:]}")
            time.sleep(POLL_SECONDS)


@contextmanager
def hosts(
    run: Path, blocks: int, folder: Path, round_trip_ms: float, mbit: float
) -> Iterator[Hosts]:
    if reason := why_not():
        sys.exit(f"no WAN can be made here: {reason}")
    folder.mkdir(parents=True)
    with Wan([ROUTER, *STAGES], round_trip_ms, mbit) as wan:
        found = Hosts(wan, run, blocks, folder)
        found.start()
        yield found


def measured(
    hosts: Hosts,
    prompts: Sequence[bytes],
    most_bytes: int,
    round_trip_ms: float,
    mbit: float,
    hardware: Hardware,
) -> list[dict[str, Any]]:
    """Every mode; the very first sweep, on connections that never carried one, beside the rest."""
    ring, parameters = hosts.ring_seconds(), parameters_of(hosts.run)
    bound = Limit(ring, mbit, hardware, 4.0 * parameters, parameters)  # fp32
    texts = [prompt.decode(errors="replace") for prompt in prompts]
    told = []
    hosts.ask(request(texts[0], 1, "ar", 0.0))
    time.sleep(WARM_SECONDS)
    for mode, temperature, times in [(FIRST, 0.0, 1), *ASKED]:
        answers = [
            timed(hosts, request(text, most_bytes, mode, temperature), bound)
            for text in texts[:times]
        ]
        means = {key: median(answer[key] for answer in answers) for key in answers[0]}
        named = {"mode": mode, "temperature": temperature, "answers": len(answers)}
        told.append({**named, "round_trip_ms": round_trip_ms, "ring_seconds": ring, **means})
    return told


def timed(hosts: Hosts, request: dict[str, Any], bound: Limit) -> dict[str, float]:
    before = hosts.sent()
    answer = hosts.ask(request)
    return rated(answer, request["max_tokens"], hosts.sent() - before, bound)
