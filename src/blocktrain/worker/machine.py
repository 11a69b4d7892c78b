"""The worker's machine: its clock, whether others use it, its folder, what its owner allows."""

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

POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Clock:
    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time  # seconds since 1970
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class Deadline:
    """When to give up: at a time of the monotonic clock, or as soon as `wanted` says no."""

    at: float
    wanted: Callable[[], bool] = lambda: True

    def only_while(self, wanted: Callable[[], bool]) -> "Deadline":
        """The same deadline with a second condition."""
        return Deadline(self.at, lambda: self.wanted() and wanted())


class StopCondition:
    """Whether a worker is to stop: it was asked to, or the time its owner set has passed."""

    def __init__(self, clock: Clock, until: float | None) -> None:
        """`until`: seconds since 1970."""
        self._clock, self._until = clock, until
        self._requested = False
        self._noticed_at: float | None = None
        self.also: Callable[[], bool] = lambda: False  # another source of the request

    def request(self) -> None:
        """May be called by a signal handler or another thread."""
        self._requested = True

    def reached(self) -> bool:
        if not (self._requested or self.also() or self._is_late()):
            return False
        if self._noticed_at is None:
            self._noticed_at = self._clock.monotonic()
        return True

    def reached_for(self, seconds: float) -> bool:
        """Whether it was reached at least this long ago."""
        if not self.reached() or self._noticed_at is None:
            return False
        return self._clock.monotonic() - self._noticed_at >= seconds

    @property
    def reason(self) -> str:
        return "the worker's time is over" if self._is_late() else "the worker was stopped"

    def deadline(self, wanted: Callable[[], bool] = lambda: True) -> Deadline:
        """For requests that are repeated until the worker stops."""
        return Deadline(math.inf, lambda: wanted() and not self.reached())

    def sleep(self, seconds: float, wanted: Callable[[], bool] = lambda: True) -> None:
        ends = self._clock.monotonic() + seconds
        while wanted() and not self.reached():
            left = ends - self._clock.monotonic()
            if left <= 0.0:
                return
            self._clock.sleep(min(left, POLL_SECONDS))

    def _is_late(self) -> bool:
        return self._until is not None and self._clock.wall() >= self._until


class LeaseTimer:
    """Measures the training speed of a lease, from its first step: downloads are not counted."""

    def __init__(self, steps: int, clock: Clock) -> None:
        self.steps, self.steps_done = steps, 0
        self._clock = clock
        self._began: float | None = None
        self.seconds = 0.0  # from the beginning to the last step that is done

    def begin(self) -> None:
        """Training begins now, unless it has begun."""
        if self._began is None:
            self._began = self._clock.monotonic()

    def reached(self, steps_done: int) -> None:
        self.begin()
        assert self._began is not None
        self.steps_done = steps_done
        self.seconds = self._clock.monotonic() - self._began

    @property
    def steps_per_second(self) -> float | None:
        """None before the first step."""
        return self.steps_done / max(self.seconds, 1e-6) if self.steps_done else None

    def ends_within(self, seconds: float) -> bool:
        speed = self.steps_per_second
        return speed is not None and (self.steps - self.steps_done) / speed <= seconds


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
