"""Measures the training speed of a block, of end-to-end training and of a plain PyTorch loop.

    PYTHONPATH=src python bench/speed.py --config configs/wikitext2-38m.toml --out DIR

Times the contenders of bench/contenders.py in one process: they take turns in every round, and the
median over the rounds counts. Prints ratios of time per step and the share of the device's peak
FLOP/s. On CUDA, each contender first runs in a process of its own, all at once, to fill the
compiler's cache. Writes speed.json into DIR. Needs torch, numpy, safetensors and filelock only.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch._dynamo.utils import counters

from blocktrain.config import Config, load_config
from blocktrain.training.device import Compute, resolve
from blocktrain.training.estimation import estimate
from contenders import (
    Contender,
    Runner,
    argument_parser,
    contenders,
    markdown,
    new_runner,
    parameter_count,
    random_corpus,
    refuse_eager_fallback,
    run_worker,
    write_report,
)
from plain import check_like

WARMUP_STEPS = 10  # the first one compiles
PEAK_ROUNDS, PEAK_PRODUCTS = 5, 20
VENDOR_FLOPS = {"H200": 989e12}  # dense bf16, by a part of the device's name


def measure_speed(
    plan: Sequence[Contender], compute: Compute, steps: int, rounds: int
) -> dict[str, Any]:
    refuse_eager_fallback()
    settings = plan[0].config.train
    corpus = random_corpus(settings.seed)
    runners = {c.key: new_runner(c, c.block, corpus, compute) for c in plan}
    check_same_size(runners["end_to_end"], runners["plain"])
    graphs = {c.key: warm_up(c, runners[c.key], compute) for c in plan}
    before = compiled_graphs()
    if settings.compile and not before:
        raise SystemExit("train.compile is set, yet nothing was compiled")
    seconds = time_rounds(runners, steps, rounds, compute)
    if compiled_graphs() != before:
        raise SystemExit("something was compiled again during the timed rounds: no valid timing")
    peak = measured_peak(compute)
    rows = [
        {
            "key": c.key,
            "name": c.name,
            "parameters": parameter_count(runners[c.key]),
            "layers": max(c.config.depths),
            "graphs": graphs[c.key],
            "round_ms": [1e3 * s for s in seconds[c.key]],
            **rates(c.config, statistics.median(seconds[c.key]), peak, vendor_peak(compute)),
        }
        for c in plan
    ]
    return {
        "steps_per_round": steps,
        "rounds": rounds,
        "compiled": settings.compile,
        "graph_breaks": sum(counters["graph_break"].values()),
        "measured_peak_flops_per_s": peak,
        "vendor_peak_flops_per_s": vendor_peak(compute),
        "contenders": rows,
        "ratios": speed_ratios({row["key"]: row["ms_per_step"] for row in rows}),
    }


def compile_ahead(plan: Sequence[Contender], args: argparse.Namespace) -> None:
    """Fill the compiler's cache; what fails here is compiled, or fails, in the timing process."""
    started = time.perf_counter()
    with ThreadPoolExecutor(len(plan)) as pool:
        workers = list(pool.map(lambda c: run_worker(args, c.key), plan))
    for contender, done in zip(plan, workers, strict=True):
        if done.returncode:
            print(f"not compiled ahead: {contender.name}:\n{done.stderr}", flush=True)
    print(f"compiled ahead: {time.perf_counter() - started:.1f} s", flush=True)


def compile_worker(contender: Contender, compute: Compute) -> None:
    refuse_eager_fallback()
    corpus = random_corpus(contender.config.train.seed)
    new_runner(contender, contender.block, corpus, compute).step()


def compiled_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def check_same_size(ours: Runner, plain: Runner) -> None:
    expected, found = parameter_count(ours), parameter_count(plain)
    if abs(found - expected) > 0.01 * expected:
        raise SystemExit(f"the plain loop has {found} parameters, end-to-end {expected}")


def warm_up(contender: Contender, runner: Runner, compute: Compute) -> int:
    """Compile and settle; how many graphs were compiled for this contender."""
    before = compiled_graphs()
    started = time.perf_counter()
    for _ in range(WARMUP_STEPS):
        runner.step()
    synchronize(compute.device)
    graphs = compiled_graphs() - before
    seconds = time.perf_counter() - started
    print(f"warmed up {contender.name}: {seconds:.1f} s, {graphs} graphs compiled", flush=True)
    return graphs


