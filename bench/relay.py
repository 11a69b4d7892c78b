"""Compares ways to train the blocks of a cascade at the total compute of end-to-end training.

    PYTHONPATH=src python bench/relay.py --config configs/wikipedia-38m-cascade.toml --out DIR \
        --seeds 0 1 2 --set data.source='text:DIR/*'

The steps of every variant follow from its compute: --compute times that of the end-to-end model of
the config for train.steps. Writes JSON after every run and resumes: results that it holds already
are not trained again. `--variants` chooses among:

    end-to-end      the reference
    side-by-side    a lead of a quarter, blocks from nothing, snapshots --stale steps old
    side-inherit    the same, and a block starts as the tail of the block before
    from-nothing    one block after another, no inheritance
    relay           one block after another, inheriting, one learning-rate schedule
    finer           the same with as many blocks as a worker's trained layers allow
    tail-2, tail-3  the same as relay with shorter tails
    outer           relay with an outer Nesterov step of one worker every 30 steps (0.7, 0.5)
    average         relay whose blocks end as the mean of their last quarter of steps
    polish          relay for 85% of the compute, then turns through the finished model
    stack           a seed (block 0 alone) for 15%, then all blocks side by side from its copies
"""

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from blocktrain.config import Config, load_config
from blocktrain.config.compute import flops_per_step, total_flops
from blocktrain.data.corpus import Corpus, evaluation_windows
from blocktrain.data.run_text import new_text
from blocktrain.model.stack import assemble
from blocktrain.numerics.merge import Contribution, MergeRule, finite_floats
from blocktrain.storage.run_dir import RunDir
from blocktrain.storage.tensor_file import Tensors
from blocktrain.training.device import Compute, resolve
from blocktrain.training.evaluate import evaluate
from blocktrain.training.stored_models import load_block
from blocktrain.training.trainer import BlockTrainer
from lockstep import Board, train_in_lockstep
from quality import interval, provenance

RELAY = ("objective.order=relay",)
NOTHING = ("objective.inherit=no",)
AVERAGED, AVERAGE_EVERY = 0.25, 10
POLISH, SEED_SHARE = 0.15, 0.15


@dataclass(frozen=True)
class Variant:
    settings: tuple[str, ...]
    lockstep: bool = False
    outer: MergeRule | None = None
    outer_every: int = 30
    averaged: float = 0.0  # share of a block's last steps whose weights are averaged
    polish: float = 0.0  # share of the compute that goes to turns through the finished model
    seed_share: float = 0.0  # share of the compute that goes to block 0 alone


VARIANTS = {
    "end-to-end": Variant(("objective.kind=end_to_end",)),
    "side-by-side": Variant((), lockstep=True),
    "side-inherit": Variant(("objective.inherit=yes",), lockstep=True),
    "from-nothing": Variant((*RELAY, *NOTHING)),
    "relay": Variant(RELAY),
    "finer": Variant(RELAY),
    "tail-2": Variant((*RELAY, "objective.tail=2")),
    "tail-3": Variant((*RELAY, "objective.tail=3")),
    "outer": Variant(RELAY, outer=MergeRule(0.7, 0.5)),
    "average": Variant(RELAY, averaged=AVERAGED),
    "polish": Variant(RELAY, polish=POLISH),
    "stack": Variant(("objective.lead=0.0", "objective.inherit=yes"), True, seed_share=SEED_SHARE),
}


def settings_of(name: str, base: Config) -> tuple[str, ...]:
    """The settings of a variant. Finer blocks have one layer each and tails such that a worker
    still trains as many layers; the last block has no tail."""
    if name != "finer":
        return VARIANTS[name].settings
    trained = base.trained_layers
    blocks = base.model.layers - trained + 1
    depths = [1] * (blocks - 1) + [trained]
    return (*RELAY, f"model.blocks={blocks}", f"model.depths={depths}",
            f"objective.tail={trained - 1}")  # fmt: skip


def with_steps(config: Config, flops: float) -> Config:
    """The config with as many steps per block as cost this much together."""
    each = sum(flops_per_step(config, block) for block in range(config.block_count))
    return config.with_settings(train__steps=max(1, round(flops / each)))


