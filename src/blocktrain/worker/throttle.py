"""A limit on bytes per second that all threads of a worker share, in both directions.

A token bucket: up to `burst` seconds' worth of bytes may pass at once, then they come at the
rate. Waiting happens outside the lock, so that threads wait side by side and in turn.
"""

import threading

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
