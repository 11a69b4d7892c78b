"""The shortest time that hardware and network allow for an answer, and how the benches send
requests to a ring.

Not run by itself. The limit, for all traversals of an answer together, is

    traversals x (R + T) + bytes sent / W

with R the time of one round through the ring without any work, and W the bandwidth. T is what the
hardware needs for a traversal of n positions: the time of reading all weights once at the measured
speed of memory, or that of 2 x parameters x n operations at the measured speed of a large matrix
product if it is longer. n is the number of bytes written per traversal: the prompt, wrong drafts
and drafting itself do not make the limit longer, and neither does the time that stages computed.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from blocktrain.storage.run_dir import RunDir
from blocktrain.training.device import Compute
from int8_speed import memory_rate, milliseconds
from serving_quality import MODES

ECHO = Path(__file__).parent.parent / "tests/support/echo.py"
STAGES = ("one", "two", "three")
PRODUCT_WIDTH = {"cpu": 1024, "cuda": 8192}  # of the matrix product that is timed
SUMMED_BYTES = 1 << 29
TIMES = 20


@dataclass(frozen=True)
class Hardware:
    """What one device can do."""

    bytes_per_second: float  # reading memory
    flops: float

    @classmethod
    def measured(cls, compute: Compute) -> Self:
        """With the threads that torch has now. On a CPU the fastest of several times counts,
        because other programs only ever add time."""
        device, width = compute.device, PRODUCT_WIDTH.get(compute.device.type, 1024)
        square = torch.ones(width, width, device=device, dtype=compute.dtype)

        def product() -> torch.Tensor:
            return square @ square

        if device.type != "cpu":
            seconds = milliseconds(product, device) / 1e3
            return cls(memory_rate(device), 2 * width**3 / seconds)
        numbers = torch.ones(SUMMED_BYTES // 4)
        return cls(SUMMED_BYTES / _shortest(numbers.sum), 2 * width**3 / _shortest(product))

    def seconds(self, weight_bytes: float, parameters: float, positions: float) -> float:
        """The time of a traversal of so many positions."""
        return max(weight_bytes / self.bytes_per_second, 2 * parameters * positions / self.flops)


@dataclass(frozen=True)
class Limit:
    """What bounds a ring: its network, its hardware and its model."""

    ring_seconds: float
    mbit: float
    hardware: Hardware
    weight_bytes: float
    parameters: float


def _shortest(function: Callable[[], torch.Tensor]) -> float:
    seconds = []
    for _ in range(TIMES):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def parameters_of(run: RunDir) -> int:
    blocks = range(run.config.block_count)
    return sum(array.size for block in blocks for _, array in run.read_block(block))


def shares(blocks: int) -> list[str]:
    """The blocks after the first, as even ranges, one for each stage."""
    parts = np.array_split(np.arange(1, blocks), len(STAGES))
    return [f"{part[0]}-{part[-1]}" for part in parts]


def request(prompt: str, most_bytes: int, mode: str, temperature: float) -> dict[str, Any]:
    how = MODES[mode.removesuffix(", first ever")]
    return {"prompt": prompt, "max_tokens": most_bytes, "temperature": temperature, **how}


def rated(answer: dict[str, Any], written: int, sent: int, bound: Limit) -> dict[str, float]:
    """An answer beside what it could have taken at least."""
    cost, seconds = answer["cost"], answer["seconds"]
    traversals, computed = cost["traversals"], sum(cost["stage_seconds"].values())
    transfer = sent / (bound.mbit * 1e6 / 8)
    work = (bound.weight_bytes, bound.parameters, written / traversals)
    hardware = traversals * bound.hardware.seconds(*work)
    limit = traversals * bound.ring_seconds + hardware + transfer
    return {
        "seconds": seconds,
        "first_seconds": answer["moments"][0],
        "bytes_per_second": written / seconds,
        "traversals": traversals,
        "bytes_per_traversal": written / traversals,
        "computed_seconds": computed,
        "hardware_seconds": hardware,
        "transfer_seconds": transfer,
        "limit_seconds": limit,
        "of_limit": limit / seconds,
    }