class Trainee:
    """Trains a block by itself, with what its variant adds to a trainer's steps."""

    def __init__(self, variant: Variant, trainer: BlockTrainer) -> None:
        self.variant, self.trainer = variant, trainer
        self._velocity: dict[str, Any] = {}
        self._sum: dict[str, Any] = {}
        self._summed = 0

    def train(self) -> None:
        trainer, variant = self.trainer, self.variant
        trainer.restore()
        steps = trainer.config.train.steps
        every = variant.outer_every if variant.outer else AVERAGE_EVERY
        while trainer.step < steps:
            before = _copied(trainer.weights()) if variant.outer else {}
            trainer.run(trainer.step, min(every, steps - trainer.step))
            trainer.refuse_divergence()
            if variant.outer:
                self._step_outside(variant.outer, before)
            if trainer.step > steps * (1 - variant.averaged):
                self._add_to_mean()
        trainer.close()
        if self._summed:
            self._load({name: total / self._summed for name, total in self._sum.items()})

    def _step_outside(self, rule: MergeRule, before: Tensors) -> None:
        after, result = self.trainer.weights(), {}
        for name, start in before.items():
            target, self._velocity[name] = rule.combine(
                start, [Contribution("only", after[name], 1.0)], self._velocity.get(name)
            )
            result[name] = finite_floats(target)
        self._load(result)

    def _add_to_mean(self) -> None:
        for name, weight in self.trainer.weights().items():
            self._sum[name] = self._sum.get(name, 0.0) + weight.astype(np.float64)
        self._summed += 1

    def _load(self, weights: Mapping[str, Any]) -> None:
        floats = {name: np.asarray(weight, np.float32) for name, weight in weights.items()}
        load_block(self.trainer.module, floats, "the bench")


def _copied(weights: Tensors) -> Tensors:
    return {name: array.copy() for name, array in weights.items()}


@dataclass(frozen=True)
class Bench:
    args: argparse.Namespace
    corpus: Corpus
    compute: Compute
    base: Config  # with the vocabulary of the text

    def measure(self, name: str, seed: int) -> dict[str, Any]:
        args, variant, started = self.args, VARIANTS[name], time.perf_counter()
        settings = [*args.set, *settings_of(name, self.base), f"train.seed={seed}"]
        config = replace(load_config(args.config, settings), vocab=self.base.vocab)
        reference = config.end_to_end()
        budget = args.compute * total_flops(reference)
        if not config.kind.whole_model:
            config = with_steps(config, budget * (1 - variant.polish - variant.seed_share))
        blocks, spent = self._train(config, variant, budget)
        scores = self._scores(config, blocks)
        result: dict[str, Any] = {"final": scores["final"], "product": scores.get("product")}
        if variant.polish:
            result["before polish"] = scores
            polished, more = self._polish(
                config, blocks, budget - spent, args.out / f"{name}-{seed}"
            )
            result |= {"final": polished["final"], "product": None}
            spent += more
        return {
            "variant": name, "seed": seed, "compute": spent / total_flops(reference),
            "depths": config.depths, "tail": config.objective.tail,
            "steps": config.train.steps, "seconds": time.perf_counter() - started,
            **result, "scores": scores, **provenance(),
        }  # fmt: skip

    def _train(
        self, config: Config, variant: Variant, budget: float
    ) -> tuple[list[nn.Module], float]:
        """The trained blocks, and the FLOPs that they took."""
        if not variant.lockstep:
            board, blocks = Board(), []
            for block in range(config.block_count):
                trainer = BlockTrainer(config, block, self.corpus, self.compute, None, board)
                Trainee(variant, trainer).train()
                board.publish(trainer)
                blocks.append(trainer.module)
            return blocks, total_flops(config)
        seeded, spent = config, 0.0
        if variant.seed_share:
            seeded, spent = self._seeded(config, variant.seed_share * budget)
        trainers = train_in_lockstep(seeded, self.corpus, self.compute, stale=self.args.stale)
        return [trainer.module for trainer in trainers], spent + total_flops(config)

    def _seeded(self, config: Config, budget: float) -> tuple[Config, float]:
        """Settings that start all blocks from copies of block 0, trained alone for this compute."""
        steps = max(1, round(budget / flops_per_step(config, 0)))
        alone = config.with_settings(train__steps=steps)
        trainer = BlockTrainer(alone, 0, self.corpus, self.compute, None)
        trainer.run(0, steps)
        chain = [_copied(trainer.weights())]
        for block in range(1, config.block_count):
            heir = BlockTrainer(config, block, self.corpus, self.compute, None, _Chain(chain))
            heir.inherit()
            chain.append(_copied(heir.weights()))
        folder = self.args.out / f"seed-{config.train.seed}"
        if not (folder / "manifest.json").exists():
            RunDir.create_exported(folder, config).write_exported(chain)
        started = config.with_settings(
            objective__inherit="no", train__warm_start=str(folder), train__warmup=0
        )
        return started, float(steps * flops_per_step(config, 0))

    def _polish(
        self, config: Config, blocks: list[nn.Module], budget: float, folder: Path
    ) -> tuple[dict[str, float], float]:
        """Train the finished model in turns, at a low rate. Returns its scores and the FLOPs."""
        from blocktrain.training.run_session import LocalRun

        if not (folder / "manifest.json").exists():
            weights = [
                {name: p.detach().cpu().numpy() for name, p in block.named_parameters()}
                for block in blocks
            ]
            RunDir.create_exported(folder, config).write_exported(weights)
        turns = config.with_settings(
            objective__kind="turns", objective__order="side-by-side", train__warm_start=str(folder),
            train__lr=config.train.lr * self.args.polish_rate, train__warmup=10,
            objective__turn_steps=self.args.turn_steps,
        )  # fmt: skip
        turns = with_steps(turns, budget)
        run = RunDir.create(folder.with_name(f"{folder.name}-turns"), turns)
        session = LocalRun(run, self.corpus, self.compute)
        session.train_in_turn(range(turns.block_count), lambda p: None, lambda: False)
        from blocktrain.training.stored_models import load_stack

        blocks = load_stack(run, self.compute).blocks
        return self._scores(turns, blocks), float(total_flops(turns))

    def _scores(self, config: Config, blocks: list[nn.Module]) -> dict[str, float]:
        """Nats per byte on valid, by readout."""
        window = config.model.window
        windows = evaluation_windows(self.corpus.split("valid", window), window, self.args.windows)
        stack = assemble(config, blocks)
        evaluation = evaluate(stack, windows, 0, text_bytes=self.corpus.bytes_of(windows))
        return {score.readout: score.ce for score in evaluation.scores}


