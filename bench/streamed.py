"""Trains the last block of a large cascade on the CPU, with the frozen blocks before it in memory
and on disk, each in a process of its own: peak memory, time per step, and a hash of the weights.

    PYTHONPATH=src:bench python bench/streamed.py SHAPE --out DIR [--places PLACE ...] [--cap-gb N]

1b: 20 layers of width 2048 in 10 blocks. 7b: 32 layers of width 4096 in 16 blocks, like Llama 2's.
Weights are the initial ones, the text is random bytes, AdamW, fp32, seed 0. Peak memory is the
largest resident set, the mapped parts of files included. --cap-gb puts each process into a memory
control group (version 1, as root), which limits its page cache too. Writes streamed-SHAPE.json into
DIR and prints it.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from blocktrain.config import Config

SHAPES = {
    "1b": ["model.layers=20", "model.width=2048", "model.heads=16", "model.hidden=5632",
           "model.blocks=10"],
    "7b": ["model.layers=32", "model.width=4096", "model.heads=32", "model.hidden=11008",
           "model.blocks=16"],
}  # fmt: skip
SETTINGS = ["objective.kind=cascade", "objective.tail=1", "model.layer=llama", "model.taps=0",
            "model.window=128", "train.batch=1", "train.optimizer=adamw", "train.precision=fp32",
            "train.device=cpu", "train.checkpoint_layers=true", "train.seed=0"]  # fmt: skip
STEPS = 2
CGROUP = Path("/sys/fs/cgroup/memory")


class Untrained:
    """No block has a version yet."""

    def version(self, block: int) -> int | None:
        return None

    def weights(self, block: int) -> Any:
        raise AssertionError("untrained blocks have no stored weights")


def config_of(args: argparse.Namespace, place: str) -> Config:
    from blocktrain.config import load_config

    depths = f"model.depths={[2] * (10 if args.shape == '1b' else 16)}"
    chosen = [*SHAPES[args.shape], *SETTINGS, depths, f"train.frozen_in={place}"]
    tiny = Path(__file__).resolve().parent.parent / "configs" / "tiny.toml"
    return load_config(tiny, [*chosen, f"train.steps={STEPS}"])


def worker(args: argparse.Namespace) -> dict[str, Any]:
    import hashlib

    from blocktrain.config.sizes import block_sizes
    from blocktrain.training.device import resolve
    from blocktrain.training.estimation import memory_by_block
    from blocktrain.training.memory_check import CPU_ACTIVATIONS, PROCESS_BYTES
    from blocktrain.training.trainer import BlockTrainer
    from contenders import random_corpus

    config = config_of(args, args.worker)
    block = config.block_count - 1
    with tempfile.TemporaryDirectory(dir=args.out) as scratch:
        compute, corpus = resolve("cpu", "fp32"), random_corpus(0)
        trainer = BlockTrainer(
            config, block, corpus, compute, None, Untrained(), scratch=Path(scratch)
        )
        trainer.module.train()
        times = []
        for _ in range(STEPS):
            started = time.monotonic()
            trainer.train_step()
            times.append(time.monotonic() - started)
        trainer.close()
    digest = hashlib.sha256()
    for _, parameter in sorted(trainer.module.named_parameters()):
        digest.update(parameter.detach().numpy().tobytes())
    sizes = list(block_sizes(config))
    return {
        "frozen blocks": args.worker,
        "parameters of all trunks, millions": round(sum(each.trunk for each in sizes) / 1e6),
        "trained parameters, millions": round(sizes[block].parameters / 1e6),
        "peak resident memory, GB": round(1024 * peak_kib() / 1e9, 2),
        "estimate, GB": round(
            (PROCESS_BYTES + memory_by_block(config, CPU_ACTIVATIONS)[block]) / 1e9, 2
        ),
        "seconds of the first step, files written": round(times[0], 1),
        "seconds of the next step": round(times[1], 2),
        "weights": digest.hexdigest()[:16],
    }


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measured(args: argparse.Namespace, place: str) -> dict[str, Any]:
    words = [sys.executable, __file__, args.shape, "--out", str(args.out), "--worker", place]
    group = CGROUP / f"streamed-{os.getpid()}"
    if args.cap_gb:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(int(args.cap_gb * 1e9)))
        words = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh", *words]
    try:
        done = subprocess.run(words, check=False, stdout=subprocess.PIPE, text=True)
    finally:
        if args.cap_gb:
            group.rmdir()
    if done.returncode:
        return {"frozen blocks": place, "ended with": done.returncode, "cap, GB": args.cap_gb}
    found: dict[str, Any] = json.loads(done.stdout)
    return found | {"cap, GB": args.cap_gb}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--places", nargs="+", default=["memory", "disk"])
    parser.add_argument("--cap-gb", type=float)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.worker:
        print(json.dumps(worker(args)))
        return
    from quality import provenance

    rows = []
    for place in args.places:
        rows.append(measured(args, place))
        print(json.dumps(rows[-1]), flush=True)
    result = {**provenance(), "results": rows}
    (args.out / f"streamed-{args.shape}.json").write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
