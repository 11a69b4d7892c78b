"""Trying again: after how long, and until when.

The pause grows with every failure and is drawn between nothing and its full length (full jitter),
so that machines that lost the same coordinator do not all come back at once. Knows no HTTP.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from blocktrain.errors import UnreachableError
from blocktrain.worker.clock import Clock

FIRST_PAUSE = 0.5
LONGEST_PAUSE = 20.0
LONGEST_ASKED_PAUSE = 300.0
SLICE = 0.25  # of a pause, after which it is asked whether the call is still wanted

Result = TypeVar("Result")


class PassingError(UnreachableError):
    """A failure that may pass by itself; `after`: seconds the other side asked to wait."""

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


@dataclass(frozen=True)
class Patience:
    """Until when (on the monotonic clock) calls may go on trying, and what ends them before."""

    until: float
    wanted: Callable[[], bool] = lambda: True

    def also(self, wanted: Callable[[], bool]) -> "Patience":
        """One that ends on this as well."""
        return Patience(self.until, lambda: self.wanted() and wanted())


class Retry:
    def __init__(self, clock: Clock, random: Random) -> None:
        self._clock, self._random = clock, random

    def __call__(
        self,
        attempt: Callable[[], Result],
        patience: Patience,
        at_once: int = 1,
        on_pause: Callable[[PassingError, float], None] = lambda failure, left: None,
    ) -> Result:
        """Repeat an attempt while its failures may pass; every `at_once` of them, pause, and say
        why, and for how many seconds more it will be tried."""
        failures = 0
        while True:
            try:
                return attempt()
            except PassingError as failure:
                failures += 1
                rounds, in_round = divmod(failures, at_once)
                pause = 0.0 if in_round else self._drawn(rounds)
                left = patience.until - self._clock.monotonic()
                if not in_round and left > 0.0:
                    on_pause(failure, left)
                if failure.after is not None:
                    pause += min(failure.after, LONGEST_ASKED_PAUSE)
                    left -= failure.after
                if left <= 0.0 or not self._waited(min(pause, left), patience):
                    raise UnreachableError(str(failure)) from None

    def _drawn(self, rounds: int) -> float:
        return self._random.uniform(0.0, min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(rounds - 1, 16)))

    def _waited(self, seconds: float, patience: Patience) -> bool:
        """False: nobody waits for the result any more."""
        ends = self._clock.monotonic() + seconds
        while patience.wanted():
            left = ends - self._clock.monotonic()
            if left <= 0.0:
                return True
            self._clock.sleep(min(left, SLICE))
        return False
