"""A machine's resources, within its owner's limits (time, bandwidth, CPU, folder); and the events
that tell the owner what the worker does."""

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import filelock

from blocktrain.errors import ConfigError, RunError
from blocktrain.protocol.messages import Lease
from blocktrain.storage.blobs import Blobs

LONGEST_WAIT = 60.0  # seconds between two requests for work, whatever the coordinator says
POLL_SECONDS = 0.1
AVERAGED_SECONDS = 60.0
MEASURED_SECONDS = 60.0  # of training, for the speed that a worker claims
BUSY_SHARE = 0.25  # of the CPU cores, used by others
LEAST_BUSY = 1.0
LARGEST_PIECE = 128 * 1024  # bytes sent at a time
SMALLEST_PIECE = 1024


@dataclass(frozen=True)
class Clock:
    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time  # seconds since 1970
    sleep: Callable[[float], None] = time.sleep

    def sleep_while(self, wanted: Callable[[], bool], seconds: float) -> bool:
        """Sleep in short steps. Returns False if `wanted` became false before the time was over."""
        ends = self.monotonic() + seconds
        while wanted():
            left = ends - self.monotonic()
            if left <= 0.0:
                return True
            self.sleep(min(left, POLL_SECONDS))
        return False


@dataclass(frozen=True)
class Deadline:
    """When to give up: at a monotonic time, or as soon as `wanted` returns False."""

    at: float
    wanted: Callable[[], bool] = lambda: True

    def only_while(self, wanted: Callable[[], bool]) -> "Deadline":
        """The same deadline with one more condition."""
        return Deadline(self.at, lambda: self.wanted() and wanted())


# How a worker's work ends. "extended": the run has more steps now, so the worker joins it again.
Outcome = Literal["finished", "stopped", "extended"]


class StopCondition:
    """Whether a worker should stop: on request, or at the time that its owner has set."""

    def __init__(self, clock: Clock, until: float | None) -> None:
        """`until`: seconds since 1970."""
        self._clock, self._until = clock, until
        self._noticed_at = math.inf
        self.is_requested: Callable[[], bool] = lambda: False

    def reached(self) -> bool:
        """Whether the worker should stop now."""
        if not (self.is_requested() or self._is_late()):
            return False
        self._noticed_at = min(self._noticed_at, self._clock.monotonic())
        return True

    def reached_for(self, seconds: float) -> bool:
        """Whether the condition was reached at least this long ago."""
        return self.reached() and self._clock.monotonic() - self._noticed_at >= seconds

    @property
    def reason(self) -> str:
        return "the worker's time is over" if self._is_late() else "the worker was stopped"

    def deadline(self, wanted: Callable[[], bool] = lambda: True) -> Deadline:
        """A deadline for requests that are retried until the worker stops."""
        return Deadline(math.inf, lambda: wanted() and not self.reached())

    def sleep(self, seconds: float, wanted: Callable[[], bool] = lambda: True) -> None:
        self._clock.sleep_while(self.deadline(wanted).wanted, seconds)

    def _is_late(self) -> bool:
        return self._until is not None and self._clock.wall() >= self._until


class LeaseTimer:
    """Measures the training speed of a lease from its first step, without downloads."""

    def __init__(self, steps: int, clock: Clock) -> None:
        self.steps, self.steps_done = steps, 0
        self._clock, self._began = clock, math.inf
        self._marks: deque[tuple[float, int]] = deque()  # time and steps done, of the last minute
        self.seconds = 0.0  # from the start to the end of the last step

    def begin(self) -> None:
        """Start the timer, unless it runs already."""
        self._began = min(self._began, self._clock.monotonic())

    def reached(self, steps_done: int) -> None:
        self.begin()
        now, self.steps_done = self._clock.monotonic(), steps_done
        self.seconds = now - self._began
        self._marks = self._marks or deque([(self._began, 0)])
        self._marks.append((now, steps_done))
        while len(self._marks) > 2 and now - self._marks[1][0] >= MEASURED_SECONDS:
            self._marks.popleft()

    @property
    def steps_per_second(self) -> float | None:
        """The speed of the last minute; None before the first step is done."""
        if not self.steps_done:
            return None
        (began, before), (ended, after) = self._marks[0], self._marks[-1]
        return (after - before) / max(ended - began, 1e-6)

    def ends_within(self, seconds: float) -> bool:
        """Whether the rest of the lease takes at most this long at the measured speed."""
        speed = self.steps_per_second
        return speed is not None and (self.steps - self.steps_done) / speed <= seconds


