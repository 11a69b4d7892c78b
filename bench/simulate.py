"""Measures the speed of the simulation with 100,000 virtual workers and a million leases.

    PYTHONPATH=src python bench/simulate.py --out DIR [--workers 100000] [--leases 1000000]
        [--codec none]

One process, one core. Workers differ in speed and bandwidth, come and go, and some straggle; blocks
are merged when they are due. Writes simulate.json into DIR and prints a table.
"""

import argparse
import json
import os
import resource
import time
from dataclasses import asdict
from pathlib import Path

from blocktrain.codec import CODECS
from blocktrain.config import build
from blocktrain.simulate.scenario import Scenario
from blocktrain.simulate.simulation import simulate
from quality import provenance

BLOCKS = 16
LEASE_STEPS = 31.0  # mean, for leases of half a minute at about one step per second


def make_scenario(workers: int, leases: int, codec: str) -> Scenario:
    quorum = max(1, workers // BLOCKS // 4)
    return build(
        Scenario,
        {
            "model": {"layers": BLOCKS, "blocks": BLOCKS},
            "train": {"steps": int(leases * LEASE_STEPS / BLOCKS)},
            "swarm": {
                "quorum": quorum,
                "grace_seconds": 5.0,
                "most_stale": 8,
                "codec": codec,
            },
            "simulate": {
                "workers": workers,
                "block_megabytes": 5.0,
                "steps_per_second": 1.0,
                "coordinators": BLOCKS,
                "merge_megabytes": 5000.0,
                "availability": 0.9,
                "join_seconds": 60.0,
                "lost_share": 0.02,
                "straggler_share": 0.1,
            },
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=100_000)
    parser.add_argument("--leases", type=int, default=1_000_000)
    parser.add_argument("--codec", choices=CODECS, default="none")
    args = parser.parse_args()
    scenario = make_scenario(args.workers, args.leases, args.codec)
    began, cpu_began = time.perf_counter(), time.process_time()
    result = simulate(scenario)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    report = {
        **provenance(), "cpus": os.cpu_count(), "seconds": seconds, "cpu_seconds": cpu_seconds,
        "memory": memory, "found": asdict(result),
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "simulate.json").write_text(json.dumps(report, indent=1))
    print("| workers | leases | events | seconds | of a core | memory |\n|---|---|---|---|---|---|")
    print(
        f"| {result.workers:,} | {result.leases_given:,} | {result.events:,} | {seconds:.1f}"
        f" | {cpu_seconds:.1f} | {memory / 1e6:,.0f} MB |"
    )
    print(
        f"{result.virtual_seconds:,.0f} virtual seconds, finished: {result.finished},"
        f" training {100 * result.utilisation['training']:.0f}% of the time,"
        f" in time {100 * result.participation:.1f}%, refused {sum(result.refused.values()):,}"
    )


if __name__ == "__main__":
    main()
