"""Measures the training memory of a block, of end-to-end training and of a plain PyTorch loop.

    PYTHONPATH=src python bench/memory.py --config configs/wikitext2-38m.toml --out DIR

Two tables. Memory: the peak of every contender of bench/contenders.py in a process of its own, with
its activations kept and with its layers recomputed (train.checkpoint_layers). Cap: a model that
does not fit into 8 GB for end-to-end training, while each of its blocks does. CUDA only. Writes
memory.json into DIR and prints the tables. Needs torch, numpy, safetensors and filelock only.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from blocktrain.config import load_config
from blocktrain.training.device import Compute, resolve
from contenders import (
    Contender,
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

WARMUP_STEPS = 2  # after them the optimizer's moments and the allocator's pools exist

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


def worker(contender: Contender, args: argparse.Namespace, compute: Compute) -> dict[str, Any]:
    """Train a few steps and say what they took; under a cap, running out is an answer too."""
    if args.cap is not None:
        total = torch.cuda.get_device_properties(compute.device).total_memory
        torch.cuda.set_per_process_memory_fraction(args.cap / total, compute.device)
    try:
        return memory_of_steps(contender, args.block, args.steps, compute)
    except torch.cuda.OutOfMemoryError:
        if args.cap is None:
            raise
        return {"out_of_memory": True}


def memory_of_steps(
    contender: Contender, block: int, steps: int, compute: Compute
) -> dict[str, Any]:
    refuse_eager_fallback()
    # A replayed graph allocates nothing that the allocator counts: measure the step itself.
    contender = replace(contender, config=contender.config.with_settings(train__cuda_graph=False))
    runner = new_runner(contender, block, random_corpus(contender.config.train.seed), compute)
    fixed: list[int] = []
    # Gradients live until the optimizer has stepped: count at the moment it is about to.
    runner.optimizer.register_step_pre_hook(lambda optimizer, *_: fixed.append(held(optimizer)))
    for _ in range(WARMUP_STEPS):
        runner.step()
    torch.cuda.reset_peak_memory_stats(compute.device)
    for _ in range(steps):
        runner.step()
    return {
        "out_of_memory": False,
        "parameters": parameter_count(runner),
        "fixed_bytes": fixed[-1],
        "peak_bytes": torch.cuda.max_memory_allocated(compute.device),
        "loss": runner.last_loss(),
        "steps": WARMUP_STEPS + steps,
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
    options = ["--block", str(job.block), "--steps", str(args.steps)]
    options += ["--cap", str(job.cap)] if job.cap is not None else []
    done = run_worker(args, job.key, options, job.settings)
    if done.returncode:
        raise SystemExit(f"memory of {job} failed:\n{done.stdout}{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"memory of {job}: {result}", flush=True)
    return result


def memory_jobs(plan: Sequence[Contender]) -> list[Job]:
    """Every contender, first keeping its activations, then recomputing them."""
    return [
        Job(contender.key, (f"train.checkpoint_layers={recompute}",), contender.block)
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


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


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


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a process")
    parser.add_argument("--jobs", type=int, default=8, help="processes side by side")
    parser.add_argument("--block", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--cap", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    config = load_config(args.config, args.set)
    compute = resolve(config.train.device, config.train.precision)
    plan = contenders(config)
    if args.worker:
        chosen = next(c for c in plan if c.key == args.worker)
        print(json.dumps(worker(chosen, args, compute)))
        return
    started = time.perf_counter()
    check_like(config)
    out = args.out / "memory.json"
    if compute.device.type != "cuda":
        write_report(out, config, compute, started, dict.fromkeys(("memory", "cap"), NOT_ON_CPU))
        print(f"memory and cap: {NOT_ON_CPU}")
        return
    sections = measure_memory(args, plan)
    write_report(out, config, compute, started, sections)
    print("\n".join(["", *memory_table(sections["memory"]), *cap_table(sections["cap"])]))


if __name__ == "__main__":
    main()
