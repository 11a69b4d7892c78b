"""Measures the size, speed and error of the codecs of updates on one core.

    PYTHONPATH=src python bench/codec.py [--numbers 16777216] [--run DIR] [--kept 64 96 154]

The updates are random numbers: Gaussian, and with heavy tails (Student's t, 3 degrees of freedom).
With --run they are also the differences between the last two versions of a run's blocks. Sizes are
relative to float32. Speeds count float32 bytes in or out. The error is |decoded - update| /
|update| of one update, without error feedback. --kept: values of swarm.top_k_per_4096 for `sparse`.
Prints a table.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from blocktrain.codec import Codec
from blocktrain.codec.dense import Bf16, Int8
from blocktrain.codec.frames import FRAME_NUMBERS, UpdateDecoder, encode
from blocktrain.codec.sparse import Sparse
from blocktrain.errors import RunError
from blocktrain.numerics import Floats
from blocktrain.storage.block_dir import SavedVersion, load_tensors
from blocktrain.storage.run_dir import RunDir

T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    ratio: float
    encode_mb_s: float
    decode_mb_s: float
    error: float


def measure(update: Floats, codec: Codec, rounds: int) -> Measured:
    encoding, data = timed(lambda: b"".join(encode(update, codec)), rounds)
    decoder = UpdateDecoder(
        lambda start, length: data[start : start + length], len(data), update.size
    )
    found = np.empty_like(update)
    decoding, _ = timed(lambda: decode_into(found, decoder), rounds)
    megabytes = update.nbytes / 1e6
    return Measured(
        update.nbytes / len(data), megabytes / encoding, megabytes / decoding,
        float(np.linalg.norm(update - found) / np.linalg.norm(update)),
    )  # fmt: skip


def decode_into(numbers: Floats, decoder: UpdateDecoder) -> None:
    for index, frame in enumerate(decoder.frames()):
        numbers[index * FRAME_NUMBERS : (index + 1) * FRAME_NUMBERS] = frame


def timed(work: Callable[[], T], rounds: int) -> tuple[float, T]:
    """Seconds, the median of some rounds after one that warms up; and what came of it."""
    result = work()
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), result


def made_up(numbers: int) -> Iterator[tuple[str, Floats]]:
    draws = np.random.default_rng(0)
    yield "Gaussian", draws.standard_normal(numbers, np.float32) * np.float32(1e-3)
    yield "Student-t", draws.standard_t(3, numbers).astype(np.float32) * np.float32(1e-3)


def learned(run: Path) -> Iterator[tuple[str, Floats]]:
    opened = RunDir.open(run)
    for index in range(opened.config.block_count):
        block = opened.block(index)
        last_two = block.versions()[-2:]
        if len(last_two) < 2:
            raise RunError(f"block {index} of {run} has no two versions")
        steps = last_two[1].step - last_two[0].step
        yield f"block {index}, {steps} steps", difference(block.path, *last_two)


def difference(folder: Path, before: SavedVersion, after: SavedVersion) -> Floats:
    """All tensors of a block in the order of their names, one behind the other."""
    old, new = (load_tensors(folder, version.weights) for version in (before, after))
    return np.concatenate([(new[name] - old[name]).reshape(-1) for name in sorted(new)])


def codecs(kept: Sequence[int]) -> dict[str, Codec]:
    return {"bf16": Bf16(), "int8": Int8()} | {
        f"sparse, {count} kept": Sparse(count) for count in kept
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--numbers", type=int, default=1 << 24)
    parser.add_argument("--run", type=Path, help="a run whose blocks have two versions")
    parser.add_argument("--kept", type=int, nargs="+", default=[64, 96, 154], help="of 4096")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print("| update | codec | times smaller | encode, MB/s | decode, MB/s | relative error |")
    print("|---|---|---|---|---|---|")
    for source in (made_up(args.numbers), learned(args.run) if args.run else ()):
        for name, update in source:
            for codec_name, codec in codecs(args.kept).items():
                found = measure(update, codec, args.rounds)
                print(
                    f"| {name} | {codec_name} | {found.ratio:.2f} | {found.encode_mb_s:.0f}"
                    f" | {found.decode_mb_s:.0f} | {found.error:.4f} |"
                )


if __name__ == "__main__":
    main()
