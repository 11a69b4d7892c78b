"""A WAN for one TCP port, where there are no namespaces: a proxy that delays and rations bytes.

    with TcpLink(port, round_trip_ms=50, mbit=100) as link:
        ...  # talk to 127.0.0.1:link.port instead of 127.0.0.1:port
        link.up.bytes

The rate, each way, is shared by all connections through the link; a new connection costs a round
trip. Bytes arrive as late as they would, but there is no loss, no slow start and no header: wan.py
has the real thing.
"""

import math
import queue
import random
import socket
import threading
import time
from contextlib import suppress
from types import TracebackType

from tests.support.wan_router import Line, Traffic

PIECE = 16 * 1024  # small, so that connections take turns
AHEAD = 0.02  # seconds of bytes taken in before they can leave: a late riser wastes no rate

Parcel = tuple[float, bytes]


class TcpLink:
    def __init__(self, target: int, round_trip_ms: float, mbit: float) -> None:
        self._target, self._one_way = target, round_trip_ms / 2e3
        self._up, self._down = (_SharedLine(self._one_way, mbit * 1e6 / 8) for _ in range(2))
        self._ends: list[socket.socket] = []

    @property
    def up(self) -> Traffic:
        """Towards the target."""
        return self._up.line.traffic

    @property
    def down(self) -> Traffic:
        return self._down.line.traffic

    def __enter__(self) -> "TcpLink":
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(OSError):  # wakes whoever waits in accept
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        assert error or self.up.bytes, "nothing went through this link"

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                self._ends.append(near)
                threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        time.sleep(2 * self._one_way)
        try:
            far = socket.create_connection(("127.0.0.1", self._target))
        except OSError:  # nobody is there
            near.close()
            return
        self._ends.append(far)
        for source, sink, line in ((near, far, self._up), (far, near, self._down)):
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            parcels: queue.SimpleQueue[Parcel] = queue.SimpleQueue()
            threading.Thread(target=_send, args=(source, line, parcels), daemon=True).start()
            threading.Thread(target=_deliver, args=(sink, parcels), daemon=True).start()


class _SharedLine:
    """A line that several threads use in turn."""

    def __init__(self, seconds: float, bytes_per_second: float) -> None:
        self.line = Line(seconds, bytes_per_second, 0.0, math.inf, random.Random(0))
        self._lock = threading.Lock()

    def send(self, piece: bytes) -> float:
        """Wait until a piece has nearly left; when it arrives."""
        with self._lock:
            arrives = self.line.arrival(len(piece), time.monotonic())
        assert arrives is not None, "such a line loses nothing"
        _sleep_until(arrives - self.line.seconds - AHEAD)
        return arrives


def _send(source: socket.socket, line: _SharedLine, parcels: "queue.SimpleQueue[Parcel]") -> None:
    with suppress(OSError):
        while piece := source.recv(PIECE):
            parcels.put((line.send(piece), piece))
    parcels.put((time.monotonic() + line.line.seconds, b""))


def _deliver(sink: socket.socket, parcels: "queue.SimpleQueue[Parcel]") -> None:
    with suppress(OSError):
        while True:
            arrives, piece = parcels.get()
            _sleep_until(arrives)
            if not piece:
                sink.shutdown(socket.SHUT_WR)
                return
            sink.sendall(piece)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))