def time_rounds(
    runners: dict[str, Runner], steps: int, rounds: int, compute: Compute
) -> dict[str, list[float]]:
    """Seconds per step of every round; contenders take turns, so that drift hits all alike."""
    keys = list(runners)
    seconds: dict[str, list[float]] = {key: [] for key in keys}
    for index in range(rounds):
        first = index % len(keys)
        for key in keys[first:] + keys[:first]:
            seconds[key].append(timed(runners[key].step, steps, compute.device))
    return seconds


def timed(action: Callable[[], Any], times: int, device: torch.device) -> float:
    """Seconds per call, with the device idle before and after."""
    synchronize(device)
    started = time.perf_counter()
    for _ in range(times):
        action()
    synchronize(device)
    return (time.perf_counter() - started) / times


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)


def measured_peak(compute: Compute) -> float:
    """FLOP/s of a large square product in the run's own number type: the best of a few rounds."""
    size = 8192 if compute.device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=compute.device, dtype=compute.dtype) for _ in range(2))
    timed(lambda: a @ b, PEAK_PRODUCTS, compute.device)
    best = min(timed(lambda: a @ b, PEAK_PRODUCTS, compute.device) for _ in range(PEAK_ROUNDS))
    return 2 * size**3 / best


def vendor_peak(compute: Compute) -> float | None:
    if compute.device.type != "cuda" or compute.dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(compute.device)
    return next((flops for part, flops in VENDOR_FLOPS.items() if part in name), None)


def rates(config: Config, seconds: float, peak: float, vendor: float | None) -> dict[str, Any]:
    flops = estimate(config).flops_per_step
    return {
        "ms_per_step": 1e3 * seconds,
        "mb_per_s": config.train.batch * config.model.window / seconds / 1e6,
        "flops_per_step": flops,
        "flops_per_s": flops / seconds,
        "of_measured_peak": flops / seconds / peak,
        "of_vendor_peak": flops / seconds / vendor if vendor else None,
    }


def speed_ratios(ms: dict[str, float]) -> dict[str, float]:
    """Ratios of time per step: under 1, the first is faster."""
    return {
        "denoising block / causal LM of the same layers": ms["denoise"] / ms["causal"],
        "denoising block / end-to-end": ms["denoise"] / ms["end_to_end"],
        "tailed block of a cascade / causal LM of the same layers": ms["tailed"] / ms["fitting"],
        "last block of a cascade / causal LM of the same layers": ms["cascade"] / ms["fitting"],
        "last block of a cascade / end-to-end": ms["cascade"] / ms["end_to_end"],
        "end-to-end / plain PyTorch loop": ms["end_to_end"] / ms["plain"],
    }


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def speed_table(speed: dict[str, Any]) -> list[str]:
    rows = [
        [
            row["name"],
            f"{row['parameters'] / 1e6:.2f}M",
            f"{row['ms_per_step']:.2f} ({min(row['round_ms']):.2f}-{max(row['round_ms']):.2f})",
            f"{row['mb_per_s']:.3f}",
            f"{row['flops_per_s'] / 1e12:.3g}",
            percent(row["of_measured_peak"]),
            percent(row["of_vendor_peak"]),
        ]
        for row in speed["contenders"]
    ]
    mode = "compiled" if speed["compiled"] else "eager"
    vendor = speed["vendor_peak_flops_per_s"]
    peak = f"measured peak {speed['measured_peak_flops_per_s'] / 1e12:.3g} TFLOP/s"
    peak += f", vendor's {vendor / 1e12:.0f}" if vendor else ""
    title = f"Speed ({mode}, median of {speed['rounds']} rounds; {peak})"
    header = "contender | params | ms/step (range) | MB/s | TFLOP/s | of measured | of vendor's"
    ratios = [[name, f"{ratio:.3f}"] for name, ratio in speed["ratios"].items()]
    return [
        *markdown(title, header, rows),
        *markdown("Ratios of time per step", "ratio | value", ratios),
    ]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=int, default=20, help="steps of a contender per round")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    config = load_config(args.config, args.set)
    compute = resolve(config.train.device, config.train.precision)
    plan = contenders(config)
    if args.worker:
        compile_worker(next(c for c in plan if c.key == args.worker), compute)
        return
    started = time.perf_counter()
    check_like(config)
    if config.train.compile and compute.device.type == "cuda":
        compile_ahead(plan, args)
    speed = measure_speed(plan, compute, args.steps, args.rounds)
    write_report(args.out / "speed.json", config, compute, started, {"speed": speed})
    print("\n".join(["", *speed_table(speed)]))


if __name__ == "__main__":
    main()
