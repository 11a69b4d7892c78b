"""Measures training speed next to other busy processes, for several settings of OpenMP threads.

    PYTHONPATH=src python bench/crowded.py --config configs/demo.toml --out DIR

One process per setting and priority trains block 0 with the project's own trainer: first alone,
then next to one or more busy loops, up to one per core. They take turns in every round. With
`--nice 0 10`, training at the usual priority is compared with a worker's, whose default is 10; the
last columns show what is left to the busy loops. A measurement is repeated if anything else used
more than --disturbed of the cores' time, and left out after --tries attempts. Linux only. Writes
crowded.json into DIR and prints a table.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from blocktrain.config import load_config
from blocktrain.training.device import resolve
from blocktrain.training.trainer import BlockTrainer
from contenders import argument_parser, markdown, random_corpus
from quality import provenance

CORES = os.cpu_count() or 1
SETTINGS: dict[str, dict[str, str]] = {
    "active": {"OMP_WAIT_POLICY": "ACTIVE"},
    "library's own": {},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "spin 1000": {"GOMP_SPINCOUNT": "1000"},
    "spin 3000": {"GOMP_SPINCOUNT": "3000"},
    "spin 5000": {"GOMP_SPINCOUNT": "5000"},
    "spin 8000": {"GOMP_SPINCOUNT": "8000"},
    "spin 10000": {"GOMP_SPINCOUNT": "10000"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
VARIABLES = {name for setting in SETTINGS.values() for name in setting}
WARMUP_STEPS = 20
START_SECONDS = 0.2  # until a busy loop is busy
LOOK_SECONDS = 0.3
BUSY_LOOP = """
import os
parent = os.getppid()
while os.getppid() == parent:  # also when this bench is killed
    for _ in range(1_000_000):
        pass
