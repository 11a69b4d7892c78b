"""Starts 20 runs that are far too large for this machine, and checks that each is refused at once.

    PYTHONPATH=src python bench/oversized.py --out DIR

Each is started by `blocktrain train` in a process of its own. It must end with the exit code of a
DeviceError, within --seconds, without having used --most-mb of memory, and its message must name
the setting that is too large. Writes oversized.json into DIR and prints a table.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# The setting that the message must name, and what is set.
CASES = [
    ("model.width", ["model.width=65536", "model.heads=512", "model.layers=96", "model.blocks=96"]),
    ("model.width", ["model.width=1048576", "model.heads=4096"]),
    ("model.width", ["model.width=131072", "model.heads=1024", "train.checkpoint_layers=true"]),
    ("model.layers", ["model.layers=1000000", "model.blocks=10"]),
    ("model.layers", ["model.layers=40000", "model.width=1024", "model.heads=16"]),
    ("model.blocks", ["model.layers=1024", "model.blocks=1", "model.width=2048"]),
    ("model.width", ["objective.kind=cascade", "model.layers=512", "model.width=4096"]),
    ("model.window", ["model.window=100000000"]),
    ("model.window", ["model.window=1000000", "train.batch=8"]),
    ("train.batch", ["train.batch=1000000"]),
    ("train.accumulate", ["train.batch=65536", "model.width=512"]),
    ("train.accumulate", ["train.batch=4096", "model.window=4096", "objective.kind=end_to_end"]),
    ("train.checkpoint_layers", ["train.batch=4", "model.layers=96", "model.blocks=1",
                                 "model.window=2048", "model.width=256"]),
    ("model.mlp_ratio", ["model.mlp_ratio=1000000.0"]),
    ("objective.target_dim", ["objective.target_dim=1000000000"]),
    ("objective.sigma_rank", ["objective.sigma_rank=100000000"]),
    ("objective.tail", ["objective.kind=cascade", "objective.tail=1000000"]),
    ("data.tokenizer", ["data.tokenizer=bpe:1000000000"]),
    ("model.hidden", ["model.layer=llama", "model.hidden=1000000000"]),
    ("model.width", ["objective.kind=cascade", "model.width=32768", "model.heads=256",
                     "model.layers=64", "model.blocks=16"]),
]  # fmt: skip


def refusal(config: Path, name: str, overrides: list[str]) -> dict[str, Any]:
    options = [word for override in overrides for word in ("--set", override)]
    program = [sys.executable, "-m", "blocktrain.cli.main", "train", "--config", str(config)]
    with tempfile.TemporaryDirectory() as folder:
        command = [*program, *options, "--set", "train.device=auto", "--out", f"{folder}/run"]
        started = time.perf_counter()
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.stderr
        message = process.stderr.read().strip()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - started
    return {
        "names": name,
        "settings": overrides,
        "exit_code": process.returncode,
        "seconds": seconds,
        "processor_seconds": usage.ru_utime + usage.ru_stime,
        "peak_mb": usage.ru_maxrss / 1e3,
        "is_named": f"{name}=" in message,
        "message": message,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("configs/demo.toml"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=3.0, help="within which it must end")
    parser.add_argument("--most-mb", type=float, default=500.0, help="memory it may use")
    args = parser.parse_args()
    rows = [refusal(args.config, *case) for case in CASES]
    for row in rows:
        in_time, is_small = row["seconds"] < args.seconds, row["peak_mb"] < args.most_mb
        row["ok"] = row["exit_code"] == 6 and row["is_named"] and in_time and is_small
        verdict = "ok" if row["ok"] else "FAILED"
        print(f"{verdict:6s} {row['seconds']:.2f} s  {row['peak_mb']:.0f} MB  {row['settings']}")
        print(f"       {row['message']}")
    passed = sum(row["ok"] for row in rows)
    slowest = max(row["seconds"] for row in rows)
    print(f"{passed} of {len(rows)} refused and named; the slowest took {slowest:.2f} s")
    from quality import provenance  # loads torch, whose memory the cases would seem to use

    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "oversized.json").write_text(json.dumps({**provenance(), "rows": rows}, indent=1))
    sys.exit(passed < len(rows))


if __name__ == "__main__":
    main()
