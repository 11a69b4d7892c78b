"""A limit on bytes per second that all threads of a worker share, in both directions.

A token bucket: up to `burst` seconds' worth of bytes may pass at once, then they come at the
rate. Waiting happens outside the lock, so that threads wait side by side and in turn.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from blocktrain.worker.clock import Clock

LARGEST_PIECE = 256 * 1024
SMALLEST_PIECE = 1024


class Throttle:
    def __init__(self, bytes_per_second: float | None, clock: Clock, burst: float = 0.25) -> None:
        """No limit where `bytes_per_second` is None."""
        self._rate, self._clock, self._burst = bytes_per_second, clock, burst
        self._lock = threading.Lock()
        self._paid_until = clock.monotonic() - burst

    @property
    def piece(self) -> int:
        """Bytes that are well sent at a time: few enough for an even flow."""
        if self._rate is None:
            return LARGEST_PIECE
        return int(min(LARGEST_PIECE, max(SMALLEST_PIECE, self._rate * self._burst)))

    def take(self, count: int) -> None:
        """Returns once `count` more bytes may pass."""
        if self._rate is None:
            return
        with self._lock:
            now = self._clock.monotonic()
            self._paid_until = max(self._paid_until, now - self._burst) + count / self._rate
            wait = self._paid_until - now
        if wait > 0:
            self._clock.sleep(wait)


class TrafficCounter:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.down = 0
        self.up = 0

    def count(self, *, down: int = 0, up: int = 0) -> None:
        with self._lock:
            self.down += down
            self.up += up


RENEW_SECONDS = 60.0  # a link younger than that was not refused because of its age

Urls = Mapping[str, str] | None


class PresignedUrls:
    def __init__(self, urls: Urls, ask: Callable[[], Urls], clock: Clock) -> None:
        """`ask`: where fresh ones come from."""
        self._urls, self._ask, self._clock = urls or {}, ask, clock
        self._asked_at = clock.monotonic()
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> str | None:
        return self._urls.get(name)

    def renewed(self, name: str, refused: str) -> str | None:
        """Another link for a chunk, in place of one that was refused."""
        with self._lock:
            current = self._urls.get(name)
            if current == refused and self._clock.monotonic() - self._asked_at > RENEW_SECONDS:
                self._urls, self._asked_at = self._ask() or {}, self._clock.monotonic()
                current = self._urls.get(name)
            return None if current == refused else current


POLL_SECONDS = 0.5  # a wait without an end cannot be interrupted on every system

Item = TypeVar("Item")


def run_in_parallel(
    work: Callable[[Item, Callable[[], bool]], None], items: Iterable[Item], threads: int
) -> None:
    """Call `work(item, still_wanted)` for every item; raise what the first failure raised."""
    todo = list(reversed(list(items)))
    members = min(threads, len(todo))
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    stopped = threading.Event()

    def serve() -> None:
        try:
            while not stopped.is_set():
                try:
                    item = todo.pop()
                except IndexError:
                    break
                work(item, lambda: not stopped.is_set())
        except BaseException as error:  # whatever it is, it belongs to the thread that waits
            ended.put(error)
        else:
            ended.put(None)

    try:
        for _ in range(members):
            threading.Thread(target=serve, daemon=True).start()
        for _ in range(members):
            if failure := _next(ended):
                raise failure
    finally:
        stopped.set()


def _next(ended: "queue.SimpleQueue[BaseException | None]") -> BaseException | None:
    while True:
        try:
            return ended.get(timeout=POLL_SECONDS)
        except queue.Empty:
            continue
