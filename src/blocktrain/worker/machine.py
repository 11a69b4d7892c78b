"""A worker's machine: what its owner allows, whether others use it, and the worker's folder."""

import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import filelock

from blocktrain.errors import ConfigError, RunError
from blocktrain.protocol.messages import Joined, Role
from blocktrain.storage.blobs import Blobs
from blocktrain.worker.timing import Clock

AVERAGED_SECONDS = 60.0
BUSY_SHARE = 0.25  # of the processors, in use by others
LEAST_BUSY = 1.0


class Idleness:
    """Whether others use this machine: its load without what this process adds to it.

    The system's load is an average over about a minute, so the same average is taken of this
    process's own processor time; the difference is what the others use.
    """

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
        """Whether others use so much that this process should pause."""
        now, used = self._clock.monotonic(), self._own_seconds()
        passed = now - self._mark[0]
        if passed > 0.0:
            rate = (used - self._mark[1]) / passed
            self._own += (rate - self._own) * -math.expm1(-passed / AVERAGED_SECONDS)
            self._mark = (now, used)
        return self._load() - self._own > self._limit


def idleness_of_this_machine(clock: Clock) -> Idleness:
    getloadavg = getattr(os, "getloadavg", None)
    if getloadavg is None:
        raise ConfigError("--idle-only does not work on this system: it reports no load average")
    return Idleness(lambda: float(getloadavg()[0]), time.process_time, clock, os.cpu_count() or 1)


@contextmanager
def lock_folder(folder: Path, cache: Blobs) -> Iterator[None]:
    """Lock the folder, and delete what a killed worker has left half written in it."""
    try:
        lock = filelock.FileLock(folder / ".lock", timeout=0).acquire()
    except filelock.Timeout:
        raise RunError(f"another worker uses {folder}; choose another --folder") from None
    with lock:
        cache.chunks.clear_leftovers(math.inf)
        yield


@dataclass(frozen=True)
class WorkerSettings:
    folder: Path  # for key, cache and residuals; one worker at a time
    device: str = "auto"
    blocks: tuple[int, ...] | None = None  # None: any
    memory_bytes: int | None = None  # None: no limit
    max_bandwidth: float | None = None  # bytes per second, both directions together
    until: float | None = None  # seconds since 1970 after which it stops
    idle_only: bool = False
    data: str | None = None  # where this machine has the run's text, as in data.source
    name: str = field(default_factory=platform.node)


def check_role(joined: Joined, wanted: Role, folder: Path) -> None:
    if joined.role == wanted:
        return
    option = "drop" if joined.role == "train" else "add"
    activity = {"train": "training", "evaluate": "evaluation"}
    raise ConfigError(
        f"this worker is registered for {activity[joined.role]}, not {activity[wanted]}: {option}"
        f" --evaluate, or use an invite for {activity[wanted]} and another --folder than {folder}"
    )