class _Chain:
    """Blocks that inherit from each other before any of them is trained."""

    def __init__(self, weights: list[Tensors]) -> None:
        self._weights = weights

    def version(self, block: int) -> int | None:
        return 0

    def weights(self, block: int) -> Tensors:
        return self._weights[block]


def table(results: list[dict[str, Any]]) -> list[str]:
    """A row per variant; gaps are paired by seed with end-to-end training."""
    reference = {r["seed"]: r["final"] for r in results if r["variant"] == "end-to-end"}
    lines = [
        "| variant | compute | steps per block | final | gap | product |",
        "|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(result["variant"] for result in results):
        rows = [result for result in results if result["variant"] == name]
        gaps = [row["final"] - reference[row["seed"]] for row in rows if row["seed"] in reference]
        products = [row["product"] for row in rows if row["product"] is not None]
        lines.append(
            f"| {name} | {statistics.fmean(row['compute'] for row in rows):.2f} |"
            f" {rows[0]['steps']:,} | {interval([row['final'] for row in rows])} |"
            f" {interval(gaps) if gaps else '-'} | {interval(products) if products else '-'} |"
        )
    return lines


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, required=True, help="a cascade")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", nargs="*", default=[], help="section.key=value ...")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--compute", type=float, default=1.0, help="times the end-to-end run's")
    parser.add_argument("--stale", type=int, default=50, help="steps between snapshots in lockstep")
    parser.add_argument("--windows", type=int, help="score at most this many windows of valid")
    parser.add_argument("--polish-rate", type=float, default=0.05, help="times train.lr")
    parser.add_argument("--turn-steps", type=int, default=20, help="of the polish")
    return parser.parse_args()


def main() -> None:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out / "relay.json"
    results: list[dict[str, Any]] = json.loads(out.read_text()) if out.exists() else []
    text = new_text(load_config(args.config, args.set))
    compute = resolve(text.config.train.device, text.config.train.precision)
    bench = Bench(args, text.corpus, compute, text.config)
    for seed in args.seeds:
        for name in args.variants:
            if any((held["variant"], held["seed"]) == (name, seed) for held in results):
                continue
            results.append(bench.measure(name, seed))
            out.write_text(json.dumps(results, indent=1))
            print(
                json.dumps(
                    {
                        k: results[-1][k]
                        for k in ("variant", "seed", "final", "product", "compute", "seconds")
                    }
                ),
                flush=True,
            )
    print("\n".join(table(results)))
    for key in ("commit", "device", "torch"):
        print(f"{key} {', '.join(sorted({result[key] for result in results}))}", end="; ")
    print(f"seeds {args.seeds}, {args.compute:g} x end-to-end, details in {out}")


if __name__ == "__main__":
    main()