class Bandwidth:
    """Counts the bytes of all threads in both directions, and limits their rate.

    A token bucket: up to `burst` seconds' worth of bytes may pass at once. Threads wait outside the
    lock, so they wait in parallel.
    """

    def __init__(self, limit: float | None, clock: Clock, burst: float = 0.25) -> None:
        """`limit`: bytes per second."""
        self._limit, self._clock, self._burst = limit, clock, burst
        self._lock = threading.Lock()
        self._paid_until = clock.monotonic() - burst
        self.bytes_down = self.bytes_up = 0

    @property
    def piece(self) -> int:
        """The number of bytes to send at a time for an even flow."""
        if self._limit is None:
            return LARGEST_PIECE
        return int(min(LARGEST_PIECE, max(SMALLEST_PIECE, self._limit * self._burst)))

    def use(self, *, down: int = 0, up: int = 0) -> None:
        """Count these bytes, and return once they may pass."""
        wait = 0.0
        with self._lock:
            self.bytes_down += down
            self.bytes_up += up
            if self._limit is not None:
                now = self._clock.monotonic()
                earliest = max(self._paid_until, now - self._burst)
                self._paid_until = earliest + (down + up) / self._limit
                wait = self._paid_until - now
        if wait > 0:
            self._clock.sleep(wait)


class Idleness:
    """Whether others use this machine: its load minus this process's share.

    The system's load is an average over about a minute, so this process's CPU time is averaged in
    the same way before it is subtracted.
    """

    def __init__(
        self,
        load: Callable[[], float],
        own_seconds: Callable[[], float],
        clock: Clock,
        processors: int,
    ) -> None:
        """`own_seconds`: CPU time of this process so far."""
        self._load, self._own_seconds, self._clock = load, own_seconds, clock
        self._limit = max(LEAST_BUSY, BUSY_SHARE * processors)
        self._own = 0.0
        self._mark = (clock.monotonic(), own_seconds())

    def busy(self) -> bool:
        """Whether others use so much CPU that this process should pause."""
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
        raise ConfigError(
            "--idle-only does not work on this system, which reports no load average; leave it out"
        )
    return Idleness(lambda: float(getloadavg()[0]), time.process_time, clock, os.cpu_count() or 1)


@contextmanager
def lock_folder(folder: Path, cache: Blobs) -> Iterator[None]:
    """Lock the folder, and delete unfinished files of a killed worker."""
    try:
        lock = filelock.FileLock(folder / ".lock", timeout=0).acquire()
    except filelock.Timeout:
        raise RunError(f"another worker uses {folder}; choose another --folder") from None
    with lock:
        cache.chunks.clear_leftovers(math.inf)
        yield


EventKind = Literal[
    "joined",  # the run has registered this worker
    "other_text",  # the owner's copy differs from the run's text, which is downloaded
    "corpus",  # the run's text is on this machine
    "frozen",  # frozen blocks are read from disk, to save memory
    "astray",  # deltas gave wrong weights; the version is downloaded whole
    "leased",  # the worker has a range of batches to train
    "training",  # regularly during training
    "trained",  # the lease is trained, and its update is being sent
    "accepted",  # the coordinator has accepted the update
    "refused",  # the update was refused or could not be sent
    "scoring",  # versions are being downloaded and scored
    "checking",  # an update of another worker is being checked
    "diverged",  # a score is NaN or infinite, and is not sent
    "scored",  # the coordinator has the scores
    "unable",  # a validator cannot score the model
    "lost",  # the lease expired or was revoked; its work is dropped
    "returned",  # the worker gave the lease back
    "waiting",  # nothing to do right now
    "paused",  # others use the machine
    "unreachable",  # no coordinator answers; retrying
    "extended",  # the run was extended, and the worker joins it again
    "finished",  # the run is over
    "stopped",  # the worker was asked to stop
]


@dataclass(frozen=True)
class WorkerEvent:
    kind: EventKind
    text: str
    block: int | None = None
    step: int = 0  # of the lease
    steps: int = 0
    loss: float | None = None
    bytes_per_s: float = 0.0  # of text trained on
    seconds_left: float | None = None  # until the deadline of the lease
    bytes_down: int = 0  # over the network, since the worker started
    bytes_up: int = 0
    contribution: int = 0  # bytes of text in updates that were accepted
    seconds: float = 0.0  # since the worker started
    training_seconds: float = 0.0  # part of `seconds` spent on steps, accepted or not


class EventReporter:
    """Passes events on one at a time, with the totals so far. Thread-safe."""

    def __init__(
        self, on_event: Callable[[WorkerEvent], None], bandwidth: Bandwidth, clock: Clock
    ) -> None:
        self._on_event, self._bandwidth, self._clock = on_event, bandwidth, clock
        self._lock = threading.Lock()
        self._started_at = clock.monotonic()
        self.contribution = 0
        self.training_seconds = 0.0

    def report(self, kind: EventKind, text: str, lease: Lease | None = None, **fields: Any) -> None:
        with self._lock:
            event = WorkerEvent(
                kind,
                text,
                block=lease.block if lease else None,
                steps=lease.steps if lease else 0,
                bytes_down=self._bandwidth.bytes_down,
                bytes_up=self._bandwidth.bytes_up,
                contribution=self.contribution,
                seconds=self._clock.monotonic() - self._started_at,
                training_seconds=self.training_seconds,
                **fields,
            )
            self._on_event(event)
