"""Measures how participation, deadlines, quorum, grace and lease length change what is learned.

    PYTHONPATH=src python bench/participation.py --out DIR [--seeds 0 1] [--only quorum grace]

Every row is a simulation with real training (configs/simulate-learn.toml) on the same text. Runs
that take longer learn more. So beside the score at its end, every row has its score at the moment
when the first run of its table ended. One process, one core. Writes participation.json into DIR
after every run, and resumes from it. Prints tables.
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from blocktrain.simulate.learning import simulate_learning
from blocktrain.simulate.report import Report
from blocktrain.simulate.scenario import Scenario, load_scenario
from quality import provenance

PRESET = Path(__file__).resolve().parent.parent / "configs" / "simulate-learn.toml"
SHORT = ("train.steps=300", "simulate.sample_seconds=10")
LATE = ("simulate.straggler_factor=50", "simulate.straggler_every=1.0",
        "simulate.straggler_seconds=1e6")  # fmt: skip
# Home machines: present three quarters of the time, a quarter of them slow every other minute.
ROUGH = ("simulate.availability=0.75", "simulate.straggler_share=0.25",
         "simulate.straggler_every=60.0", "simulate.straggler_seconds=60.0")  # fmt: skip
# By name: the setting that is varied, its values, and other settings.
TABLES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "availability": ("simulate.availability", ("1.0", "0.75", "0.5", "0.25"), ()),
    "late": ("simulate.straggler_share", ("0.0", "0.25", "0.5", "0.75"), LATE),
    "quorum": ("swarm.quorum", ("1", "2", "3"), ROUGH),
    "grace": ("swarm.grace_seconds", ("0.0", "5.0", "15.0"), ROUGH),
    "steps": ("swarm.most_steps", ("5", "15", "60"), (*ROUGH, "swarm.lease_seconds=60.0")),
    "deadline": ("swarm.deadline_factor", ("1.5", "4.0", "8.0"),
                 (*ROUGH, "swarm.shortest_deadline=10.0")),
}  # fmt: skip


def scenario_of(table: str, value: str, seed: int) -> Scenario:
    varied, _, others = TABLES[table]
    seeds = (f"train.seed={seed}", f"simulate.seed={seed}")
    return load_scenario(PRESET, (*SHORT, *seeds, *others, f"{varied}={value}"))


def name_of(scenario: Scenario) -> str:
    """Equal for rows of two tables that are the same run."""
    return json.dumps(scenario.to_dict(), sort_keys=True)


def run_simulation(scenario: Scenario) -> dict[str, Any]:
    began = time.process_time()
    report = simulate_learning(scenario)
    return {"found": asdict(report), "cpu_seconds": time.process_time() - began, **numbers(report)}


def numbers(report: Report) -> dict[str, float]:
    assert report.ce is not None and report.finished
    return {
        "ce": report.ce,
        "minutes": report.virtual_seconds / 60.0,
        "in_time": report.participation,
        "stale": report.mean_staleness,
        "useful": report.useful_share,
        "waiting": report.utilisation["waiting"],
        "versions": statistics.mean(report.versions),
    }


def ce_at(run: dict[str, Any], minutes: float) -> float:
    """The last score before this time."""
    scores = [s["ce"] for s in run["found"]["samples"] if s["seconds"] <= 60.0 * minutes]
    return float(scores[-1])


def print_table(table: str, rows: dict[str, list[dict[str, Any]]]) -> None:
    first_end = min(run["minutes"] for runs in rows.values() for run in runs)
    print(
        f"\n| {TABLES[table][0]} | CE at the end | CE after {first_end:.1f} min | minutes"
        " | in time | versions behind | merged of trained | waiting | versions |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for value, runs in rows.items():

        def mean(key: str, runs: list[dict[str, Any]] = runs) -> float:
            return statistics.mean(run[key] for run in runs)

        early = statistics.mean(ce_at(run, first_end) for run in runs)
        print(
            f"| {value} | {mean('ce'):.3f} | {early:.3f} | {mean('minutes'):.1f}"
            f" | {100 * mean('in_time'):.0f}% | {mean('stale'):.2f} | {100 * mean('useful'):.0f}%"
            f" | {100 * mean('waiting'):.0f}% | {mean('versions'):.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "participation.json"
    finished: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for seed in args.seeds:
        for table in args.only:
            for value in TABLES[table][1]:
                scenario = scenario_of(table, value, seed)
                if name_of(scenario) not in finished:
                    finished[name_of(scenario)] = {**provenance(), **run_simulation(scenario)}
                    file.write_text(json.dumps(finished, indent=1))
    for table in args.only:
        rows = {
            value: [finished[name_of(scenario_of(table, value, seed))] for seed in args.seeds]
            for value in TABLES[table][1]
        }
        print_table(table, rows)


if __name__ == "__main__":
    main()
