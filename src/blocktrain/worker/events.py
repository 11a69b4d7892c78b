"""What a worker tells its user while it works: events, for a display or as JSON lines."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from blocktrain.protocol.messages import Lease
from blocktrain.worker.timing import Clock
from blocktrain.worker.transfer import Bandwidth

EventKind = Literal[
    "joined",  # the run has registered this worker
    "other_text",  # the owner's copy is not the run's text, which is fetched
    "corpus",  # the run's text is here
    "astray",  # deltas did not lead to their version, which is fetched whole
    "leased",  # a range of batches to train
    "training",  # regularly while it trains
    "trained",  # the lease is done, its update is being sent
    "accepted",  # the coordinator has the update
    "refused",  # the update was refused or could not be sent
    "scoring",  # versions are fetched and scored
    "diverged",  # a score is NaN or infinite, and is not reported
    "scored",  # the coordinator has the scores
    "lost",  # the lease expired or was revoked, its work is dropped
    "returned",  # the lease was given back
    "waiting",  # nothing to do right now
    "paused",  # others use the machine
    "unreachable",  # no coordinator answers; retrying
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
    bytes_down: int = 0  # over the network, since the worker started
    bytes_up: int = 0
    contribution: int = 0  # bytes of text in updates that were accepted
    seconds: float = 0.0  # since the worker started
    training_seconds: float = 0.0  # of them spent on steps, whatever became of these


class EventReporter:
    """Hands events on, one at a time, with the totals so far. For several threads."""

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
