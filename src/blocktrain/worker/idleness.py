"""Whether others use this machine: its load without what this process adds to it.

The system's load is an average over about a minute; so the same average is taken of this
process's own processor time, and the difference is what the others ask for.
"""

import math
import os
import time
from collections.abc import Callable

from blocktrain.errors import ConfigError
from blocktrain.worker.clock import Clock

AVERAGED_SECONDS = 60.0
BUSY_SHARE = 0.25  # of the processors, in use by others
LEAST_BUSY = 1.0


class Idleness:
    def __init__(
        self,
        load: Callable[[], float],
        own_seconds: Callable[[], float],
        clock: Clock,
        processors: int,
    ) -> None:
        """`own_seconds`: processor time of this process so far."""
        self._load, self._own_seconds, self._clock = load, own_seconds, clock
        self._limit = max(LEAST_BUSY, BUSY_SHARE * processors)
        self._own = 0.0
        self._mark = (clock.monotonic(), own_seconds())

    def busy(self) -> bool:
        """Whether others ask for so much that this process should stand back."""
        now, used = self._clock.monotonic(), self._own_seconds()
        passed = now - self._mark[0]
        if passed > 0.0:
            rate = (used - self._mark[1]) / passed
            self._own += (rate - self._own) * -math.expm1(-passed / AVERAGED_SECONDS)
            self._mark = (now, used)
        return self._load() - self._own > self._limit


def of_this_machine(clock: Clock) -> Idleness:
    getloadavg = getattr(os, "getloadavg", None)
    if getloadavg is None:
        raise ConfigError("--idle-only is not supported on this system: it tells no load")
    return Idleness(lambda: float(getloadavg()[0]), time.process_time, clock, os.cpu_count() or 1)
