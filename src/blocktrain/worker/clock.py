"""The time as the worker sees it, passed in so that tests can turn it by hand."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time  # seconds since 1970
    sleep: Callable[[float], None] = time.sleep


class LeaseTimer:
    def __init__(self, steps: int, clock: Clock) -> None:
        self.steps, self.steps_done = steps, 0
        self._clock = clock
        self._began: float | None = None
        self.seconds = 0.0  # from the beginning to the last step that is done

    def begin(self) -> None:
        """Training begins now, unless it has: downloads before it do not count."""
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
