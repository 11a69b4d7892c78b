"""Measures serving on one GPU: a router and three stages share it, with shapes up to 75.8B.

    PYTHONPATH=src python bench/serving_gpu.py --out DIR --text wikitext-2/test.txt [--run RUN]

The weights of a shape come from a seed (serving_seeded.py): its text is meaningless, its speed is
real. Measured for each shape:

- the bytes per second of `ar` and of one sweep, as a share of the limit (serving_limit.py): reading
  all weights once per traversal, the round trip R and the bandwidth W of loopback;
- the speed-up of the sweep over `ar`, beside that of the limits.

With --run, a trained model of at least four blocks: CE with weights in 8 bits, 32 requests at once,
and how often modes that should equal `ar` differ from it.

Everything is warmed up before it is timed. A part that fails is reported, and the rest goes on; no
part begins after --seconds. Prints tables and writes DIR/serving-gpu.json with all numbers.
"""

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

import httpx
import numpy as np
import torch

from blocktrain.data.corpus import evaluation_windows
from blocktrain.serve.ring.compute import BlockSource
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.device import resolve
from int8_speed import compared
from quality import provenance
from serving import HELD, TOGETHER, Row, table
from serving_client import streamed, together
from serving_limit import Hardware, Limit, parameters_of, rated, request
from serving_quality import Model, divergence, fixed_prompts, held_differences
from serving_ring import loopback, loopback_sent, ring
from serving_seeded import SHAPES, SeededBlocks, config_of

SEEDED = (sys.executable, str(Path(__file__).with_name("serving_seeded.py")))
STORED = (sys.executable, "-m", "blocktrain.cli.main")
# Mode, bytes asked for, how often.
ASKED = (("ar", 32, 2), ("sweep K=1", 128, 3))
AT_ONCE, AT_ONCE_BYTES = 32, 48
SERVED_AT_ONCE = ("tiny", "1.3B")  # shapes that are asked many things at once
DIVERGING_BYTES = 128
# Of a trained model: number type, how weights are held, temperatures. fp32 is the control.
DIVERGING = (("bf16", "full", (0.0, 1.0)), ("bf16", "int8", (1.0,)), ("fp32", "full", (1.0,)))
PROMPT_BYTES = 64
CE_WINDOWS = 64
WITHIN = 0.2

KERNEL = {
    "rows": "{rows}",
    "kernel ms": "{kernel_ms:.4f}",
    "widened ms": "{widened_ms:.4f}",
    "bf16 weights ms": "{bf16_ms:.4f}",
    "largest difference": "{error:.1e}",
}
SHAPED = {
    "model": "{model}",
    "parameters": "{parameters:,}",
    "mode": "{mode}",
    "bytes": "{written}",
    "bytes/s": "{bytes_per_second:.2f}",
    "total s": "{seconds:.3f}",
    "traversals": "{traversals:.0f}",
    "computing s": "{computed_seconds:.3f}",
    "round trips s": "{trips_seconds:.4f}",
    "transfer s": "{transfer_seconds:.4f}",
    "of the limit": "{of_limit:.3f}",
}
FACTORS = {
    "model": "{model}",
    "sweep against ar": "{measured:.1f}x",
    "the limits predict": "{predicted:.1f}x",
    "measured of predicted": "{ratio:.3f}",
    "within 20%": "{within}",
    "ar, ms a byte": "{ar_ms:.1f}",
    "weights read once, ms": "{read_ms:.2f}",
    "loaded in s": "{start_seconds:.0f}",
}
MEMORY = {
    "model": "{model}",
    "process": "{process}",
    "device GB": "{device_gb:.2f}",
    "host GB, at most": "{host_gb:.2f}",
}
AT_ONCE_COLUMNS = {"model": "{model}", **TOGETHER}
DIVERGED = {
    "model": "{model}",
    "precision": "{precision}",
    "weights": "{held}",
    "mode": "{mode}",
    "temperature": "{temperature:.0f}",
    "answers that differ from ar's": "{differing:.3f}",
    "differences in 1000 bytes": "{per_thousand_bytes:.3f}",
}
TABLES: dict[str, tuple[str, dict[str, str]]] = {
    "kernel": ("A matrix of the largest shape in 8 bits", KERNEL),
    "modes": ("ar and one sweep", SHAPED),
    "factors": ("The factor between them", FACTORS),
    "memory": ("Memory", MEMORY),
    "at_once": ("Requests at once, ar", AT_ONCE_COLUMNS),
    "held": ("CE with weights in 8 bits", HELD),
    "divergence": ("Modes that are to say what ar says", DIVERGED),
}


