"""Measures how long `serve` takes from its start to the first token, and three stages on loopback
against one process.

    PYTHONPATH=src:. python bench/serving_start.py PART RUN --out DIR

Parts:

    start     seconds until `serve` accepts requests and until the first token, for a first start
              (which computes fingerprints of the weights) and for later ones; the run's files are
              in the page cache
    loopback  tokens per second of `ar`, 64-token prompts: a router and three stages on this
              machine, and the same blocks in one process; with one and with all threads per process

RUN is a run folder; `serving_cpu.py --model` makes one. Writes DIR/serving-PART.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from blocktrain.environment import PROGRAM, SPIN_COUNT, cores, sleep_at_barriers
from blocktrain.storage.run_dir import RunDir
from blocktrain.training.device import resolve
from quality import provenance
from serving import Row, table
from serving_cpu import ours, prompts_of, timed
from serving_ring import free_port, ring

START_SECONDS, POLL_SECONDS = 280.0, 0.02
STARTED = {
    "start": "{start}",
    "accepts requests after s": "{ready_seconds:.1f}",
    "first token after s": "{first_seconds:.1f}",
}
LOOPED = {
    "where": "{where}",
    "threads per process": "{threads}",
    "tokens/s": "{tokens_per_second:.2f}",
    "of one process": "{of_one:.2f}",
}
PROMPT = "x" * 64


@contextmanager
def served(run: Path, cache: Path, options: list[str], log: Path) -> Iterator[httpx.Client]:
    """`serve` on this machine, from the moment it is started."""
    address = f"127.0.0.1:{free_port()}"
    environment = {**os.environ, "BLOCKTRAIN_CACHE": str(cache)}
    command = [*PROGRAM, "serve", str(run), "--listen", address, *options]
    with (
        log.open("wb") as file,
        httpx.Client(base_url=f"http://{address}", timeout=300.0) as client,
    ):
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        try:
            yield client
        finally:
            process.terminate()
            process.wait(30.0)


def wait_until_ready(client: httpx.Client, log: Path) -> None:
    ends = time.monotonic() + START_SECONDS
    while True:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        if time.monotonic() > ends:
            raise RuntimeError(f"`serve` did not start:\n{log.read_text()[-2000:]}")
        time.sleep(POLL_SECONDS)


def start(args: argparse.Namespace, scratch: Path) -> Row:
    size = sum(path.stat().st_size for path in args.run.glob("*.safetensors"))
    for path in args.run.glob("*.safetensors"):
        path.read_bytes()  # into the page cache
    rows = []
    for name in ("first", *["later"] * args.times):
        log, began = scratch / "log", time.monotonic()
        with served(args.run, scratch / "cache", args.options, log) as client:
            wait_until_ready(client, log)
            ready = time.monotonic() - began
            request = {"prompt": PROMPT, "max_tokens": 1, "mode": "ar"}
            client.post("/v1/completions", json=request).raise_for_status()
            first = time.monotonic() - began
        rows.append({"start": name, "ready_seconds": ready, "first_seconds": first})
    print(f"{size / 1e9:.2f} GB", table(rows, STARTED), sep="\n")
    return {"bytes": size, "options": args.options, "rows": rows}


def loopback(args: argparse.Namespace, scratch: Path) -> Row:
    import torch

    run, rows = RunDir.open(args.run), []
    torch.set_num_threads(cores())
    for _ in range(2):  # the second is warm
        row, _ = timed(ours(run, args.precision, "full"), prompts_of(1), args.tokens)
    one = 1 / row["step_seconds"]
    rows.append({"where": "one process", "threads": cores(), "tokens_per_second": one})
    for threads in sorted({1, cores()}):
        options = ["--device", "cpu", "--precision", args.precision, "--threads", str(threads)]
        place, program = scratch / f"ring-{threads}", PROGRAM
        with ring(program, args.run, run.config.block_count, place, options) as (_, client):
            rate = median(_rate(client, args.tokens) for _ in range(args.times + 1))
        rows.append({
            "where": "a router and three stages", "threads": threads, "tokens_per_second": rate,
        })  # fmt: skip
    rows = [{**row, "of_one": row["tokens_per_second"] / one} for row in rows]
    print(table(rows, LOOPED))
    return {"precision": args.precision, "rows": rows}


def _rate(client: httpx.Client, count: int) -> float:
    """Tokens per second after the first."""
    seconds = []
    for most in (1, count):
        request = {"prompt": prompts_of(1)[0], "max_tokens": most, "mode": "ar", "temperature": 0}
        began = time.perf_counter()
        answer = client.post("/v1/completions", json=request).raise_for_status().json()
        seconds.append(time.perf_counter() - began)
        assert answer["usage"]["completion_tokens"] == most
    return (count - 1) / (seconds[1] - seconds[0])


PARTS: dict[str, Callable[[argparse.Namespace, Path], Row]] = {"start": start, "loopback": loopback}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("options", nargs="*", help="more options of `serve`, after --")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        found: dict[str, Any] = PARTS[args.part](args, Path(scratch))
    report = {**provenance(), "cores": cores(), **found}
    (args.out / f"serving-{args.part}.json").write_text(json.dumps(report, indent=1))
    print(f"commit {report['commit']}, {resolve('cpu', 'fp32').name}")


if __name__ == "__main__":
    if not SPIN_COUNT.is_set:  # before torch is imported
        sleep_at_barriers()
        os.execv(sys.executable, [sys.executable, *sys.argv])
    main()
