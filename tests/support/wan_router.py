"""The router of an emulated WAN, as a process of its own: see wan.py, which starts it.

It makes one network namespace per host with a TUN device inside, and carries packets between them:
over the line of the host that sends, then over the line of the host that receives. The namespaces
have no names and live as long as this process, so that nothing is left behind however it ends.
Needs only the standard library. Speaks JSON lines: the namespaces first, then the traffic whenever
it is asked; when its input ends, it ends, and with it whatever still runs in its hosts.
"""

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
DEVICE = "wan0"
TICK = 0.0005  # seconds: packets so close together go at once, so that waking up costs little
BATCH = 64  # packets read from one host before the others have their turn
LARGEST_PACKET = 65536
AHEAD = -10  # niceness: a router is not slowed down by what its hosts compute


@dataclass
class Traffic:
    """Whole packets, as they are on the line."""

    packets: int = 0
    bytes: int = 0
    lost: int = 0  # at random
    overflowed: int = 0  # the queue was full


@dataclass
class Line:
    """One direction of a host's line: first in first out, bounded, lossy. Knows no clock."""

    seconds: float  # from one end to the other
    bytes_per_second: float
    loss: float
    queue_seconds: float  # a packet that would have to wait longer is dropped
    draws: random.Random
    traffic: Traffic = field(default_factory=Traffic)
    _free_at: float = 0.0

    def arrival(self, size: int, now: float) -> float | None:
        """When a packet handed in now comes out at the other end; None: it never does."""
        self.traffic.packets += 1
        self.traffic.bytes += size
        if self.draws.random() < self.loss:
            self.traffic.lost += 1
            return None
        begins = max(now, self._free_at)
        if begins - now > self.queue_seconds:
            self.traffic.overflowed += 1
            return None
        self._free_at = begins + size / self.bytes_per_second
        return self._free_at + self.seconds


@dataclass
class Host:
    name: str
    address: bytes
    namespace: int
    device: int
    up: Line
    down: Line


class Router:
    def __init__(self, hosts: list[Host]) -> None:
        self._hosts = hosts
        self._by_device = {host.device: host for host in hosts}
        self._by_address = {host.address: host for host in hosts}
        self._agenda: list[tuple[float, int, bool, Host, bytes]] = []
        self._packets = 0

    def run(self) -> None:
        """Until nobody listens any more."""
        watched = [sys.stdin.fileno(), *self._by_device]
        while True:
            now = time.monotonic()
            self._carry(now + TICK)
            wait = max(self._agenda[0][0] - now, TICK) if self._agenda else None
            for ready in select.select(watched, [], [], wait)[0]:
                if ready in self._by_device:
                    self._take(self._by_device[ready])
                elif not os.read(ready, LARGEST_PACKET):
                    return
                else:
                    self._tell()

    def _take(self, sender: Host) -> None:
        with suppress(BlockingIOError):
            for _ in range(BATCH):
                packet = os.read(sender.device, LARGEST_PACKET)
                receiver = self._by_address.get(packet[16:20])
                if packet[0] >> 4 != 4 or receiver is None:
                    continue  # neighbours that IPv6 looks for, and such
                self._plan(
                    sender.up.arrival(len(packet), time.monotonic()), False, receiver, packet
                )

    def _carry(self, now: float) -> None:
        while self._agenda and self._agenda[0][0] <= now:
            at, _, delivered, receiver, packet = heapq.heappop(self._agenda)
            if delivered:
                os.write(receiver.device, packet)
            else:
                self._plan(receiver.down.arrival(len(packet), at), True, receiver, packet)

    def _plan(self, at: float | None, delivered: bool, receiver: Host, packet: bytes) -> None:
        if at is not None:
            self._packets += 1  # keeps packets of the same moment in order
            heapq.heappush(self._agenda, (at, self._packets, delivered, receiver, packet))

    def _tell(self) -> None:
        traffic = {
            host.name: {"up": asdict(host.up.traffic), "down": asdict(host.down.traffic)}
            for host in self._hosts
        }
        say(traffic)

    def end_what_runs(self) -> None:
        """Kill every process that is still in one of the namespaces."""
        ours = {os.fstat(host.namespace).st_ino for host in self._hosts}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has just ended
                inside = (process / "ns/net").stat().st_ino in ours
                if inside and int(process.name) != os.getpid():
                    os.kill(int(process.name), signal.SIGKILL)


def make_host(spec: dict[str, Any], congestion: str | None, draws: random.Random) -> Host:
    """A namespace with one device, in which this thread is from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot make a network namespace")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    for command in (
        "link set lo up",
        f"address add {spec['address']}/24 dev {DEVICE}",
        f"link set {DEVICE} up",
    ):
        subprocess.run(["ip", *command.split()], check=True)
    if congestion:
        Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text(congestion)
    address = bytes(map(int, spec["address"].split(".")))
    namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    lines = (Line(**spec["line"], draws=draws) for _ in range(2))
    return Host(spec["name"], address, namespace, device, *lines)


def say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)  # noqa: T201  # this is how it speaks


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started it
    os.nice(AHEAD)
    asked = json.loads(sys.argv[1])
    draws = random.Random(asked["seed"])
    hosts = [make_host(spec, asked["congestion"], draws) for spec in asked["hosts"]]
    say({host.name: host.namespace for host in hosts})
    router = Router(hosts)
    try:
        router.run()
    finally:
        router.end_what_runs()


if __name__ == "__main__":
    main()
