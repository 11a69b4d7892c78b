"""Compares learning rates for extended runs: CE of a model that is trained on after its end.

PYTHONPATH=src python bench/extension.py --out FILE [--steps 300] [--extended 330 600 1200]
    [--seeds 0 1 2]

extended   the product's: warms up to the cosine of the longer plan, and follows it
floor      stays at the final rate of the first 300 steps
again      warms up to the peak, then a cosine over the new steps alone
planned    was planned for all steps from the start, so it is no extension
"""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

from blocktrain.config import Config, TrainConfig, load_config
from blocktrain.data.corpus import Corpus, evaluation_windows, load_corpus
from blocktrain.training.device import resolve
from blocktrain.training.evaluate import solo_ce
from blocktrain.training.stored_models import load_block
from blocktrain.training.trainer import BlockTrainer
from quality import provenance

ROOT = Path(__file__).resolve().parent.parent
WINDOWS = 256


class Floor(TrainConfig):
    def learning_rate(self, step: int, blocks: int = 1) -> float:
        (former,) = self.extended_at
        return super().learning_rate(step) if step < former else self.lr * self.lr_floor


class Again(TrainConfig):
    def learning_rate(self, step: int, blocks: int = 1) -> float:
        (former,) = self.extended_at
        if step < former:
            return super().learning_rate(step)
        warm = min(1.0, (step - former + 1) / (self.warmup + 1))
        cosine = 0.5 * (1.0 + math.cos(math.pi * (step - former) / (self.steps - former)))
        return self.lr * (self.lr_floor + (1.0 - self.lr_floor) * cosine * warm)


KINDS = {"extended": TrainConfig, "floor": Floor, "again": Again}


def with_rates(config: Config, kind: type[TrainConfig]) -> Config:
    return replace(config, train=kind(**config.to_dict()["train"]))


def final_ce(trainer: BlockTrainer, corpus: Corpus) -> float:
    window = trainer.config.model.window
    valid = evaluation_windows(corpus.split("valid", window), window, WINDOWS)
    return solo_ce(trainer.config, 0, trainer.module, valid, None, None)


def continued(first: BlockTrainer, config: Config) -> BlockTrainer:
    """A trainer with these settings, in the state of another one."""
    trainer = BlockTrainer(config, 0, first.corpus, first.compute, None)
    load_block(trainer.module, first.weights(), "the first steps")
    trainer.take_moments({name: moment.copy() for name, moment in first.moments().items()})
    return trainer


def compare(config: Config, ends: list[int]) -> dict[str, float]:
    corpus, compute = load_corpus(config.data), resolve("cpu", "fp32")
    first = BlockTrainer(config, 0, corpus, compute, None)
    first.run(0, config.train.steps)
    results = {f"not extended, {config.train.steps}": final_ce(first, corpus)}
    for steps in ends:
        longer = config.extended_to(steps)
        for name, kind in KINDS.items():
            trainer = continued(first, with_rates(longer, kind))
            trainer.run(config.train.steps, steps - config.train.steps)
            results[f"{name}, {steps}"] = final_ce(trainer, corpus)
        planned = BlockTrainer(config.with_settings(train__steps=steps), 0, corpus, compute, None)
        planned.run(0, steps)
        results[f"planned, {steps}"] = final_ce(planned, corpus)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--extended", type=int, nargs="+", default=[330, 600, 1200])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    config = load_config(
        ROOT / "configs" / "tiny.toml", ["objective.kind=end_to_end", f"train.steps={args.steps}"]
    )
    rows = []
    for seed in args.seeds:
        rows.append(compare(config.with_settings(train__seed=seed), args.extended))
        for name, ce in rows[-1].items():
            print(f"seed {seed}  {name:20} {ce:.4f}", flush=True)
    means = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
    args.out.write_text(json.dumps({**provenance(), "means": means, "seeds": rows}, indent=1))
    for name, ce in means.items():
        print(f"mean    {name:20} {ce:.4f}")


if __name__ == "__main__":
    main()
