"""What was looked up a moment ago, so that it need not be looked up again: so many, by name."""

import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """May be used from several threads at once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[str, T] = {}
        self._lock = threading.Lock()

    def remember(self, name: str, found: T) -> None:
        with self._lock:
            self._known.pop(name, None)
            self._known[name] = found
            if len(self._known) > self._most:
                del self._known[next(iter(self._known))]

    def get(self, name: str) -> T | None:
        return self._known.get(name)

    def forget(self, name: str) -> T | None:
        """What was known of it."""
        with self._lock:
            return self._known.pop(name, None)
