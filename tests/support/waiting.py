"""Waiting for what another thread or process brings about."""

import time
from collections.abc import Callable


def wait_for(happened: Callable[[], object], seconds: float = 60.0) -> None:
    ends = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < ends, f"it did not happen within {seconds} s"
        time.sleep(0.01)
