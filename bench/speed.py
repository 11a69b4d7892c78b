"""Training speed and memory of a block beside end-to-end, and of both beside a plain loop.

    PYTHONPATH=src python bench/speed.py --config configs/wikitext2-38m.toml --out DIR

Contenders, each a real training step on random bytes: end-to-end with all layers, end-to-end
with the layers of one block, one denoising block, and `plain`, an ordinary PyTorch loop of the
first one's shape. Speed: rounds of steps in rotation in one process, median over the rounds.
Memory (CUDA): each contender in a fresh process. Cap (CUDA): a model whose end-to-end training
does not fit into 8 GB while each of its blocks does. Prints tables, writes speed.json into DIR.
Needs torch, numpy, safetensors and filelock only.

Shapes: B batch, T positions, D width, H heads, K = D / H.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy, pad, rms_norm, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

from blocktrain.config import Config, ModelConfig, load_config
from blocktrain.core.vocabulary import BOS, BYTES, IDS
from blocktrain.data.corpus import Corpus
from blocktrain.data.windows import TrainingWindows, mixed_seed
from blocktrain.train.device import Compute, resolve
from blocktrain.train.estimate import estimate
from blocktrain.train.schedule import learning_rate
from blocktrain.train.trainer import DATA_STREAM, BlockTrainer

CORPUS_BYTES = 1 << 24
WARMUP_STEPS = 10  # the first one compiles
MEMORY_WARMUP_STEPS = 2  # after them the optimizer's moments and the allocator's pools exist
MEMORY_STEPS = 3
PEAK_ROUNDS, PEAK_PRODUCTS = 5, 20
VENDOR_FLOPS = {"H200": 989e12}  # dense bf16, by a part of the device's name
WORKER_COMPILE_THREADS = 4  # of each memory worker: they run side by side

CAP_BYTES = 8_000_000_000
CAP_BLOCKS = 4
# 567M parameters: at 16 bytes each (weight, gradient, two moments) 9.1 GB before any activation,
# so no batch size and no recomputation lets the whole model train under the cap.
CAP_SETTINGS = (
    "model.layers=20",
    "model.width=1536",
    "model.heads=12",
    f"model.blocks={CAP_BLOCKS}",
    "model.window=512",
    "model.mlp_ratio=4.0",
    "objective.bounds=[]",
    "train.batch=8",
    "train.checkpoint_layers=true",
    "train.compile=false",
)
NOT_ON_CPU = "not measured on CPU"


@dataclass(frozen=True)
class Contender:
    key: str
    name: str
    config: Config


def contenders(config: Config) -> list[Contender]:
    model = config.model
    depth = model.layers // model.blocks
    whole = config.with_settings(objective__kind="end_to_end")
    shallow = whole.with_settings(model__layers=depth, model__blocks=1, objective__bounds=())
    block = config.with_settings(objective__kind="denoise")
    return [
        Contender("end_to_end", f"end-to-end, {model.layers} layers", whole),
        Contender("causal", f"causal LM, {depth} layers", shallow),
        Contender("denoise", f"denoising block, {depth} layers", block),
        Contender("plain", f"plain PyTorch loop, {model.layers} layers", whole),
    ]


def random_corpus(seed: int) -> Corpus:
    data = np.random.default_rng(seed).integers(0, BYTES, CORPUS_BYTES, np.uint8)
    return Corpus("random bytes", {"train": data, "valid": data, "test": data}, {})


# The plain loop: what the same model looks like without this project.


class PlainLayer(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        width = model.width
        hidden = max(8, round(int(width * model.mlp_ratio) * 2 / 3 / 8) * 8)
        self.heads = model.heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.taps = nn.Parameter(torch.zeros(model.taps, width))

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        x = x_BTD + self._attend(self._filter(_norm(x_BTD)), cos_TK, sin_TK)
        gate, value = self.up(_norm(x)).chunk(2, dim=-1)
        return x + self.down(silu(gate) * value)

    def _attend(self, h_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        batch, length, width = h_BTD.shape
        qkv = self.qkv(h_BTD).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        q, k = _rope(_norm(q), cos_TK, sin_TK), _rope(_norm(k), cos_TK, sin_TK)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))

    def _filter(self, h_BTD: Tensor) -> Tensor:
        count, length = self.taps.size(0), h_BTD.size(1)
        padded = pad(h_BTD, (0, 0, count, 0))
        mixed = h_BTD
        for back, tap in enumerate(self.taps.to(h_BTD.dtype), start=1):
            mixed = mixed + tap * padded[:, count - back : count - back + length]
        return mixed


class PlainModel(nn.Module):
    """A causal LM whose residual stream is kept in the compute type, as the project's is."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype, recompute: bool) -> None:
        super().__init__()
        self.dtype, self.recompute = dtype, recompute
        self.embed = nn.Embedding(IDS, model.width)
        self.layers = nn.ModuleList(PlainLayer(model) for _ in range(model.layers))
        self.head = nn.Linear(model.width, BYTES, bias=False)
        head_width = model.width // model.heads
        frequencies = 10_000.0 ** -(torch.arange(0, head_width, 2) / head_width)
        angles = torch.arange(model.window)[:, None] * frequencies
        self.register_buffer("cos", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype), persistent=False)

    def forward(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x = self.embed(ids_BT).to(self.dtype)
        for layer in self.layers:
            if self.recompute:
                x = checkpoint(layer, x, self.cos, self.sin, use_reentrant=False)
            else:
                x = layer(x, self.cos, self.sin)
        logits = self.head(_norm(x)).float()
        return cross_entropy(logits.flatten(0, 1), targets_BT.flatten())


def _norm(x: Tensor) -> Tensor:
    return rms_norm(x, (x.size(-1),))


def _rope(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    first, second = x_BHTK.chunk(2, dim=-1)
    return torch.cat([first * cos_TK - second * sin_TK, second * cos_TK + first * sin_TK], dim=-1)


class PlainLoop:
    def __init__(self, config: Config, corpus: Corpus, compute: Compute) -> None:
        settings = config.train
        torch.manual_seed(settings.seed)
        self.settings, self.compute = settings, compute
        self.model = PlainModel(config.model, compute.dtype, settings.checkpoint_layers)
        self.model.to(compute.device)
        self.forward: Callable[..., Tensor] = (
            torch.compile(self.model) if settings.compile else self.model
        )
        self.windows = TrainingWindows(
            corpus.split("train"),
            config.model.window,
            settings.batch,
            mixed_seed(settings.seed, 0, DATA_STREAM),
        )
        matrices = [p for name, p in self.model.named_parameters() if "taps" not in name]
        filters = [p for name, p in self.model.named_parameters() if "taps" in name]
        groups: list[dict[str, Any]] = [
            {"params": matrices},
            {"params": filters, "weight_decay": 0.0},
        ]
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            groups,
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.steps_done = 0
        self.loss = torch.zeros(())

    def step(self) -> None:
        ids, targets = self._batch()
        half = self.compute.dtype != torch.float32
        with torch.autocast(self.compute.device.type, self.compute.dtype, enabled=half):
            loss = self.forward(ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.steps_done, self.settings)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = loss.detach()
        self.steps_done += 1

    def _batch(self) -> tuple[Tensor, Tensor]:
        host = torch.from_numpy(self.windows[self.steps_done])
        if self.compute.device.type == "cuda":
            host = host.pin_memory()
        targets = host.to(self.compute.device, non_blocking=True).long()
        return pad(targets[:, :-1], (1, 0), value=BOS), targets

    def last_loss(self) -> float:
        return float(self.loss)


class Ours:
    """The project's own trainer, one real step at a time."""

    def __init__(self, config: Config, block: int, corpus: Corpus, compute: Compute) -> None:
        self.trainer = BlockTrainer(config, block, corpus, compute, None)
        self.trainer.module.train()
        self.optimizer = self.trainer.optimizer

    def step(self) -> None:
        self.trainer.train_step()

    def last_loss(self) -> float:
        return float(self.trainer.last_loss)


class Runner(Protocol):
    optimizer: torch.optim.Optimizer

    def step(self) -> None: ...

    def last_loss(self) -> float: ...


def new_runner(contender: Contender, block: int, corpus: Corpus, compute: Compute) -> Runner:
    if contender.key == "plain":
        return PlainLoop(contender.config, corpus, compute)
    return Ours(contender.config, block, corpus, compute)


def parameters(runner: Runner) -> list[Tensor]:
    return [p for group in runner.optimizer.param_groups for p in group["params"]]


def parameter_count(runner: Runner) -> int:
    return sum(p.numel() for p in parameters(runner))


def check_like(config: Config) -> None:
    """The plain loop is written for one shape of layer; refuse to compare it with another."""
    unlike = {
        "model.activation": config.model.activation != "swiglu",
        "model.dropout": config.model.dropout > 0,
        "train.accumulate": config.train.accumulate > 1,
        "train.clip": config.train.clip == 0,
    }
    if names := [name for name, differs in unlike.items() if differs]:
        raise SystemExit(f"the plain loop has no equal of this config's {', '.join(names)}")


# Speed


def measure_speed(
    plan: Sequence[Contender], compute: Compute, steps: int, rounds: int
) -> dict[str, Any]:
    refuse_eager_fallback()
    settings = plan[0].config.train
    corpus = random_corpus(settings.seed)
    runners = {c.key: new_runner(c, 0, corpus, compute) for c in plan}
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
            "layers": c.config.unit_layers,
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


def refuse_eager_fallback() -> None:
    """Contenders share code that is compiled once per depth: make a full cache an error.

    By default the compiler, past its limit of versions of one function, goes on uncompiled.
    """
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True


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
        "end-to-end / plain PyTorch loop": ms["end_to_end"] / ms["plain"],
    }


# Memory: every measurement in a process of its own.


def worker(contender: Contender, block: int, cap: int | None) -> dict[str, Any]:
    """Train a few steps and say what they took; under a cap, running out is an answer too."""
    compute = resolve(contender.config.train.device, contender.config.train.precision)
    if cap is not None:
        total = torch.cuda.get_device_properties(compute.device).total_memory
        torch.cuda.set_per_process_memory_fraction(cap / total, compute.device)
    try:
        return memory_of_steps(contender, block, compute)
    except torch.cuda.OutOfMemoryError:
        if cap is None:
            raise
        return {"out_of_memory": True}


def memory_of_steps(contender: Contender, block: int, compute: Compute) -> dict[str, Any]:
    refuse_eager_fallback()
    # A replayed graph allocates nothing that the allocator counts: measure the step itself.
    contender = replace(contender, config=contender.config.with_settings(train__cuda_graph=False))
    runner = new_runner(contender, block, random_corpus(contender.config.train.seed), compute)
    fixed: list[int] = []
    # Gradients live until the optimizer has stepped: count at the moment it is about to.
    runner.optimizer.register_step_pre_hook(lambda optimizer, *_: fixed.append(held(optimizer)))
    for _ in range(MEMORY_WARMUP_STEPS):
        runner.step()
    torch.cuda.reset_peak_memory_stats(compute.device)
    for _ in range(MEMORY_STEPS):
        runner.step()
    return {
        "out_of_memory": False,
        "parameters": parameter_count(runner),
        "fixed_bytes": fixed[-1],
        "peak_bytes": torch.cuda.max_memory_allocated(compute.device),
        "loss": runner.last_loss(),
        "steps": MEMORY_WARMUP_STEPS + MEMORY_STEPS,
    }


def held(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of weights, gradients and optimizer state, from the tensors themselves."""
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = [*weights, *(p.grad for p in weights if p.grad is not None)]
    tensors += [t for state in optimizer.state.values() for t in state.values()]
    return sum(tensor.nbytes for tensor in tensors)


@dataclass(frozen=True)
class Job:
    """One measurement in a process of its own."""

    key: str
    settings: tuple[str, ...] = ()
    block: int = 0
    cap: int | None = None


def run_job(job: Job, args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker", job.key, "--block", str(job.block)]
    command += ["--config", str(args.config), "--out", str(args.out)]
    command += ["--cap", str(job.cap)] if job.cap is not None else []
    command += ["--set", *args.set, *job.settings]
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": str(WORKER_COMPILE_THREADS)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"memory of {job} failed:\n{done.stdout}{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"memory of {job}: {result}", flush=True)
    return result


def memory_jobs(plan: Sequence[Contender]) -> list[Job]:
    """Every contender, first keeping its activations, then recomputing them."""
    return [
        Job(contender.key, (f"train.checkpoint_layers={recompute}",))
        for recompute in ("false", "true")
        for contender in plan
    ]


def cap_jobs() -> list[Job]:
    return [
        Job("end_to_end", CAP_SETTINGS),
        Job("end_to_end", CAP_SETTINGS, cap=CAP_BYTES),
        *(Job("denoise", CAP_SETTINGS, block, CAP_BYTES) for block in range(CAP_BLOCKS)),
    ]


def measure_memory(args: argparse.Namespace, plan: Sequence[Contender]) -> dict[str, Any]:
    """Both memory sections; peaks are counted per process, so processes may run side by side."""
    jobs = [*memory_jobs(plan), *cap_jobs()]
    with ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(lambda job: run_job(job, args), jobs))
    count = len(plan)
    kept, recomputed = results[:count], results[count : 2 * count]
    uncapped, capped, *blocks = results[2 * count :]
    return {
        "memory": [
            {"key": c.key, "name": c.name, "kept": with_all, "recomputed": without}
            for c, with_all, without in zip(plan, kept, recomputed, strict=True)
        ],
        "cap": {
            "cap_bytes": CAP_BYTES,
            "settings": list(CAP_SETTINGS),
            "end_to_end_without_cap": uncapped,
            "end_to_end": capped,
            "blocks": blocks,
        },
    }


# Report


def markdown(title: str, header: str, rows: Sequence[Sequence[str]]) -> list[str]:
    columns = header.count("|") + 1
    lines = [f"### {title}", "", f"| {header} |", "|" + "---|" * columns]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


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


def memory_table(rows: list[dict[str, Any]]) -> list[str]:
    whole = next(row for row in rows if row["key"] == "end_to_end")

    def cell(row: dict[str, Any], mode: str, field: str) -> str:
        size, reference = row[mode][field], whole[mode][field]
        return f"{gigabytes(size)} ({size / reference:.2f}x)"

    cells = [
        [
            row["name"],
            cell(row, "kept", "fixed_bytes"),
            cell(row, "kept", "peak_bytes"),
            cell(row, "recomputed", "peak_bytes"),
        ]
        for row in rows
    ]
    header = "contender | weights, gradients, moments | peak | peak, layers recomputed"
    return markdown("Memory (and as a multiple of end-to-end)", header, cells)


def cap_row(name: str, result: dict[str, Any]) -> list[str]:
    if result["out_of_memory"]:
        return [name, "out of memory", "-", "-", "-"]
    finite = math.isfinite(result["loss"])
    return [
        name,
        f"{result['steps']} steps, loss {'finite' if finite else 'NOT FINITE'}",
        f"{result['loss']:.3f}",
        gigabytes(result["fixed_bytes"]),
        gigabytes(result["peak_bytes"]),
    ]


def cap_table(cap: dict[str, Any]) -> list[str]:
    uncapped = cap["end_to_end_without_cap"]
    rows = [
        cap_row("end-to-end, no cap", uncapped),
        cap_row("end-to-end", cap["end_to_end"]),
        *(cap_row(f"block {index}", block) for index, block in enumerate(cap["blocks"])),
    ]
    size = f"{uncapped['parameters'] / 1e6:.0f}M parameters"
    title = f"Under a cap of {gigabytes(cap['cap_bytes'])} ({size}, layers recomputed)"
    return markdown(title, "trained | outcome | loss | weights, gradients, moments | peak", rows)


def tables(report: dict[str, Any]) -> list[str]:
    lines = speed_table(report["speed"])
    for section, table in (("memory", memory_table), ("cap", cap_table)):
        found = report[section]
        lines += [f"{section}: {found}"] if isinstance(found, str) else table(found)
    return lines


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", nargs="*", default=[], help="section.key=value ...")
    parser.add_argument("--steps", type=int, default=20, help="steps of a contender per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=8, help="memory processes side by side")
    parser.add_argument("--skip-memory", action="store_true", help="speed alone")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--block", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--cap", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    config = load_config(args.config, args.set)
    plan = contenders(config)
    if args.worker:
        chosen = next(c for c in plan if c.key == args.worker)
        print(json.dumps(worker(chosen, args.block, args.cap)))
        return
    started = time.perf_counter()
    check_like(config)
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out / "speed.json"
    compute = resolve(config.train.device, config.train.precision)
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "device": compute.name,
        "seed": config.train.seed,
        "config": config.to_dict(),
    }
    # Memory first: its processes compile side by side, and leave what they compiled in the cache.
    if args.skip_memory:
        report |= {"memory": "skipped", "cap": "skipped"}
    elif compute.device.type != "cuda":
        report |= {"memory": NOT_ON_CPU, "cap": NOT_ON_CPU}
    else:
        report |= measure_memory(args, plan)
        out.write_text(json.dumps(report, indent=1))
    report["speed"] = measure_speed(plan, compute, args.steps, args.rounds)
    out.write_text(json.dumps(report, indent=1))
    print("\n".join(["", *tables(report)]))
    took = time.perf_counter() - started
    print(
        f"{compute.name}, torch {torch.__version__}, seed {config.train.seed}, {took:.0f} s, {out}"
    )


if __name__ == "__main__":
    main()
