"""Measures serving: speed, distance from the limit, quality, and the cost of a dead stage.

    PYTHONPATH=src:. python bench/serving.py PART RUN --out DIR --text wikitext-2/test.txt [...]

Each PART is one table:

    wan          a router and three stages across an emulated WAN, by mode and round trip
    quality      what every mode writes, judged by --reference, a run trained end to end
    wire         CE with fp32, bf16 and int8 between stages
    weights      CE with the layers' matrices in the compute type and in 8 bits
    concurrency  32 requests at once against one, on this machine
    failover     a stage is killed mid-stream and its replica takes over

`quality`, `wire` and `weights` need torch, numpy, safetensors and filelock only, and take --device.
`wan` needs Linux and root. Prompts are fixed: the first bytes of equal stretches of --text. Writes
DIR/PART.json, prints a table and the targets. For a GPU see serving_gpu.py.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blocktrain.data.corpus import evaluation_windows
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.device import Compute, resolve
from quality import provenance
from serving_limit import Hardware
from serving_quality import (
    INDEPENDENT,
    MODES,
    Model,
    fixed_prompts,
    held_differences,
    load_judge,
    measured,
    timed_at_home,
    wire_differences,
)

Row = dict[str, Any]
Part = Callable[[argparse.Namespace], Row]
NAMED = {"mode": "{mode}", "temperature": "{temperature:.0f}"}
RATED = {
    "ms": "{round_trip_ms:.0f}",
    **NAMED,
    "bytes/s": "{bytes_per_second:.1f}",
    "first byte s": "{first_seconds:.3f}",
    "total s": "{seconds:.3f}",
    "traversals": "{traversals:.0f}",
    "computing s": "{computed_seconds:.3f}",
    "hardware's limit s": "{hardware_seconds:.3f}",
    "transfer s": "{transfer_seconds:.3f}",
    "of the limit": "{of_limit:.3f}",
}
AT_HOME = {**NAMED, "bytes/s": "{bytes_per_second:.1f}", "total s": "{seconds:.3f}"}
CROSSING = {**NAMED, "faster across the WAN than ar at home up to": "{round_trip_ms:.1f} ms"}
JUDGED = {
    **NAMED,
    "CE under the reference": "{ce:.3f}",
    "same as ar": "{same_as_ar:.3f}",
    "distinct 4-grams": "{distinct_grams:.3f}",
    "bytes per traversal": "{bytes_per_traversal:.2f}",
}
WIRED = {
    "wire": "{wire}",
    "CE": "{ce:.5f}",
    "difference": "{difference:+.5f}",
    "bytes per position and hop": "{bytes_per_position:.0f}",
}
HELD = {"weights": "{weights}", "CE": "{ce:.5f}", "difference": "{difference:+.5f}"}
TOGETHER = {"requests at once": "{requests}", "bytes/s of all": "{bytes_per_second:.1f}"}


def table(rows: Sequence[Row], columns: dict[str, str]) -> str:
    """Columns are templates by title, filled from each row."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(columns.values()).format(**row) + " |" for row in rows]
    return "\n".join(lines)


def wan(args: argparse.Namespace) -> Row:
    from serving_wan import ASKED, hosts
    from serving_wan import measured as measured_across

    prompts, blocks = args.prompts, RunDir.open(args.run).config.block_count
    torch.set_num_threads(1)  # as a stage has
    model = Model.load(args.run, compute_of(args), args.readout)
    hardware = Hardware.measured(compute_of(args))
    home = []
    for mode, temperature, times in ASKED:
        timed_at_home(model, prompts[:1], mode, temperature, args.bytes)  # warm
        taken = timed_at_home(model, prompts[:times], mode, temperature, args.bytes)
        seconds = statistics.median(taken)
        named = {"mode": mode, "temperature": temperature, "seconds": seconds}
        home.append({**named, "bytes_per_second": args.bytes / seconds})
    rows = []
    for trip in args.round_trips:
        with (
            tempfile.TemporaryDirectory() as scratch,
            hosts(args.run, blocks, Path(scratch) / "hosts", trip, args.mbit) as found,
        ):
            rows += measured_across(found, prompts, args.bytes, trip, args.mbit, hardware)
    crossed = crossings(rows, home[0]["seconds"])
    print(table(rows, RATED), table(home, AT_HOME), table(crossed, CROSSING), sep="\n\n")
    for trip in args.round_trips:
        print(
            f"\n{trip:.0f} ms: {rate_bars([row for row in rows if row['round_trip_ms'] == trip])}"
        )
    return {
        "mbit": args.mbit,
        "hardware": asdict(hardware),
        "rows": rows,
        "at_home": home,
        "crossings": crossed,
    }


def crossings(rows: Sequence[Row], home_seconds: float) -> list[Row]:
    """The round trip at which a mode across the WAN takes as long as ar does in one process: its
    time is a line over the round trip."""
    found = []
    for mode, temperature in dict.fromkeys((row["mode"], row["temperature"]) for row in rows):
        own = [row for row in rows if (row["mode"], row["temperature"]) == (mode, temperature)]
        if len(own) < 2:
            continue
        trips, seconds = ([row[key] for row in own] for key in ("round_trip_ms", "seconds"))
        slope, base = np.polyfit(trips, seconds, 1)
        trip = max(0.0, (home_seconds - base) / slope)
        found.append({"mode": mode, "temperature": temperature, "round_trip_ms": trip})
    return found


