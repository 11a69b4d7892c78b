"""Measures how far honest results of the same training steps differ between machines.

    PYTHONPATH=src:. python bench/replay.py --out FILE [--configs tiny tiny-cascade demo]
        [--warm-up 60] [--steps 1 6 25] [--starts 3]

Each block is trained for --warm-up steps in fp32 with one thread. From that state, and from later
ones, the same steps are trained by processes that compute differently: with other numbers of
threads, other instruction sets of the processor, without oneDNN, in bf16. Results are compared with
those of one thread in fp32 as a validator compares them (worker/replayer.py). Prints the largest
distances and the smallest cosine over all starts and blocks, and how many swarm/replay.py refuses.
Not measured: GPUs, and processors of other makers.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from blocktrain.config import Config, load_config
from blocktrain.data.corpus import Corpus, load_corpus
from blocktrain.protocol.check_messages import ReplayResult
from blocktrain.storage import tensor_file
from blocktrain.storage.tensor_file import Tensors
from blocktrain.swarm import replay
from blocktrain.training.device import resolve
from blocktrain.training.stored_models import load_block
from blocktrain.training.trainer import BlockTrainer
from blocktrain.worker.replayer import compare
from quality import provenance

ROOT = Path(__file__).resolve().parent.parent
State = tuple[Tensors, Tensors]


class Machine(NamedTuple):
    precision: str = "fp32"
    threads: int = 1
    onednn: bool = True
    capability: str = ""  # of ATen and MKL; empty: the best that the processor has


MACHINES = {
    "the same": Machine(),
    "2 threads": Machine(threads=2),
    "without oneDNN": Machine(onednn=False),
    "AVX2": Machine(capability="avx2"),
    "no vector instructions": Machine(capability="default"),
    "bf16": Machine("bf16"),
    "bf16, AVX2, 2 threads": Machine("bf16", threads=2, capability="avx2"),
}
REFERENCE = "the same"
MKL = {"avx2": "AVX2", "default": "SSE4_2"}


class Untrained:
    """Predecessors as they are initialised."""

    def version(self, block: int) -> None:
        return None

    def weights(self, block: int) -> Tensors:
        raise AssertionError("an untrained block has no version")


def trained(
    config: Config, block: int, corpus: Corpus, machine: Machine, first: int, steps: int,
    start: State | None,
) -> State:  # fmt: skip
    torch.set_num_threads(machine.threads)
    torch.backends.mkldnn.enabled = machine.onednn
    published = Untrained() if config.kind.reads_predecessors and block else None
    compute = resolve("cpu", machine.precision)
    trainer = BlockTrainer(config, block, corpus, compute, None, published, None)
    if start:
        load_block(trainer.module, start[0], "a state")
        trainer.take_moments(start[1])
    trainer.run(first, steps)
    trainer.close()
    return trainer.weights(), trainer.moments()


def write(path: Path, state: State) -> None:
    for part, tensors in zip(("weights", "moments"), state, strict=True):
        path.with_suffix(f".{part}").write_bytes(b"".join(tensor_file.encode(tensors)))


def read(path: Path) -> State:
    weights, moments = (
        tensor_file.decode(bytearray(path.with_suffix(f".{part}").read_bytes()))
        for part in ("weights", "moments")
    )
    return weights, moments


def cases(config: Config, args: argparse.Namespace) -> Iterator[tuple[int, int, int]]:
    """Block, first step, and how many steps."""
    for block in range(config.block_count):
        for number in range(1, args.starts + 1):
            for steps in args.steps:
                yield block, number * args.warm_up, steps


def make_starts(config: Config, corpus: Corpus, args: argparse.Namespace, folder: Path) -> None:
    for block in range(config.block_count):
        state = None
        for number in range(args.starts):
            first = number * args.warm_up
            state = trained(config, block, corpus, Machine(), first, args.warm_up, state)
            write(folder / f"start-{block}-{first + args.warm_up}", state)
            state = read(folder / f"start-{block}-{first + args.warm_up}")


def train_all(config: Config, args: argparse.Namespace, folder: Path, name: str) -> None:
    """All cases on one machine; in a process of its own."""
    corpus = load_corpus(config.data)
    for block, first, steps in cases(config, args):
        start = read(folder / f"start-{block}-{first}")
        end = trained(config, block, corpus, MACHINES[name], first, steps, start)
        write(folder / f"{list(MACHINES).index(name)}-{block}-{first}-{steps}", end)


def measure(name: str, config: Config, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_starts(config, load_corpus(config.data), args, folder)
        for number, (machine, how) in enumerate(MACHINES.items()):
            environment = dict(os.environ)
            if how.capability:
                environment["ATEN_CPU_CAPABILITY"] = how.capability
                environment["MKL_ENABLE_INSTRUCTIONS"] = MKL[how.capability]
                environment["ONEDNN_MAX_CPU_ISA"] = MKL[how.capability].replace("SSE4_2", "SSE41")
            command = [sys.executable, __file__, *sys.argv[1:], "--configs", name]
            command += ["--folder", str(folder), "--machine", machine]
            subprocess.run(command, check=True, env=environment)
            for block, first, steps in cases(config, args):
                start, reference, other = (
                    read(folder / f"{part}-{block}-{first}{end}")
                    for part, end in (("start", ""), (0, f"-{steps}"), (number, f"-{steps}"))
                )
                found = compare(start[0], reference, other)
                rows.append({"machine": machine, "block": block, "first": first, "steps": steps,
                             "result": found.model_dump()})  # fmt: skip
    return rows


def table(name: str, rows: list[dict[str, Any]]) -> None:
    columns = ("machine", "steps", "identical", "cosine, least", "distance, most")
    print(f"\n{name}, compared with fp32 and 1 thread")
    print("| " + " | ".join((*columns, "moments, most", "refused")) + " |\n" + "|---" * 7 + "|")
    for machine, how in MACHINES.items():
        for steps in sorted({row["steps"] for row in rows}):
            cell = [
                ReplayResult(**row["result"])
                for row in rows
                if row["machine"] == machine and row["steps"] == steps
            ]
            refused = sum(bool(replay.disagreement(each, how.precision)) for each in cell)
            print(
                f"| {machine} | {steps} | {sum(each.identical for each in cell)} of {len(cell)}"
                f" | {min(each.cosine or 0 for each in cell):.6f}"
                f" | {max(each.distance or 0 for each in cell):.2g}"
                f" | {max(each.moments_distance or 0 for each in cell):.2g} | {refused} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--configs", nargs="+", default=["tiny", "tiny-cascade", "demo"])
    parser.add_argument("--set", action="append", default=[], metavar="SETTING=VALUE")
    parser.add_argument("--warm-up", type=int, default=60)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 6, 25])
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--machine", help=argparse.SUPPRESS)
    args = parser.parse_args()
    results = {}
    for name in args.configs:
        settings = ["train.device=cpu", "train.compile=false", *args.set]
        config = load_config(ROOT / "configs" / f"{name}.toml", settings)
        if args.machine:
            train_all(config, args, args.folder, args.machine)
            return
        results[name] = measure(name, config, args)
        table(name, results[name])
    args.out.write_text(json.dumps({**provenance(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
