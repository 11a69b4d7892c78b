"""Measures what checking costs, as a share of the arithmetic and of the CPU time of training.

    PYTHONPATH=src:. python bench/checking.py [--config tiny] [--workers 8]
        [--steps-per-second 6] [--newcomer-updates 20] [--set SETTING=VALUE]

A run of honest workers and one validator, with the coordinator's own service and the workers' own
code over HTTP in one process, in virtual time (tests/support/stepped_run.py). CPU time is measured
around each lease, the naming of its states, and each check; of tiny models it is mostly that of
starting things. So FLOPs are counted too (config/compute.py): of the steps of leases, of the steps
of replays, and of the forward passes of scores. --newcomer-updates makes workers established after
fewer updates than in a real run, so that a short run shows what checks cost later. The first
updates of all workers are replayed more often, so the shares of each half of the run are printed as
well, and of the part in which no worker was a newcomer.
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

from blocktrain.config import Config, load_config
from blocktrain.config.compute import FROZEN, flops_per_step
from blocktrain.config.sizes import layer_size
from blocktrain.data.corpus import load_corpus
from blocktrain.protocol.check_messages import Check, ReplayCheck
from blocktrain.protocol.messages import Lease
from blocktrain.swarm import reputation
from blocktrain.training.scoring import BlockScorer
from blocktrain.worker.kept_states import Pace, StateRecorder
from blocktrain.worker.validator import Checker
from quality import provenance

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("first half", "second half", "whole run", "without newcomers")
Amounts = dict[str, float]


class Meter:
    """CPU seconds, FLOPs and calls by kind of work, for each part of the run that is `on`."""

    def __init__(self, config: Config) -> None:
        self.config, self.on = config, {"first half", "whole run"}
        self.seconds: dict[str, Amounts] = {part: defaultdict(float) for part in PARTS}
        self.flops: dict[str, Amounts] = {part: defaultdict(float) for part in PARTS}
        self.calls: dict[str, Amounts] = {part: defaultdict(float) for part in PARTS}

    def add(self, kind: str, seconds: float, flops: float) -> None:
        for part in self.on:
            self.seconds[part][kind] += seconds
            self.flops[part][kind] += flops
            self.calls[part][kind] += 1

    def measure(
        self, owner: type, name: str, kind: Callable[..., str], flops: Callable[..., float]
    ) -> None:
        """From now on, measure the calls of a method. `kind` and `flops` get their arguments."""
        original = getattr(owner, name)

        @wraps(original)
        def measured(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            try:
                return original(*args, **kwargs)
            finally:
                self.add(kind(*args), time.process_time() - began, flops(*args))

        setattr(owner, name, measured)

    def shares(self, part: str) -> str:
        seconds, flops, calls = self.seconds[part], self.flops[part], self.calls[part]
        training = seconds["training and naming"] - seconds["naming"]
        if not training:
            return "nothing"
        arithmetic = flops["training and naming"]
        passes, replays = flops["pass"] / arithmetic, flops["replay"] / arithmetic
        times = [
            f"{kind} {seconds[kind] / training:.1%} ({calls[kind]:.0f})"
            for kind in ("score", "replay", "naming")
        ]
        return (
            f"FLOPs: scores {passes:.2%}, replays {replays:.2%}, together {passes + replays:.2%} of"
            f" {arithmetic:.3g}; CPU time: {', '.join(times)} of {training:.1f} s"
        )


def forward_flops(config: Config, block: int, windows: int) -> float:
    """FLOPs of a forward pass: a third of those of training for what is trained, and the same for
    the frozen blocks before."""
    layer, frozen = layer_size(config.model), config.frozen_blocks(block)
    before = sum(config.depths[index] for index in frozen if index < block)
    positions = config.train.batch * config.model.window
    features = FROZEN * before * (layer.parameters + layer.attention) * positions
    step = features + (flops_per_step(config, block) - features) / 3
    return step * windows / config.train.batch


@contextmanager
def metered(config: Config) -> Iterator[Meter]:
    def of_lease(worker: SteppedWorker, lease: Lease) -> float:
        return lease.steps * flops_per_step(config, lease.block)

    def of_check(checker: Checker, check: Check, *rest: object) -> float:
        if not isinstance(check.task, ReplayCheck):
            return 0.0  # its passes are counted one by one
        return check.task.steps * flops_per_step(config, check.block)

    def of_pass(scorer: BlockScorer, weights: object, windows: Any, seed: int) -> float:
        return forward_flops(config, scorer.block, len(windows))

    def method_of(checker: Checker, check: Check, *rest: object) -> str:
        return check.task.method

    meter = Meter(config)
    meter.measure(SteppedWorker, "train", lambda *args: "training and naming", of_lease)
    meter.measure(StateRecorder, "_try", lambda *args: "naming", lambda *args: 0.0)
    meter.measure(Checker, "carry_out", method_of, of_check)
    meter.measure(BlockScorer, "losses", lambda *args: "pass", of_pass)
    yield meter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--config", default="tiny")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--steps-per-second", type=float, default=6.0)
    parser.add_argument("--newcomer-updates", type=int, default=reputation.NEWCOMER_UPDATES)
    parser.add_argument("--set", action="append", default=[], metavar="SETTING=VALUE")
    args = parser.parse_args()
    reputation.NEWCOMER_UPDATES = args.newcomer_updates
    reputation.NEWCOMER_REPLAYS = min(reputation.NEWCOMER_REPLAYS, args.newcomer_updates)
    fixed = ["train.device=cpu", "train.precision=fp32"]
    config = load_config(ROOT / "configs" / f"{args.config}.toml", [*fixed, *args.set])
    crew = [Member(f"honest-{n}", "honest", args.steps_per_second) for n in range(args.workers)]
    print(provenance())
    with (
        metered(config) as meter,
        tempfile.TemporaryDirectory() as folder,
        SteppedRun(
            Path(folder), config, load_corpus(config.data), crew, 0, ("honest",), Pace
        ) as run,
    ):
        half = config.block_count * config.train.steps / 2

        def watch() -> None:
            with run.run.ledger.read() as tx:
                done = sum(state.merged_batches for state in tx.blocks.states())
                rows = [row for row in tx.members.workers() if row.role == "train"]
            meter.on = {"whole run", "first half" if done < half else "second half"}
            if not any(map(reputation.is_newcomer, rows)):
                meter.on.add("without newcomers")

        run.on_event = watch
        run.play()
        with run.run.ledger.read() as tx:
            rows = [row for row in tx.members.workers() if row.role == "train"]
        print(f"finished {run.finished}, {run.seconds:.0f} virtual seconds, CE {run.ce():.4f}")
        accepted, refused, replayed = (
            sum(getattr(row, name) for row in rows) for name in ("accepted", "refused", "replayed")
        )
        print(f"updates {accepted}, failed {refused}, replayed {replayed}")
    for part in PARTS:
        print(f"{part}: {meter.shares(part)}")


if __name__ == "__main__":
    main()
