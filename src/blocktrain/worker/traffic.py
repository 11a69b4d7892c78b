"""Bytes that went over the network, counted by all threads together."""

import threading


class Traffic:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.down = 0
        self.up = 0

    def count(self, *, down: int = 0, up: int = 0) -> None:
        with self._lock:
            self.down += down
            self.up += up