"""


class Training:
    """A process that trains when asked to, and says how many steps per second it made."""

    def __init__(self, args: argparse.Namespace, setting: str, nice: int) -> None:
        kept = {name: text for name, text in os.environ.items() if name not in VARIABLES}
        command = [sys.executable, sys.argv[0], "--worker", setting]
        command += ["--config", str(args.config), "--out", str(args.out), "--set", *args.set]
        command += ["--nice", str(nice)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**kept, **SETTINGS[setting]},
        )
        self._answer()

    def __enter__(self) -> "Training":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()

    def steps_per_second(self, seconds: float) -> float:
        assert self.process.stdin
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the training process ended with {self.process.wait()}")
        return line


def train(args: argparse.Namespace) -> None:
    """What the training process does: for every line with seconds, steps for that long."""
    os.nice(*args.nice)  # as a worker does
    config = load_config(args.config, args.set)
    compute = resolve(config.train.device, config.train.precision)
    trainer = BlockTrainer(config, 0, random_corpus(config.train.seed), compute, None)
    trainer.module.train()
    for _ in range(WARMUP_STEPS):
        trainer.train_step()
    print("ready", flush=True)
    for line in sys.stdin:
        first, started = trainer.step, time.perf_counter()
        while (passed := time.perf_counter() - started) < float(line):
            trainer.train_step()
        print((trainer.step - first) / passed, flush=True)


def undisturbed(args: argparse.Namespace, training: Training, busy: int) -> dict[str, float]:
    """A measurement next to this many busy loops; the last of --tries if none was undisturbed."""
    for _ in range(args.tries):
        wait_until_idle(args.disturbed, args.patience)
        row = measure(training, busy, args.seconds)
        if row["disturbed"] <= args.disturbed:
            break
    return row


def measure(training: Training, busy: int, seconds: float) -> dict[str, float]:
    with ExitStack() as stack:
        loops = [subprocess.Popen([sys.executable, "-c", BUSY_LOOP]) for _ in range(busy)]
        for loop in loops:
            stack.callback(loop.wait)
            stack.callback(loop.kill)
        time.sleep(START_SECONDS)
        processes = [training.process, *loops]
        before = machine_seconds() - sum(map(process_seconds, processes))
        loops_before = sum(map(process_seconds, loops))
        started = time.perf_counter()
        speed = training.steps_per_second(seconds)
        passed = time.perf_counter() - started
        others = machine_seconds() - sum(map(process_seconds, processes)) - before
        loops_share = (sum(map(process_seconds, loops)) - loops_before) / passed
    return {
        "steps_per_s": speed,
        "disturbed": max(0.0, others / passed / CORES),
        "loops_share": loops_share / min(busy, CORES) if busy else 1.0,
    }


def wait_until_idle(limit: float, patience: float) -> None:
    ends = time.monotonic() + patience
    while time.monotonic() < ends:
        before, started = machine_seconds(), time.perf_counter()
        time.sleep(LOOK_SECONDS)
        if (machine_seconds() - before) / (time.perf_counter() - started) / CORES <= limit:
            return


def machine_seconds() -> float:
    """Processor time that all processes have used; /proc/stat: user, nice, system, idle, ..."""
    ticks = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return (sum(ticks[:3]) + sum(ticks[5:8])) / os.sysconf("SC_CLK_TCK")


def process_seconds(process: "subprocess.Popen[Any]") -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def summary(rounds: list[list[dict[str, float]]], disturbed: float) -> dict[str, Any]:
    """Of one setting: steps/s by busy loops, and of every round the share of its idle speed."""
    quiet = [[row["disturbed"] <= disturbed for row in rows] for rows in rounds]
    counts = range(len(rounds[0]))
    return {
        "steps_per_s": [
            [rows[n]["steps_per_s"] for rows, fit in zip(rounds, quiet, strict=True) if fit[n]]
            for n in counts
        ],
        "of_idle": [
            [
                rows[n]["steps_per_s"] / rows[0]["steps_per_s"]
                for rows, fit in zip(rounds, quiet, strict=True)
                if fit[n] and fit[0]
            ]
            for n in counts
        ],
        "loops_share": [
            [rows[n]["loops_share"] for rows, fit in zip(rounds, quiet, strict=True) if fit[n]]
            for n in counts
        ],
        "left_out": sum(not fit for fits in quiet for fit in fits),
        "rounds": rounds,
    }


def table(settings: dict[str, dict[str, Any]], busy: list[int], seconds: float) -> list[str]:
    def cell(values: list[float], form: str) -> str:
        if not values:
            return "-"
        low, high = min(values), max(values)
        return f"{statistics.median(values):{form}} ({low:{form}}-{high:{form}})"

    shares = [f"of that next to {count} busy" for count in busy[1:]]
    left = [f"left to {count} busy" for count in busy[1:]]
    header = ["setting", "steps/s alone", *shares, *left, "left out"]
    rows = [
        [
            name,
            cell(found["steps_per_s"][0], ".1f"),
            *(cell(found["of_idle"][n], ".2f") for n in range(1, len(busy))),
            *(cell(found["loops_share"][n], ".2f") for n in range(1, len(busy))),
            str(found["left_out"]),
        ]
        for name, found in settings.items()
    ]
    title = f"Training next to busy processes: {CORES} cores, median (range) of {seconds:g} s each"
    return markdown(title, " | ".join(header), rows)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--disturbed", type=float, default=0.05, help="share of the cores")
    parser.add_argument("--tries", type=int, default=8, help="of a measurement that was disturbed")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds for an idle machine")
    parser.add_argument("--busy", type=int, nargs="+", default=range(CORES + 1), help="busy loops")
    parser.add_argument("--nice", type=int, nargs="+", default=[0], help="priorities of training")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    args = parser.parse_args()
    if args.worker:
        train(args)
        return
    contenders = {
        f"{setting}, nice {nice}": (setting, nice)
        for setting in args.settings
        for nice in args.nice
    }
    names, counts = list(contenders), sorted({0, *args.busy})
    rounds: dict[str, list[list[dict[str, float]]]] = {name: [] for name in names}
    with ExitStack() as stack:
        trainings = {
            name: stack.enter_context(Training(args, *each)) for name, each in contenders.items()
        }
        for index in range(args.rounds):
            first = index % len(names)
            for name in names:
                rounds[name].append([])
            for busy in counts:
                for name in names[first:] + names[:first]:
                    row = undisturbed(args, trainings[name], busy)
                    rounds[name][-1].append(row)
                    told = f"{row['steps_per_s']:.2f} steps/s, disturbed {row['disturbed']:.2f}"
                    print(f"round {index}, {busy} busy, {name}: {told}", flush=True)
    settings = {name: summary(rows, args.disturbed) for name, rows in rounds.items()}
    config = load_config(args.config, args.set)
    report = {
        **provenance(),
        "cores": CORES,
        "seed": config.train.seed,
        "seconds": args.seconds,
        "busy": counts,
        "config": config.to_dict(),
        "settings": settings,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "crowded.json").write_text(json.dumps(report, indent=1))
    print("\n".join(["", *table(settings, counts, args.seconds)]))


if __name__ == "__main__":
    main()
