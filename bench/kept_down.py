"""Measures how much quality a run loses if the deltas of its versions are sparse.

    PYTHONPATH=src python bench/kept_down.py --out DIR [--workers 1 4] [--down 64 128 256 0]

Several workers train one small model end to end, on one machine and without a network. In every
round each worker trains its own batches from the newest version, keeps its own optimizer and its
residual, and sends a sparse update. The merge is the coordinator's own. --kept is
swarm.top_k_per_4096 and --down swarm.top_k_per_4096_down; with --down 0 versions are published
whole. The first row of each number of workers sends everything whole. Writes kept_down.json into
DIR and prints a table.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from blocktrain.codec.frames import encode
from blocktrain.codec.sparse import Sparse
from blocktrain.config import Config, load_config
from blocktrain.data.corpus import Corpus, evaluation_windows, load_corpus
from blocktrain.model.stack import assemble, initial_block, new_block
from blocktrain.numerics import Floats
from blocktrain.numerics.merge import MergeRule
from blocktrain.protocol.messages import Blob, Lease
from blocktrain.storage import tensor_file
from blocktrain.storage.blobs import Blobs
from blocktrain.storage.chunks import LocalChunks
from blocktrain.storage.merging import Compression, Merged, MergeInput, merge_blobs
from blocktrain.storage.tensor_file import Tensors
from blocktrain.training.device import resolve
from blocktrain.training.evaluate import evaluate
from blocktrain.training.stored_models import load_block
from blocktrain.worker.lease_trainer import LeaseTrainer
from quality import provenance

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = [
    "objective.kind=end_to_end", "model.layers=2", "model.blocks=1", "model.window=32",
    "train.batch=4", "train.device=cpu", "train.precision=fp32",
]  # fmt: skip
WINDOWS = 256


class Worker:
    """Trains from any version, and keeps what its updates left out."""

    def __init__(
        self, config: Config, corpus: Corpus, kept: int, numbers: int, folder: Path
    ) -> None:
        self.trainer = LeaseTrainer(config, 0, corpus, resolve("cpu", "fp32"), folder)
        self.codec = Sparse(kept) if kept else None
        self.owed = np.zeros(numbers, np.float32)

    def update(self, lease: Lease, base: Tensors, blobs: Blobs) -> MergeInput:
        trained = self.trainer.run(lease, base, _nobody, lambda _: None, lambda: False)
        assert trained is not None
        if self.codec is None:
            return MergeInput(lease.lease, blobs.write(tensor_file.encode(trained.weights)), 1.0)
        learned = [np.subtract(trained.weights[name], base[name]).ravel() for name in sorted(base)]
        left_out: list[Floats] = []
        news = np.concatenate(learned) + self.owed
        blob = blobs.write(encode(news, self.codec, left_out.append))
        self.owed = np.concatenate(left_out)
        return MergeInput(lease.lease, blob, 1.0, encoded=True)


def _nobody(predecessor: object) -> Tensors:
    raise AssertionError("an end-to-end model reads no other block")


def train(
    config: Config, corpus: Corpus, workers: int, rounds: int, steps: int, kept: int, down: int
) -> dict[str, Any]:
    """`kept` 0: updates go up whole."""
    with tempfile.TemporaryDirectory() as scratch:
        blobs = Blobs(LocalChunks(Path(scratch) / "chunks", sync=False))
        start = {
            name: p.detach().numpy() for name, p in initial_block(config, 0).named_parameters()
        }
        numbers = sum(tensor.size for tensor in start.values())
        merged = Merged(blobs.write(tensor_file.encode(start)), None)
        crew = [
            Worker(config, corpus, kept, numbers, Path(scratch) / str(number))
            for number in range(workers)
        ]
        up, lengths = [], []
        for number in range(rounds):
            updates = []
            for place, worker in enumerate(crew):
                lease = _lease(number, place, workers, steps, merged.weights)
                updates.append(worker.update(lease, _read(blobs, merged.weights), blobs))
            up += [update.end.size for update in updates]
            compression = Compression(Sparse(down), merged.residual) if down else None
            merged = merge_blobs(blobs, merged.weights, updates, None, MergeRule(), compression)
            lengths.append((merged.delta or merged.weights).size)
        weights = _read(blobs, merged.weights)
        owed = _norm(_read(blobs, merged.residual)) if merged.residual else 0.0
    return {
        "workers": workers, "kept": kept, "down": down, "ce": score(config, corpus, weights),
        "up_bytes": float(np.mean(up)), "down_bytes": float(np.mean(lengths)),
        "raw_bytes": 4 * numbers, "owed": owed,
    }  # fmt: skip


def _lease(number: int, place: int, workers: int, steps: int, base: Blob) -> Lease:
    """As a coordinator gives them to workers that all ask at once."""
    first = (number * workers + place) * steps
    return Lease(
        lease=f"lease{first:08d}", fence=1, block=0, base_version=number, base=base,
        first_batch=first, steps=steps, schedule_start=number * workers * steps,
        schedule_stride=workers, seconds_left=60.0,
    )  # fmt: skip


def _read(blobs: Blobs, blob: Blob) -> Tensors:
    return tensor_file.decode(bytearray(blobs.reader(blob).read(0, blob.size)))


def _norm(weights: Tensors) -> float:
    return float(
        np.sqrt(sum(np.square(tensor, dtype=np.float64).sum() for tensor in weights.values()))
    )


def score(config: Config, corpus: Corpus, weights: Tensors) -> float:
    block = new_block(config, 0)
    load_block(block, weights, "the last version")
    window = config.model.window
    windows = evaluation_windows(corpus.split("valid", window), window, WINDOWS)
    return evaluate(assemble(config, [block]), windows, draws=1).default.ce


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--kept", type=int, default=64)
    parser.add_argument("--down", type=int, nargs="+", default=[64, 128, 256, 512, 0])
    parser.add_argument("--steps", type=int, default=10, help="of a lease")
    parser.add_argument("--total", type=int, default=1600, help="steps of all workers together")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = []
    for workers in args.workers:
        for kept, down in [(0, 0), *((args.kept, down) for down in args.down)]:
            config = load_config(
                ROOT / "configs" / "tiny.toml",
                [*SETTINGS, f"train.steps={args.total}", f"train.seed={args.seed}"],
            )
            corpus = load_corpus(config.data)
            began = time.monotonic()
            rounds = args.total // (workers * args.steps)
            rows.append(train(config, corpus, workers, rounds, args.steps, kept, down))
            rows[-1]["seconds"] = time.monotonic() - began
            print(json.dumps(rows[-1]), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    told = {**provenance(), "seed": args.seed, "rows": rows}
    (args.out / "kept_down.json").write_text(json.dumps(told, indent=2))
    print("\n| workers | update | version | CE | update is smaller by | version is smaller by |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        up, down = (f"{row[way]} kept" if row[way] else "whole" for way in ("kept", "down"))
        smaller = [row["raw_bytes"] / row[moved] for moved in ("up_bytes", "down_bytes")]
        print(
            f"| {row['workers']} | {up} | {down} | {row['ce']:.4f}"
            f" | {smaller[0]:.0f} | {smaller[1]:.0f} |"
        )


if __name__ == "__main__":
    main()
