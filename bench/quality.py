"""Measures the honest cross entropy of blocks and of their end-to-end twins on the same windows.

    PYTHONPATH=src python bench/quality.py --config configs/wikitext2-small.toml --out DIR \
        --seeds 0 1 2

Trains and scores, for every seed, the kinds of models in bench/variants.py; --kinds chooses among
them. `--grid model.dropout=0.0,0.1 --choose` first tunes all kinds alike on valid with the first
seed. Writes JSON after every run and prints a table. It resumes: results that the JSON already
holds are not trained again, so a long table can be put together on several machines. Every result
names its commit. Needs torch, numpy, safetensors and filelock only.
"""

import argparse
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from blocktrain.config import load_config
from blocktrain.data.corpus import evaluation_windows, load_corpus
from blocktrain.model.stack import Stack
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.device import resolve
from blocktrain.training.evaluate import evaluate, fit_product_weights
from variants import DEFAULT_KINDS, KINDS, Variant, new_variant, train

ROOT = Path(__file__).resolve().parent.parent
LOCAL_REPORTS = 10
REFERENCE_READING = "none final"
T_975 = {
    1: 12.706,
    2: 4.303,
    3: 3.182,
    4: 2.776,
    5: 2.571,
    6: 2.447,
    7: 2.365,
    8: 2.306,
    9: 2.262,
}  # Student's t, by degrees of freedom


def variants(args: argparse.Namespace) -> list[Variant]:
    """Every kind of model at every point of the grid that matters to it; a cascade at every
    staleness asked for."""
    grid = {key: values.split(",") for key, _, values in (g.partition("=") for g in args.grid)}
    result: dict[Variant, None] = {}
    for values in itertools.product(*grid.values()):
        chosen = [f"{key}={value}" for key, value in zip(grid, values, strict=True)]
        for kind in args.kinds:
            for stale in args.stale if kind == "cascade" else [0]:
                shares = args.shares if kind == "cascade" else ()
                workers = args.workers if kind == "workers" else 0
                found = new_variant(kind, args.config, args.set, chosen, stale, shares, workers)
                result[found] = None
    return list(result)


def score(stack: Stack, data: str, splits: list[str], most: int | None) -> dict[str, Any]:
    settings = stack.config.data
    corpus = load_corpus(replace(settings, source=data) if data else settings)
    window = stack.config.model.window
    weights = None
    if len(stack.blocks) > 1:
        weights = fit_product_weights(stack, corpus.split("valid", window))
    result: dict[str, Any] = {"parameters": stack.parameters, "product_weights": weights}
    for split in splits:
        windows = evaluation_windows(corpus.split(split), window, most)
        # Weights fitted on valid are no score on valid.
        fitted = weights if split != "valid" else None
        evaluation = evaluate(stack, windows, 4, product_weights=fitted)
        result[split] = {
            "digest": evaluation.digest,
            "windows": evaluation.windows,
            "draft_agreement": evaluation.draft_agreement,
            "scores": {
                f"{s.start} {s.readout}" + (f" x{s.draws}" if s.draws > 1 else ""): s.ce
                for s in evaluation.scores
            },
        }
    return result


def local_losses(folder: Path) -> dict[str, float]:
    """What each block's own objective reported at the end of training, a denoising block with the
    noisy target in view: not a score, shown to be compared with one."""
    run = RunDir.open(folder)
    result = {}
    for index in range(run.config.block_count):
        lines = run.block(index).metrics_path.read_text().splitlines()[-LOCAL_REPORTS:]
        losses = [json.loads(line)["ce"] for line in lines]
        result[f"local loss of block {index}"] = statistics.fmean(
            loss for loss in losses if loss is not None
        )
    return result


def interval(values: list[float]) -> str:
    """Mean and 95% interval of the mean, from Student's t."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:.4f}"
    half = T_975[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.4f} ± {half:.4f}"


def table(results: list[dict[str, Any]], split: str, against: str) -> list[str]:
    """One row per variant and readout; gaps are paired by seed with the reference."""
    rows: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    gaps: dict[tuple[str, str], list[float]] = defaultdict(list)
    references: dict[tuple[str, int], dict[str, Any]] = {}
    for result in results:
        if result["kind"] == against:  # of several at one point, the first
            references.setdefault((result["point"], result["seed"]), result)
    for result in results:
        reference = references.get((result["point"], result["seed"]))
        for name, ce in (result[split]["scores"] | result["local"]).items():
            rows[result["variant"], name][result["seed"]] = ce
            if reference and (gap := gap_to(reference, result, split, name, ce)) is not None:
                gaps[result["variant"], name].append(gap)
    parameters = {result["variant"]: result["parameters"] for result in results}
    lines = [f"| model | params | readout ({split}) | CE | gap |", "|---|---|---|---|---|"]
    for (variant, name), scores in rows.items():
        gap = interval(gaps[variant, name]) if gaps[variant, name] else "-"
        lines.append(
            f"| {variant} | {parameters[variant] / 1e6:.2f}M | {name} |"
            f" {interval(list(scores.values()))} | {gap} |"
        )
    return lines


def gap_to(
    reference: dict[str, Any], result: dict[str, Any], split: str, name: str, ce: float
) -> float | None:
    """To the reference's score on the very windows the other was scored on: its only one, or the
    one by the same name; None where it has none."""
    if reference[split]["digest"] != result[split]["digest"]:
        raise SystemExit(f"{result['variant']} and its reference were scored on other windows")
    scores: dict[str, float] = reference[split]["scores"]
    compared = scores.get(REFERENCE_READING, scores.get(name))
    return None if compared is None else ce - compared


def provenance() -> dict[str, Any]:
    """What a number in a document needs beside it; BLOCKTRAIN_COMMIT names the commit of a tree
    that was copied without its history."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return {
        "command": " ".join(sys.argv),
        "commit": os.environ.get("BLOCKTRAIN_COMMIT") or described.stdout.strip() or "unknown",
        "device": resolve("auto", "auto").name,
        "torch": torch.__version__,
    }


