"""An act that a test has somebody else call: it happens once, and a test that ends without it
fails, because then it has tested nothing."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def once(name: str, act: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """To be called as often as it comes; only the first call does something."""
    left = [act]
    lock = threading.Lock()

    def meddle() -> None:
        with lock:
            acts, left[:] = left[:], []
        for chosen in acts:
            chosen()

    yield meddle
    assert not left, f"{name}: it never happened, so nothing was tested"
