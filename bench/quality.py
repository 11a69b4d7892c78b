"""Honest cross entropy of blocks beside their end-to-end twins, on the same windows.

    python bench/quality.py --config configs/wikitext2-small.toml --data text:DIR/*.txt \
        --seeds 0 1 2 --out DIR

For every seed: end-to-end with all layers, end-to-end with as many layers as one block has, and
the blocks. `--grid model.dropout=0.0,0.1 --choose` tunes all of them alike on valid with the first
seed. Prints a table, writes JSON after every run. Called again, it goes on where it stopped;
what the JSON holds already is not trained again, so that a long table can be put together from
several machines. Every result names the commit it is of.
Needs torch, numpy, safetensors and filelock only; PYTHONPATH=src is enough to run it.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blocktrain.storage.run_dir import RunDir

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


@dataclass(frozen=True)
class Variant:
    """One model to train, as overrides of the base config."""

    name: str
    settings: tuple[str, ...]
    units: int
    point: str  # of the grid; gaps are taken to the reference of the same point


def variants(config: Path, overrides: list[str], grid: dict[str, list[str]]) -> list[Variant]:
    """Three kinds of model for every point of the grid."""
    result = []
    for values in itertools.product(*grid.values()):
        chosen = [f"{key}={value}" for key, value in zip(grid, values, strict=True)]
        suffix = "".join(f", {setting}" for setting in chosen)
        result += [
            Variant(name + suffix, (*overrides, *chosen, *settings), units, suffix)
            for name, settings, units in kinds(config, [*overrides, *chosen])
        ]
    return result


def kinds(config: Path, overrides: list[str]) -> list[tuple[str, tuple[str, ...], int]]:
    """(name, settings, units): the reference, the reference as deep as one block, the blocks."""
    from blocktrain.config import load_config

    model = load_config(config, overrides).model
    depth = model.layers // model.blocks
    whole = "objective.kind=end_to_end"
    return [
        (f"end-to-end, {model.layers} layers", (whole,), 1),
        (
            f"end-to-end, {depth} layers",
            (whole, f"model.layers={depth}", "model.blocks=1"),
            1,
        ),
        (f"blocks, {model.blocks} x {depth} layers", ("objective.kind=denoise",), model.blocks),
    ]


def train_unit(config: Path, settings: list[str], block: int, run_dir: Path, alone: bool) -> str:
    """Train one unit of one run, here or in a process of its own; returns a line about it."""
    if alone:
        return worker(config, settings, block, run_dir)
    command = [sys.executable, __file__, "--worker", str(block), "--config", str(config)]
    command += ["--out", str(run_dir), "--set", *settings]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise SystemExit(f"{run_dir} block {block} failed:\n{finished.stdout}{finished.stderr}")
    return finished.stdout.strip()


def worker(config_path: Path, settings: list[str], block: int, run_dir: Path) -> str:
    """Train one unit, or find it trained already."""
    from blocktrain.config import load_config
    from blocktrain.train.session import open_session
    from contenders import refuse_eager_fallback

    started = time.perf_counter()
    refuse_eager_fallback()
    session = open_session(load_config(config_path, settings), run_dir)
    rates: list[float] = []
    session.train_in_turn([block], lambda p: rates.append(p.bytes_per_s), lambda: False)
    rate = f"{statistics.median(rates) / 1e6:.2f} MB/s" if rates else "trained before"
    return f"{time.perf_counter() - started:.0f} s, {rate}"


def score(run_dir: Path, data: str, splits: list[str], most: int | None) -> dict[str, Any]:
    import torch

    from blocktrain.data.corpus import load_corpus
    from blocktrain.data.windows import evaluation_windows
    from blocktrain.storage.run_dir import RunDir
    from blocktrain.train.assemble import load_stack
    from blocktrain.train.device import resolve
    from blocktrain.train.evaluate import evaluate, fit_product_weights

    run = RunDir.open(run_dir)
    compute = resolve(run.config.train.device, "auto")
    stack = load_stack(run, compute)
    settings = run.config.data
    corpus = load_corpus(replace(settings, source=data) if data else settings)
    window = run.config.model.window
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
            "scores": {
                f"{s.start} {s.readout}" + (f" x{s.draws}" if s.draws > 1 else ""): s.ce
                for s in evaluation.scores
            },
        }
        result[split]["scores"] |= local_losses(run)
    del stack
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return result


def local_losses(run: "RunDir") -> dict[str, float]:
    """What each block's own objective reported at the end of training, the noisy target in view:
    not a score, shown to be compared with one."""
    result = {}
    for index in range(run.config.units):
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


def table(results: list[dict[str, Any]], split: str) -> list[str]:
    """One row per variant and readout; gaps are paired by seed with the deepest end-to-end."""
    rows: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    gaps: dict[tuple[str, str], list[float]] = defaultdict(list)
    references: dict[tuple[str, int], dict[str, Any]] = {}
    for result in sorted(results, key=lambda result: result["parameters"]):
        if result["variant"].startswith("end-to-end"):
            references[result["point"], result["seed"]] = result  # the largest comes last
    for result in results:
        reference = references.get((result["point"], result["seed"]))
        for name, ce in result[split]["scores"].items():
            rows[result["variant"], name][result["seed"]] = ce
            if reference:
                gaps[result["variant"], name].append(ce - reference_ce(reference, result, split))
    parameters = {result["variant"]: result["parameters"] for result in results}
    lines = [f"| model | params | readout ({split}) | CE | gap |", "|---|---|---|---|---|"]
    for (variant, name), scores in rows.items():
        gap = interval(gaps[variant, name]) if gaps[variant, name] else "-"
        lines.append(
            f"| {variant} | {parameters[variant] / 1e6:.2f}M | {name} |"
            f" {interval(list(scores.values()))} | {gap} |"
        )
    return lines


def reference_ce(reference: dict[str, Any], result: dict[str, Any], split: str) -> float:
    """The reference's score, on the very windows the other was scored on."""
    if reference[split]["digest"] != result[split]["digest"]:
        raise SystemExit(f"{result['variant']} and its reference were scored on other windows")
    ce: float = reference[split]["scores"][REFERENCE_READING]
    return ce


