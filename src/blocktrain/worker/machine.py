"""Whether others use this machine: its load without what this process adds to it.

The system's load is an average over about a minute; so the same average is taken of this
process's own processor time, and the difference is what the others ask for.
"""

import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import filelock

from blocktrain.errors import ConfigError, RunError
from blocktrain.protocol.messages import Joined, Role
from blocktrain.storage.blobs import Blobs
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


@contextmanager
def lock_folder(folder: Path, cache: Blobs) -> Iterator[None]:
    """Hold the folder, without what a worker that was killed in it has left half written."""
    try:
        held = filelock.FileLock(folder / ".lock", timeout=0).acquire()
    except filelock.Timeout:
        raise RunError(f"another worker works in {folder}; name another folder") from None
    with held:
        cache.chunks.clear_leftovers(math.inf)
        yield


@dataclass(frozen=True)
class WorkerSettings:
    folder: Path  # for what the worker keeps on disk; one worker at a time
    device: str = "auto"
    blocks: tuple[int, ...] | None = None  # None: any
    memory_bytes: int | None = None  # None: no limit
    max_bandwidth: float | None = None  # bytes per second, both directions together
    until: float | None = None  # seconds since 1970 after which it leaves
    idle_only: bool = False
    data: str | None = None  # where its owner has the run's text, as in data.source
    name: str = field(default_factory=platform.node)

    def is_late(self, now: float) -> bool:
        """Whether the time the owner gave is over."""
        return self.until is not None and now >= self.until


def check_role(joined: Joined, wanted: Role, folder: Path) -> None:
    if joined.role == wanted:
        return
    option = "leave --evaluate out" if joined.role == "train" else "add --evaluate"
    raise ConfigError(
        f"to the run this worker is one to {joined.role}: the invite is for that, or the key in"
        f" {folder} joined for that before; {option}, or {wanted} with an invite made for it"
        " and another --folder"
    )


Kind = Literal[
    "joined",  # the run has a place for this worker
    "other_text",  # the owner's copy is not the run's text, which is fetched
    "corpus",  # the run's text is here
    "astray",  # differences led elsewhere than to their version, which is fetched whole
    "leased",  # a range of batches to train
    "training",  # now and then while it trains
    "trained",  # the lease is done, its update goes up
    "accepted",  # the coordinator has the update
    "refused",  # the coordinator does not want the update
    "scoring",  # versions are fetched and scored
    "diverged",  # a score is not a number, and nothing to report
    "scored",  # the coordinator has their scores
    "lost",  # the lease is no longer ours, its work is dropped
    "returned",  # the lease was given back
    "waiting",  # nothing to do right now
    "paused",  # others use the machine
    "unreachable",  # no coordinator answers; trying again
    "finished",  # the run is over
    "stopped",  # the worker was asked to leave
]


@dataclass(frozen=True)
class WorkerEvent:
    kind: Kind
    text: str
    block: int | None = None
    step: int = 0  # of the lease
    steps: int = 0
    loss: float | None = None
    bytes_per_s: float = 0.0  # of text trained on
    bytes_down: int = 0  # over the network, since the worker started
    bytes_up: int = 0
    contribution: int = 0  # bytes of text in updates that were accepted
    seconds: float = 0.0  # since the worker started
    training_seconds: float = 0.0  # of them spent on steps, whatever became of these
