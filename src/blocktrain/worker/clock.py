"""The time as the worker sees it, passed in so that tests can turn it by hand."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time  # seconds since 1970
    sleep: Callable[[float], None] = time.sleep