class Bench:
    def __init__(self, args: argparse.Namespace, scratch: Path) -> None:
        self.args, self.scratch = args, scratch
        self.compute = resolve(args.device, args.precision)
        self.ring_seconds, self.mbit = loopback()
        self.hardware = Hardware.measured(self.compute)
        self.rows: dict[str, list[Row]] = {name: [] for name in TABLES}

    @property
    def options(self) -> list[str]:
        return ["--device", self.args.device, "--precision", self.args.precision]

    def kernel(self) -> None:
        layer = SeededBlocks(config_of(self.args.shapes[0]), "full").matrix()
        for rows in (1, 32, 128):
            nothing = {"kernel_ms": float("nan"), "error": float("nan")}
            self.rows["kernel"].append({**nothing, **compared(rows, *layer, self.compute.device)})

    def shape(self, shape: str, held: str) -> None:
        """A model that has no checkpoint."""
        source = SeededBlocks(config_of(shape), held)
        run = self.scratch / f"{shape}-{held}"
        RunDir.create(run, source.config)
        named = f"{shape}, int8" if held == "int8" else f"{shape}, {self.args.precision}"
        named += ", logical" if held == "logical" else ""
        read = SeededBlocks(source.config, "full") if held == "logical" else source
        about = {
            "model": named,
            "parameters": source.parameters(),
            "resident_bytes": source.resident_bytes(self.compute.dtype),
            "read_bytes": read.resident_bytes(self.compute.dtype),
        }
        several = shape in SERVED_AT_ONCE and held != "logical"
        self._served(SEEDED, run, 4, ["--weights", held], about, several=several)

    def trained(self) -> None:
        """A model that was trained, as a user serves it."""
        run = RunDir.open(self.args.run)
        parameters = parameters_of(run)
        about = {
            "model": f"{run.path.name}, {self.args.precision}",
            "parameters": parameters,
            "resident_bytes": parameters * self.compute.dtype.itemsize,
            "read_bytes": parameters * self.compute.dtype.itemsize,
        }
        self._served(STORED, run.path, run.config.block_count, [], about, several=True)

    def held(self) -> None:
        window = RunDir.open(self.args.run).config.model.window
        windows = evaluation_windows(np.fromfile(self.args.text, np.uint8), window, CE_WINDOWS)
        self.rows["held"] += held_differences(self.args.run, self.compute, "product", windows)

    def trained_divergence(self) -> None:
        run = RunDir.open(self.args.run)
        for precision, held, temperatures in DIVERGING:
            compute = resolve(self.args.device, precision)
            model = Model.of(BlockSource(run, held), compute, "product")
            self._diverges(model, run.path.name, precision, held, temperatures)

    def shape_divergence(self, shape: str) -> None:
        source = SeededBlocks(config_of(shape), "full")
        model = Model.of(source, self.compute, "product")
        name = f"{shape}, random weights"
        self._diverges(model, name, self.args.precision, "full", (0.0, 1.0))

    def _diverges(
        self, model: Model, name: str, precision: str, held: str, temperatures: Sequence[float]
    ) -> None:
        most = min(DIVERGING_BYTES, model.config.model.window - PROMPT_BYTES)
        for temperature in temperatures:
            found = divergence(model, self.args.prompts, temperature, most)
            about = {"model": name, "precision": precision, "held": held}
            self.rows["divergence"] += [{**about, **row} for row in found]

    def _served(
        self,
        program: Sequence[str],
        run: Path,
        blocks: int,
        options: list[str],
        about: Row,
        *,
        several: bool,
    ) -> None:
        began = time.monotonic()
        folder = self.scratch / f"ring-{len(self.rows['factors'])}-{time.monotonic_ns()}"
        with ring(program, run, blocks, folder, [*self.options, *options]) as (found, client):
            start_seconds = time.monotonic() - began
            bound = Limit(
                self.ring_seconds, self.mbit, self.hardware, about["read_bytes"],
                about["parameters"],
            )  # fmt: skip
            modes = [self._asked(client, bound, *asked) for asked in ASKED]
            self.rows["modes"] += [{**about, **row} for row in modes]
            told = factors(*modes)
            ar_ms = 1e3 / modes[0]["bytes_per_second"]
            read_ms = 1e3 * about["read_bytes"] / self.hardware.bytes_per_second
            taken = {"ar_ms": ar_ms, "read_ms": read_ms, "start_seconds": start_seconds}
            self.rows["factors"].append({**about, **told, **taken})
            self.rows["memory"] += [{**about, **row} for row in found.memory()]
            if several:
                self.rows["at_once"] += [{**about, **row} for row in self._at_once(client)]

    def _asked(
        self, client: httpx.Client, bound: Limit, mode: str, written: int, times: int
    ) -> Row:
        prompt = self.args.prompts[0].decode(errors="replace")
        asked = request(prompt, written, mode, 0.0)
        streamed(client, asked)  # warm
        answers = []
        for _ in range(times):
            before = loopback_sent()
            answer = streamed(client, asked)
            sent = loopback_sent() - before
            answers.append(rated(answer, written, sent, bound))
        told: Row = {key: median(answer[key] for answer in answers) for key in answers[0]}
        trips = told["traversals"] * self.ring_seconds
        return {"mode": mode, "written": written, "trips_seconds": trips, **told}

    def _at_once(self, client: httpx.Client) -> list[Row]:
        asked = request(self.args.prompts[0].decode(errors="replace"), AT_ONCE_BYTES, "ar", 1.0)
        together(client, asked, AT_ONCE)  # warm
        rows = []
        for count in (1, AT_ONCE):
            answer = together(client, asked, count)
            rate = answer["bytes"] / answer["seconds"]
            rows.append({"requests": count, "bytes_per_second": rate})
        return rows


