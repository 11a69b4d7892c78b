"""What a worker has to tell whoever watches it. How it is shown is not its business."""

from dataclasses import dataclass
from typing import Literal

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
