"""Faults on purpose: die at a chosen point, so that tests can break a process where it hurts most.

The environment variable BLOCKTRAIN_FAULTS holds the plan, as in "claimed@2=kill,published@1=kill":
the second time this process reaches the point `claimed` it dies as by kill -9. Without a plan a
point costs nothing. Knows only the names of the points, not what happens there.
"""

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from blocktrain.environment import FAULTS
from blocktrain.errors import ConfigError

VARIABLE = FAULTS.name
POINTS = (
    # of a coordinator
    "claimed",  # a request for work is decided and on disk, the answer not sent
    "chunk-stored",
    "settled",  # an update is counted or refused, the answer not sent
    "merge-written",  # the next version's files are written, the version is not published
    "published",
    # of a worker
    "downloaded",  # the base is here
    "step",  # one training step is done
    "chunk-sent",
    "sent",  # an update is committed, the worker has not acted on the receipt
)


def _die() -> None:
    """At once: nothing is flushed, closed or given back."""
    if hasattr(signal, "SIGKILL"):
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(137)


ACTIONS: dict[str, Callable[[], None]] = {"kill": _die}


@dataclass(frozen=True)
class Fault:
    point: str
    time: int  # the first is 1
    action: str


def parse(plan: str) -> tuple[Fault, ...]:
    return tuple(_parse_one(part.strip()) for part in plan.split(",") if part.strip())


def _parse_one(text: str) -> Fault:
    place, equals, action = text.partition("=")
    point, at, time = place.partition("@")
    if not (equals and at and time.isascii() and time.isdigit() and int(time) > 0):
        raise ConfigError(f"{VARIABLE}: {text!r} is not POINT@NUMBER=ACTION")
    for kind, word, known in (("point", point, POINTS), ("action", action, tuple(ACTIONS))):
        if word not in known:
            raise ConfigError(f"{VARIABLE}: no {kind} {word!r}; there are {', '.join(known)}")
    return Fault(point, int(time), action)


class Faults:
    """A plan, and how often each of its points was reached."""

    def __init__(self, plan: tuple[Fault, ...]) -> None:
        self._plan = plan
        self._reached: Counter[str] = Counter()
        self._lock = threading.Lock()

    def reached(self, point: str) -> None:
        if not self._plan:
            return
        with self._lock:
            self._reached[point] += 1
            time = self._reached[point]
        for fault in self._plan:
            if (fault.point, fault.time) == (point, time):
                ACTIONS[fault.action]()


reached = Faults(parse(FAULTS.get())).reached
