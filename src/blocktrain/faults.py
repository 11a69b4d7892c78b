"""Fault injection for tests: a process kills itself at a chosen point.

The environment variable BLOCKTRAIN_FAULTS holds the plan. With "claimed@2=kill,published@1=kill"
this process dies, as by kill -9, the second time it reaches the point `claimed` or the first time
it reaches `published`. Without a plan a point costs nothing.
"""

import os
import re
import signal
import threading
from collections import Counter

from blocktrain.environment import FAULTS
from blocktrain.errors import ConfigError

VARIABLE = FAULTS.name
POINTS = (
    # of a coordinator
    "claimed",  # a lease is on disk; the worker has no answer yet
    "chunk-stored",
    "settled",  # an update is accepted or refused; the worker has no answer yet
    "merge-written",  # the next version's files are written; the version is not published
    "published",
    "check-assigned",  # the validator has no answer yet
    "check-reported",  # the update is decided or needs another check; the validator has no answer
    # of a worker
    "downloaded",  # the base version is complete
    "step",  # one training step is done
    "chunk-sent",
    "sent",  # an update is committed; the worker has not processed the receipt
)


def die() -> None:
    """Exit at once, without flushing or closing anything."""
    if hasattr(signal, "SIGKILL"):
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(137)


def parse(plan: str) -> set[tuple[str, int]]:
    """A plan as pairs: a point, and at which visit to it the process dies (the first is 1)."""
    return {_parse_one(part.strip()) for part in plan.split(",") if part.strip()}


def _parse_one(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"(.*)@([1-9][0-9]*)=(.*)", text)
    if not match:
        raise ConfigError(f"{VARIABLE}: {text!r} is malformed; write POINT@NUMBER=kill")
    point, time, action = match.groups()
    if point not in POINTS:
        raise ConfigError(f"{VARIABLE}: unknown point {point!r}; use one of {', '.join(POINTS)}")
    if action != "kill":
        raise ConfigError(f"{VARIABLE}: unknown action {action!r}; the only one is kill")
    return point, int(time)


class Faults:
    """A plan, and how often this process has reached each point."""

    def __init__(self, plan: str) -> None:
        self._plan = parse(plan)
        self._reached: Counter[str] = Counter()
        self._lock = threading.Lock()

    def reached(self, point: str) -> None:
        """Count a visit to this point, and end the process if the plan says so."""
        if not self._plan:
            return
        with self._lock:
            self._reached[point] += 1
            if (point, self._reached[point]) in self._plan:
                die()


reached = Faults(FAULTS.get()).reached
