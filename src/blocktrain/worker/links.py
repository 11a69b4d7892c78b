"""Addresses where a store gives or takes chunks itself, and which run out after a while.

A link that is refused is asked for anew, once in a while. Knows no HTTP.
"""

import threading
from collections.abc import Callable, Mapping

from blocktrain.worker.clock import Clock

RENEW_SECONDS = 60.0  # a link younger than that was not refused because of its age

Urls = Mapping[str, str] | None


class Links:
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
