"""Measures what somebody waits for first: `--help`, and the first step of a worker that joins.

    PYTHONPATH=src python bench/first_steps.py --config demo --out DIR [--rounds 5]

A worker joins a run whose coordinator, with its validator, is on the same machine. It starts in an
empty folder and with an empty cache, so it loads torch, prepares the run's text, downloads a block
and trains. Beside the time on the clock stand the worker's processor time, which is nearly the same
on an idle machine, and the share of the cores that other programs used. Linux only. Writes
first_steps.json into DIR and prints a table.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contenders import markdown
from crowded import CORES, machine_seconds, process_seconds
from quality import provenance

COMMAND = [sys.executable, "-m", "blocktrain"]
HELP_RUNS = 20
VALIDATOR_SECONDS = 12.0  # until the coordinator's validator has started


def help_times() -> list[dict[str, float]]:
    def run() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*COMMAND, "--help"], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    run()
    return [timed(run) for _ in range(HELP_RUNS)]


def timed(run: Callable[[], float]) -> dict[str, float]:
    """`run` returns the processor time of what it did."""
    machine, began = machine_seconds(), time.perf_counter()
    own = run()
    wall = time.perf_counter() - began
    others = (machine_seconds() - machine - own) / wall / CORES
    return {"wall_s": wall, "processor_s": own, "others": max(0.0, others)}


def joining_times(config: str, rounds: int) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [*COMMAND, "coordinator", "--json", "--listen", "127.0.0.1:0"]
        command += ["--config", config, "--data-dir", str(folder / "run")]
        with (
            (folder / "coordinator.log").open("w") as log,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as coordinator,
        ):
            try:
                assert coordinator.stdout
                invite = json.loads(coordinator.stdout.readline())["invite"]
                time.sleep(VALIDATOR_SECONDS)
                return [joined(invite, folder / f"worker-{index}") for index in range(rounds)]
            finally:
                coordinator.terminate()


def joined(invite: str, folder: Path) -> dict[str, float]:
    folder.mkdir()
    environment = {**os.environ, "BLOCKTRAIN_CACHE": str(folder / "cache")}

    def until_first_step() -> float:
        worker = subprocess.Popen(
            [*COMMAND, "worker", invite, "--json"],
            stdout=subprocess.PIPE, text=True, cwd=folder, env=environment,
        )  # fmt: skip
        with worker:
            assert worker.stdout
            for line in worker.stdout:
                event = json.loads(line)
                if event["kind"] == "training" and event["step"] >= 1:
                    break
            spent = process_seconds(worker)
            worker.kill()
        return spent

    return timed(until_first_step)


def row(name: str, times: list[dict[str, float]]) -> list[str]:
    def cell(key: str) -> str:
        values = [each[key] for each in times]
        return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"

    return [name, *map(cell, ("wall_s", "processor_s", "others")), str(len(times))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--config", default="demo")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    helps, joins = help_times(), joining_times(args.config, args.rounds)
    report: dict[str, Any] = {**provenance(), "cores": CORES, "help": helps, "joining": joins}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "first_steps.json").write_text(json.dumps(report, indent=1))
    rows = [row("`--help`", helps), row(f"first step of a worker, {args.config}", joins)]
    header = "what | seconds | processor seconds | share of the cores used by others | runs"
    print("\n".join(markdown("First steps: median (range)", header, rows)))


if __name__ == "__main__":
    main()