def provenance() -> dict[str, Any]:
    """What a number in a document needs beside it."""
    import torch

    from blocktrain.train.device import resolve

    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return {
        "command": " ".join(sys.argv),
        "commit": commit.stdout.strip() or os.environ.get("BLOCKTRAIN_COMMIT", "unknown"),
        "device": resolve("auto", "auto").name,
        "torch": torch.__version__,
    }


def data_seen(config_path: Path, overrides: list[str]) -> str:
    """Equal bytes for every model and block; the blocks together see as many times more."""
    from blocktrain.config import load_config

    config = load_config(config_path, overrides)
    each = config.train.steps * config.train.batch * config.model.window / 1e6
    return f"{each:.1f} MB seen per model and per block, {each * config.units:.1f} MB by all blocks"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", nargs="*", default=[], help="section.key=value ...")
    parser.add_argument("--grid", nargs="*", default=[], help="section.key=a,b,c ...")
    parser.add_argument(
        "--choose", action="store_true", help="take each kind's best point of the grid on valid"
    )
    parser.add_argument("--only", default="", help="only variants whose name starts so")
    parser.add_argument("--data", default="", help="corpus to score on; default: the config's")
    parser.add_argument("--splits", nargs="+", default=["valid", "test"])
    parser.add_argument("--windows", type=int, help="score at most this many windows of a split")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
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
        slug = re.sub(r"[^a-z0-9.=]+", "-", f"{variant.name}-seed-{seed}".lower())
        settings = [*variant.settings, f"train.seed={seed}"]
        for held in self.report["results"]:
            if held["settings"] == settings and all(split in held for split in args.splits):
                return dict(held)

        def train(block: int) -> None:
            line = train_unit(args.config, settings, block, args.out / slug, args.jobs == 1)
            print(f"{variant.name}, seed {seed}, unit {block}: {line}", flush=True)

        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(train, range(variant.units)))
        result = {
            "variant": variant.name,
            "point": variant.point,
            "seed": seed,
            "settings": settings,
            **self.here,
            **score(args.out / slug, args.data, args.splits, args.windows),
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
    return scores.get("mean product", scores.get(REFERENCE_READING, math.inf))


def main() -> None:
    args = parse()
    if args.worker is not None:
        print(worker(args.config, args.set, args.worker, args.out))
        return
    started = time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    grid = {key: values.split(",") for key, _, values in (g.partition("=") for g in args.grid)}
    found = [v for v in variants(args.config, args.set, grid) if v.name.startswith(args.only)]
    bench = Bench(args)
    results = choose(bench, found, args.seeds) if args.choose else bench.measure(found, args.seeds)
    for split in args.splits:
        print("\n".join(table(results, split)), end="\n\n")
    print(data_seen(args.config, args.set))
    for key in ("commit", "device", "torch"):
        print(f"{key} {', '.join(sorted({result[key] for result in results}))}", end="; ")
    print(f"seeds {args.seeds}, {time.perf_counter() - started:.0f} s, details in {bench.out}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))
    main()
