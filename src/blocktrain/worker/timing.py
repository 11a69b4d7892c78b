"""Time as a worker sees it: a clock that tests can turn, deadlines, and when to stop."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

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
    """How fast a lease is trained. Downloads before its first step do not count."""

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
