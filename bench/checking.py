"""Measures what checking costs, as a share of the CPU time of training.

    PYTHONPATH=src:. python bench/checking.py [--config tiny] [--workers 8] [--set SETTING=VALUE]

A run of honest workers and one validator, with the coordinator's own service and the workers' own
code over HTTP in one process, in virtual time (tests/support/stepped_run.py). CPU time is measured
around each lease, the naming of its states, and each check. The first updates of all workers are
replayed more often, so the shares of the first and of the second half of the run are printed too.
"""

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from tests.support.stepped_run import Member, SteppedRun, SteppedWorker

from blocktrain.config import load_config
from blocktrain.data.corpus import load_corpus
from blocktrain.protocol.check_messages import Check
from blocktrain.worker.kept_states import Pace, StateRecorder
from blocktrain.worker.validator import Checker
from quality import provenance

ROOT = Path(__file__).resolve().parent.parent
STEPS_PER_SECOND = 6.0
Seconds = dict[str, float]


class Meter:
    """CPU seconds by kind of work, for each half of the run."""

    def __init__(self) -> None:
        self.halves: list[Seconds] = [defaultdict(float), defaultdict(float)]
        self.counts: list[Seconds] = [defaultdict(float), defaultdict(float)]
        self.half = 0

    def add(self, kind: str, seconds: float) -> None:
        self.halves[self.half][kind] += seconds
        self.counts[self.half][kind] += 1

    def timed(self, owner: type, name: str, kind: Callable[..., str]) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def measured(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            try:
                return original(*args, **kwargs)
            finally:
                self.add(kind(*args), time.process_time() - began)

        setattr(owner, name, measured)


def kind_of(checker: Checker, check: Check, *rest: object) -> str:
    return check.task.method


@contextmanager
def metered() -> Iterator[Meter]:
    meter = Meter()
    meter.timed(SteppedWorker, "train", lambda *args: "training and naming")
    meter.timed(StateRecorder, "_try", lambda *args: "naming")
    meter.timed(Checker, "carry_out", kind_of)
    yield meter


def shares(seconds: Seconds, counts: Seconds) -> str:
    training = seconds["training and naming"] - seconds["naming"]
    parts = [
        f"{kind} {seconds[kind] / training:.1%} ({counts[kind]:.0f})"
        for kind in ("score", "replay", "naming")
    ]
    checks = seconds["score"] + seconds["replay"]
    return f"training {training:.1f} s; {', '.join(parts)}; checks {checks / training:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--config", default="tiny")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--set", action="append", default=[], metavar="SETTING=VALUE")
    args = parser.parse_args()
    fixed = ["train.device=cpu", "train.precision=fp32"]
    config = load_config(ROOT / "configs" / f"{args.config}.toml", [*fixed, *args.set])
    crew = [Member(f"honest-{n}", "honest", STEPS_PER_SECOND) for n in range(args.workers)]
    print(provenance())
    with (
        metered() as meter,
        tempfile.TemporaryDirectory() as folder,
        SteppedRun(
            Path(folder), config, load_corpus(config.data), crew, 0, ("honest",), Pace
        ) as run,
    ):
        half = config.block_count * config.train.steps / 2

        def watch() -> None:
            with run.run.ledger.read() as tx:
                done = sum(state.merged_batches for state in tx.blocks.states())
            meter.half = int(done >= half)

        run.on_event = watch
        run.play()
        with run.run.ledger.read() as tx:
            rows = [row for row in tx.members.workers() if row.role == "train"]
        print(f"finished {run.finished}, {run.seconds:.0f} virtual seconds, CE {run.ce():.4f}")
        accepted, refused, replayed = (
            sum(getattr(row, name) for row in rows) for name in ("accepted", "refused", "replayed")
        )
        print(f"updates {accepted}, failed {refused}, replayed {replayed}")
    for name, seconds, counts in zip(
        ("first half", "second half"), meter.halves, meter.counts, strict=True
    ):
        print(f"{name}: {shares(seconds, counts)}")
    total = [defaultdict(float, {k: a[k] + b[k] for k in {*a, *b}}) for a, b in
             (meter.halves, meter.counts)]  # fmt: skip
    print(f"whole run: {shares(*total)}")


if __name__ == "__main__":
    main()
