"""A WAN on one machine: hosts that are network namespaces, joined by lines with delay, rate, loss.

    with Wan(["a", "b"], round_trip_ms=50, mbit=100, loss=0.001) as wan:
        server = wan.popen("a", [sys.executable, "serve.py", wan.address("a")])
        client = wan.popen("b", [sys.executable, "ask.py", wan.address("a")])
        ...
        wan.traffic("b").up.bytes  # counted packet by packet

Every host has one line to a router, the same both ways; a packet from a to b goes up a's line and
down b's. `round_trip_ms`, `mbit` and `loss` are those of the whole way between two hosts with such
lines; `lines` gives a host one of its own. TCP in the hosts is the kernel's, by default with its
default congestion control. Hosts reach each other and nothing else. Needs Linux and root: ask
`why_not` first. What still runs in the hosts is killed at the end. Where there are no namespaces,
see tcp_link.py.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.wan_router import Traffic

ROUTER = Path(__file__).with_name("wan_router.py")
LEAST_QUEUE_MS = 100.0
END_SECONDS = 10.0


@dataclass(frozen=True)
class HostLine:
    """The line between a host and the router, each way."""

    one_way_ms: float
    mbit: float
    loss: float = 0.0


@dataclass(frozen=True)
class HostTraffic:
    up: Traffic
    down: Traffic


def why_not() -> str | None:
    """Why no WAN can be made here; None: it can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    for command in ("ip", "nsenter"):
        if not shutil.which(command):
            return f"the command {command} is missing"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return "this machine does not allow network namespaces" if probe.returncode else None


class Wan:
    def __init__(
        self,
        hosts: Sequence[str],
        round_trip_ms: float,
        mbit: float,
        loss: float = 0.0,
        *,
        lines: Mapping[str, HostLine] | None = None,
        queue_ms: float | None = None,
        congestion: str | None = None,
        seed: int = 0,
    ) -> None:
        """`loss`: of packets, each way. `queue_ms`: what a line holds back before it drops; by
        default a round trip's worth, and at least 100 ms. `congestion`: bbr, cubic or reno."""
        own, queue = lines or {}, queue_ms or max(LEAST_QUEUE_MS, round_trip_ms)
        usual = HostLine(round_trip_ms / 4, mbit, 1 - math.sqrt(1 - loss))
        self._addresses = {name: f"10.77.0.{n}" for n, name in enumerate(hosts, start=1)}
        self._asked = {
            "seed": seed,
            "congestion": congestion,
            "hosts": [
                {"name": name, "address": address, "line": _spec(own.get(name, usual), queue)}
                for name, address in self._addresses.items()
            ],
        }
        self._speaking = threading.Lock()

    def __enter__(self) -> "Wan":
        self._router = subprocess.Popen(
            [sys.executable, "-S", str(ROUTER), json.dumps(self._asked)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._namespaces = self._heard()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._router.stdin and self._router.stdout
        self._router.stdin.close()
        self._router.wait(END_SECONDS)
        self._router.stdout.close()

    def address(self, host: str) -> str:
        return self._addresses[host]

    def popen(self, host: str, command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
        """Start a command on a host; options as for subprocess.Popen."""
        place = f"/proc/{self._router.pid}/fd/{self._namespaces[host]}"
        return subprocess.Popen(["nsenter", f"--net={place}", "--", *command], **options)

    def traffic(self, host: str) -> HostTraffic:
        """What went over a host's line since the beginning."""
        assert self._router.stdin
        with self._speaking:
            self._router.stdin.write("traffic\n")
            self._router.stdin.flush()
            told = self._heard()[host]
        return HostTraffic(Traffic(**told["up"]), Traffic(**told["down"]))

    def _heard(self) -> dict[str, Any]:
        assert self._router.stdout
        line = self._router.stdout.readline()
        if not line:
            raise RuntimeError(f"the router ended with {self._router.wait()}: its error is above")
        told: dict[str, Any] = json.loads(line)
        return told


def _spec(line: HostLine, queue_ms: float) -> dict[str, float]:
    return {
        "seconds": line.one_way_ms / 1e3,
        "bytes_per_second": line.mbit * 1e6 / 8,
        "loss": line.loss,
        "queue_seconds": queue_ms / 1e3,
    }