def rate_bars(rows: Sequence[Row]) -> str:
    by_mode = {row["mode"]: row for row in reversed(rows)}
    ar, sweep = by_mode["ar"], by_mode["sweep K=1"]
    ahead = sweep["bytes_per_second"] / ar["bytes_per_second"]
    return (
        f"sweep K=1 is {ahead:.1f}x ar (bar at 100 ms: 40) and {sweep['of_limit']:.3f} of its limit"
        f" (0.85); ar is {ar['of_limit']:.3f} of its own (0.9)"
    )


def quality(args: argparse.Namespace) -> Row:
    compute = compute_of(args)
    model, judge = Model.load(args.run, compute, args.readout), load_judge(args.reference, compute)
    rows = []
    for temperature in (0.0, 1.0):
        rows += measured(model, judge, args.prompts, temperature, args.bytes, args.modes)
    print(table(rows, JUDGED))
    for temperature in (0.0, 1.0):
        ce = {row["mode"]: row["ce"] for row in rows if row["temperature"] == temperature}
        better = ce[INDEPENDENT] - ce["sweep K=1"]
        print(f"temperature {temperature:.0f}: sweep K=1 is {better:.3f} nats better than"
              " independent guesses (bar: 0.5)")  # fmt: skip
    return {"reference": str(args.reference), "readout": args.readout, "rows": rows}


def scored(args: argparse.Namespace) -> np.ndarray:
    text = np.fromfile(args.text, np.uint8)
    return evaluation_windows(text, RunDir.open(args.run).config.model.window, args.windows)


def weights(args: argparse.Namespace) -> Row:
    rows = held_differences(args.run, compute_of(args), args.readout, scored(args))
    print(table(rows, HELD))
    return {"windows": args.windows, "rows": rows}


def wire(args: argparse.Namespace) -> Row:
    windows = scored(args)
    rows = wire_differences(args.run, compute_of(args), args.readout, windows)
    print(table(rows, WIRED))
    return {"windows": len(windows), "rows": rows}


def concurrency(args: argparse.Namespace) -> Row:
    from serving_loopback import at_once, ring

    blocks = range(1, RunDir.open(args.run).config.block_count)
    prompt = args.prompts[0].decode(errors="replace")
    stages = {f"stage-{block}": str(block) for block in blocks}
    with (
        tempfile.TemporaryDirectory() as scratch,
        ring(args.run, Path(scratch) / "ring", stages) as found,
    ):
        rows = at_once(found, [1, 32], prompt, args.bytes)
    ratio = rows[1]["bytes_per_second"] / rows[0]["bytes_per_second"]
    print(table(rows, TOGETHER))
    print(f"{ratio:.2f}x (bar: 3 on a CPU)")
    return {"rows": rows, "ratio": ratio}


def failover(args: argparse.Namespace) -> Row:
    from serving_loopback import failovers, ring

    last = RunDir.open(args.run).config.block_count - 1
    stages = {"one": "1", "two": f"2-{last}", "spare": f"2-{last}"}
    prompt = args.prompts[0].decode(errors="replace")
    with (
        tempfile.TemporaryDirectory() as scratch,
        ring(args.run, Path(scratch) / "ring", stages) as found,
    ):
        rows = failovers(found, args.times, prompt, args.bytes)
    pauses = [row["pause_seconds"] for row in rows]
    print(f"{len(rows)} kills: pause {statistics.median(pauses):.2f} s in the median,"
          f" {max(pauses):.2f} s at worst (bar: 3);"
          f" {sum(row['same'] for row in rows)} answers as if nothing had been")  # fmt: skip
    return {"rows": rows}


PARTS: dict[str, Part] = {
    part.__name__: part for part in (wan, quality, wire, weights, concurrency, failover)
}


def compute_of(args: argparse.Namespace) -> Compute:
    return resolve(args.device, args.precision)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, help="prompts and scored text")
    parser.add_argument("--reference", type=Path, help="a run trained end to end")
    parser.add_argument("--bytes", type=int, default=128, help="of an answer")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--prompt-bytes", type=int, default=64)
    parser.add_argument("--prompt-count", type=int, default=64)
    parser.add_argument("--readout", default="product", choices=["product", "final"])
    parser.add_argument("--round-trips", nargs="+", type=float, default=[10.0, 50.0, 100.0, 200.0])
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument(
        "--windows", type=int, default=512, help="of text that `wire` and `weights` score"
    )
    parser.add_argument("--times", type=int, default=10, help="kills of `failover`")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    args = parser.parse_args()
    if args.part == "quality" and not args.reference:
        parser.error("quality needs a --reference")
    text = np.fromfile(args.text, np.uint8)
    args.prompts = fixed_prompts(text, args.prompt_count, args.prompt_bytes)
    return args


def main() -> None:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    here = {**provenance(), "cpus": os.cpu_count(), "load_before": os.getloadavg()[0]}
    told = PARTS[args.part](args)
    report = {**here, "load_after": os.getloadavg()[0], **told}
    (args.out / f"{args.part}.json").write_text(json.dumps(report, indent=1))
    print(f"commit {report['commit']}, {report['device']}, {here['cpus']} CPUs,"
          f" load {here['load_before']:.1f} to {report['load_after']:.1f}")  # fmt: skip


if __name__ == "__main__":
    main()
