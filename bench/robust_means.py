"""Compares means of the updates of one block that 4 or 6 workers share: final CE, and the cost.

    PYTHONPATH=src:. python bench/robust_means.py --out FILE [--rules mean reweighted centred]
        [--plans honest sign-flip] [--seeds 0 1 2] [--workers 4] [--codec int8] [--steps 240]

A run per cell in virtual time (tests/support/stepped_run.py), without validators, so that nothing
but bounds, clipping and the mean stands between a hostile worker and the block. One of 4 workers is
hostile, or two of 6. `mean-unclipped` is the mean without clipping. `--cost` measures one frame.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tests.support.attacks import PLANS
from tests.support.stepped_run import Member, SteppedRun

from blocktrain.codec.frames import FRAME_NUMBERS
from blocktrain.config import SwarmConfig, load_config
from blocktrain.coordinator import merger
from blocktrain.data.corpus import load_corpus
from blocktrain.numerics import Doubles, Floats
from blocktrain.numerics.merge import Contribution, MergeRule, WeightedSum
from blocktrain.swarm import merging_rules
from quality import provenance

ROOT = Path(__file__).resolve().parent.parent
SPEEDS = (6.1, 5.9, 6.0, 5.7, 6.3, 5.8)  # steps per second
RULES = ("mean", "mean-unclipped", "reweighted", "centred", "trimmed", "median")
FEWEST, ROUNDS, SAMPLED = 3, 3, 8
SMALL = {
    "model__width": 32, "model__heads": 2, "model__window": 32, "model__layers": 2,
    "model__blocks": 1, "train__device": "cpu", "train__precision": "fp32",
    "swarm__first_steps": 6, "swarm__most_steps": 6,
}  # fmt: skip


@dataclass(frozen=True)
class RobustMean(MergeRule):
    name: str = "mean"

    def total(
        self, current: Floats, updates: Iterable[Contribution], before: WeightedSum | None = None
    ) -> WeightedSum:
        updates = sorted(updates, key=lambda update: update.id)
        if self.name.startswith("mean") or len(updates) < FEWEST:
            return super().total(current, updates, before)
        weights = np.array([update.weight for update in updates])
        if self.name == "reweighted":
            scaled = self._reweighted(current, updates, weights)
            return super().total(current, scaled, before)
        ends = np.stack([np.asarray(update.end(current), np.float64) for update in updates])
        whole = float(weights.sum())
        return WeightedSum(whole * self._centre(ends, weights), whole)

    def _reweighted(
        self, current: Floats, updates: list[Contribution], weights: Doubles
    ) -> list[Contribution]:
        """Centred clipping from the mean: only weights change, which follow from the products of
        all pairs of updates, over one number in SAMPLED."""
        changes = [update.end(current)[::SAMPLED] - current[::SAMPLED] for update in updates]
        rows = np.stack(changes).astype(np.float32)
        products, usual = (rows @ rows.T).astype(np.float64), weights / weights.sum()
        centre, limit = usual, None
        for _ in range(ROUNDS):
            squares = np.diag(products) - 2 * products @ centre + centre @ products @ centre
            sizes = np.sqrt(np.maximum(squares, 0.0))
            limit = np.median(sizes) if limit is None else limit
            pulls = usual * np.minimum(1.0, limit / np.maximum(sizes, 1e-30))
            centre = (1 - pulls.sum()) * centre + pulls
        return [
            replace(update, weight=float(weight))
            for update, weight in zip(updates, weights.sum() * centre, strict=True)
        ]

    def _centre(self, ends: Doubles, weights: Doubles) -> Doubles:
        if self.name == "trimmed":  # without the smallest and the largest
            order, kept = np.argsort(ends, axis=0), np.repeat(weights[:, None], ends.shape[1], 1)
            for extreme in (order[0], order[-1]):
                np.put_along_axis(kept, extreme[None], 0.0, axis=0)
            return (ends * kept).sum(0) / kept.sum(0)
        centre = np.median(ends, axis=0)
        if self.name == "median":
            return centre
        limit = None
        for _ in range(ROUNDS):  # centred clipping
            away = ends - centre
            sizes = np.linalg.norm(away, axis=1)
            limit = np.median(sizes) if limit is None else limit
            factors = np.minimum(1.0, limit / np.maximum(sizes, 1e-30))
            centre = centre + (weights * factors / weights.sum()) @ away
        return centre


def use(name: str) -> None:
    """Let coordinators of this process merge by a rule."""

    def rule(swarm: SwarmConfig) -> MergeRule:
        return RobustMean(swarm.outer_rate, swarm.outer_momentum, name)

    merging_rules.merge_rule = rule
    if name == "mean-unclipped":
        merger.compared_with = lambda history, merged: ()


def measure(rule: str, plan: str, seed: int, args: argparse.Namespace) -> dict[str, object]:
    config = load_config(ROOT / "configs" / "tiny.toml", []).with_settings(
        **SMALL, train__steps=args.steps, train__seed=seed,
        swarm__codec=args.codec, swarm__quorum=args.workers,
    )  # fmt: skip
    hostile = 0 if plan == "honest" else args.workers // 3
    crew = [
        Member(f"worker-{n}", plan if n < hostile else "honest", SPEEDS[n])
        for n in range(args.workers)
    ]
    original = merger.compared_with
    use(rule)
    with (
        tempfile.TemporaryDirectory() as folder,
        SteppedRun(Path(folder), config, load_corpus(config.data), crew, seed) as run,
    ):
        run.play()
        with run.run.ledger.read() as tx:
            clipped = sum(row.clip is not None for row in tx.updates.merged_after(0, 0))
        ce = run.ce()
    merger.compared_with = original
    return {"rule": rule, "plan": plan, "seed": seed, "ce": ce, "clipped": clipped}


def cost(rule: str, workers: int) -> float:
    """Milliseconds for one frame of this many updates, the best of several."""
    draws = np.random.default_rng(0)
    current = draws.standard_normal(FRAME_NUMBERS, np.float32)
    updates = [
        Contribution(str(n), draws.standard_normal(FRAME_NUMBERS, np.float32), 1.0, is_delta=True)
        for n in range(workers)
    ]
    best = np.inf
    for _ in range(20):
        began = time.perf_counter()
        RobustMean(name=rule).total(current, updates)
        best = min(best, time.perf_counter() - began)
    return round(1e3 * float(best), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES)
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=["honest", "sign-flip"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--workers", type=int, choices=range(3, 7), default=4)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--cost", action="store_true", help="measure one frame only")
    args = parser.parse_args()
    for rule in args.rules:
        for plan in () if args.cost else args.plans:
            for seed in args.seeds:
                found = {**measure(rule, plan, seed, args), **provenance()}
                with args.out.open("a") as out:
                    out.write(json.dumps(found) + "\n")
                print(found, flush=True)
        if args.cost:
            print(rule, cost(rule, args.workers), "ms per frame", flush=True)


if __name__ == "__main__":
    main()