def data_seen(config_path: Path, overrides: list[str], shares: list[float]) -> str:
    """Equal bytes for every model and block, but for shares of a cascade's; the blocks together
    see as many times more."""
    config = load_config(config_path, overrides)
    each = config.train.steps * config.train.batch * config.model.window / 1e6
    total = each * sum(shares or [1.0] * config.block_count)
    return f"{each:.1f} MB seen per model and per block, {total:.1f} MB by all blocks"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", nargs="*", default=[], help="section.key=value ...")
    parser.add_argument("--kinds", nargs="+", default=DEFAULT_KINDS, choices=KINDS)
    parser.add_argument("--grid", nargs="*", default=[], help="section.key=a,b,c ...")
    parser.add_argument(
        "--choose", action="store_true", help="take each kind's best point of the grid on valid"
    )
    parser.add_argument(
        "--stale", type=int, nargs="+", default=[50], help="steps a cascade's blocks are behind"
    )
    parser.add_argument(
        "--shares", type=float, nargs="*", default=[], help="of a cascade's steps, per block"
    )
    parser.add_argument("--workers", type=int, default=6, help="of the kind `workers`")
    parser.add_argument("--against", default="end-to-end", choices=KINDS, help="gaps are to this")
    parser.add_argument("--data", default="", help="corpus to score on; default: the config's")
    parser.add_argument("--splits", nargs="+", default=["valid", "test"], choices=["valid", "test"])
    parser.add_argument("--windows", type=int, help="score at most this many windows of a split")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--json", type=Path, help="where to write the results")
    return parser.parse_args()


class Bench:
    """Trains and scores runs one after another; every score is on disk before the next run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out: Path = args.json or args.out / "quality.json"
        self.here = provenance()
        held = json.loads(self.out.read_text())["results"] if self.out.exists() else []
        self.report: dict[str, Any] = {"results": held}

    def measure(self, found: list[Variant], seeds: list[int]) -> list[dict[str, Any]]:
        return [self._measure(variant, seed) for seed in seeds for variant in found]

    def _measure(self, variant: Variant, seed: int) -> dict[str, Any]:
        args = self.args
        identity = variant.identity(seed)
        for held in self.report["results"]:
            if held["identity"] == identity and all(split in held for split in args.splits):
                return dict(held)
        slug = re.sub(r"[^a-z0-9.=]+", "-", f"{variant.kind}-{variant.name}-seed-{seed}".lower())
        folder = args.out / slug
        trained = train(variant, args.config, seed, folder)
        result = {
            "variant": variant.name,
            "kind": variant.kind,
            "point": variant.point,
            "seed": seed,
            "identity": identity,
            **self.here,
            **trained.facts,
            **score(trained.load(), args.data, args.splits, args.windows),
            "local": local_losses(folder) if variant.kind not in ("swarm", "workers") else {},
        }
        self.report["results"].append(result)
        self.out.write_text(json.dumps(self.report, indent=1))
        return result


def choose(bench: Bench, found: list[Variant], seeds: list[int]) -> list[dict[str, Any]]:
    """Each kind of model at the grid point that suits it best on valid with the first seed; the
    other seeds at that point alone. All kinds are tuned alike, and test plays no part."""
    tried = bench.measure(found, seeds[:1])
    best: dict[str, dict[str, Any]] = {}
    for result in tried:
        kind = result["variant"].removesuffix(result["point"])
        if kind not in best or default_ce(result) < default_ce(best[kind]):
            best[kind] = result
    names = {result["variant"] for result in best.values()}
    picked = [variant for variant in found if variant.name in names]
    results = [*best.values(), *bench.measure(picked, seeds[1:])]
    return [{**result, "point": "chosen"} for result in results]


def default_ce(result: dict[str, Any]) -> float:
    scores: dict[str, float] = result["valid"]["scores"]
    readings = ("mean product", "none product", REFERENCE_READING)
    return next(scores[name] for name in readings if name in scores)


def main() -> None:
    args = parse()
    started = time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(args)
    found = variants(args)
    results = choose(bench, found, args.seeds) if args.choose else bench.measure(found, args.seeds)
    for split in args.splits:
        print("\n".join(table(results, split, args.against)), end="\n\n")
    print(data_seen(args.config, args.set, args.shares))
    for key in ("commit", "device", "torch"):
        print(f"{key} {', '.join(sorted({result[key] for result in results}))}", end="; ")
    print(f"seeds {args.seeds}, {time.perf_counter() - started:.0f} s, details in {bench.out}")


if __name__ == "__main__":
    main()