def factors(ar: Row, sweep: Row) -> Row:
    """How far one sweep is ahead, and how far it would be if both took what their limits say."""
    measured = sweep["bytes_per_second"] / ar["bytes_per_second"]
    predicted = (sweep["written"] / sweep["limit_seconds"]) / (ar["written"] / ar["limit_seconds"])
    ratio = measured / predicted
    within = "yes" if abs(ratio - 1) <= WITHIN else "no"
    return {"measured": measured, "predicted": predicted, "ratio": ratio, "within": within}


def jobs(bench: Bench, args: argparse.Namespace) -> list[tuple[str, Callable[[], None]]]:
    """What matters most first."""
    first, *others = args.shapes
    found: list[tuple[str, Callable[[], None]]] = [
        ("kernel", bench.kernel),
        (f"{first}, int8", lambda: bench.shape(first, "int8")),
    ]
    if args.run:
        found += [("trained", bench.trained), ("int8 CE", bench.held)]
        found += [("divergence", bench.trained_divergence)]
    for shape in others:
        found.append((f"{shape}, int8", lambda shape=shape: bench.shape(shape, "int8")))
    for shape in args.logical:
        found.append((f"{shape}, logical", lambda shape=shape: bench.shape(shape, "logical")))
    for shape in args.diverging:
        found.append((f"{shape}, divergence", lambda shape=shape: bench.shape_divergence(shape)))
    return found


def main() -> None:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    began, failed = time.monotonic(), {}
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(args, Path(scratch))
        about = {**provenance(), "ring_seconds": bench.ring_seconds, "mbit": bench.mbit,
                 "hardware": asdict(bench.hardware)}  # fmt: skip
        for name, job in jobs(bench, args):
            started = time.monotonic()
            if started - began > args.seconds:
                failed[name] = "no time left"
                continue
            try:
                job()
            except Exception as error:  # the others are still worth measuring
                traceback.print_exc()
                failed[name] = f"{type(error).__name__}: {error}"
            if bench.compute.device.type == "cuda":
                torch.cuda.empty_cache()
            print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
            report = {**about, "failed": failed, **bench.rows}
            (args.out / "serving-gpu.json").write_text(json.dumps(report, indent=1))
    for name, (title, columns) in TABLES.items():
        if bench.rows[name]:
            print(f"\n{title}\n\n{table(bench.rows[name], columns)}")
    print(bars(bench.rows))
    for name, why in failed.items():
        print(f"NOT MEASURED: {name}: {why[:300]}")
    print(f"loopback {bench.ring_seconds * 1e6:.0f} us around the ring, {bench.mbit:.0f} Mbit/s;"
          f" memory {bench.hardware.bytes_per_second / 1e12:.2f} TB/s,"
          f" {bench.hardware.flops / 1e12:.0f} TFLOP/s; commit {about['commit']},"
          f" {about['device']}, torch {about['torch']}, seed 0;"
          f" {time.monotonic() - began:.0f} s in all")  # fmt: skip


def bars(rows: dict[str, list[Row]]) -> str:
    told = [""]
    by_model: dict[str, list[float]] = {}
    for row in rows["at_once"]:
        by_model.setdefault(row["model"], []).append(row["bytes_per_second"])
    for model, (one, many) in by_model.items():
        told.append(f"{model}: 32 at once are {many / one:.1f}x one (bar: 8)")
    for row in rows["factors"]:
        told.append(f"{row['model']}: one sweep is {row['measured']:.1f}x ar, the limits predict"
                    f" {row['predicted']:.1f}x; within 20%: {row['within']}")  # fmt: skip
    return "\n".join(told)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, help="prompts and scored text")
    parser.add_argument("--run", type=Path, help="a trained run of at least four blocks")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES,
                        default=["75.8B", "1.3B", "7B", "30B"])  # fmt: skip
    parser.add_argument("--logical", nargs="*", choices=SHAPES, default=["75.8B"])
    parser.add_argument("--diverging", nargs="*", choices=SHAPES, default=["1.3B"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16"])
    parser.add_argument("--prompt-count", type=int, default=32, help="of `divergence`")
    parser.add_argument("--seconds", type=float, default=280.0, help="after which nothing begins")
    args = parser.parse_args()
    text = np.fromfile(args.text, np.uint8)
    args.prompts = fixed_prompts(text, args.prompt_count, PROMPT_BYTES)
    return args


if __name__ == "__main__":
    main()
