"""The shortest time that an answer could take, and how the benches send requests to a ring.

Not run by itself. The limit, for all traversals of an answer together, is

    traversals x R + sum over stages of their compute time + bytes sent / W

with R the time of one round through the ring without any work, and W the bandwidth.
"""

from pathlib import Path
from typing import Any

import numpy as np

from serving_quality import MODES

ECHO = Path(__file__).parent.parent / "tests/support/echo.py"
STAGES = ("one", "two", "three")


def shares(blocks: int) -> list[str]:
    """The blocks after the first, as even ranges, one for each stage."""
    parts = np.array_split(np.arange(1, blocks), len(STAGES))
    return [f"{part[0]}-{part[-1]}" for part in parts]


def request(prompt: str, most_bytes: int, mode: str, temperature: float) -> dict[str, Any]:
    how = MODES[mode.removesuffix(", first ever")]
    return {"prompt": prompt, "max_tokens": most_bytes, "temperature": temperature, **how}


def rated(
    answer: dict[str, Any], written: int, sent: int, ring_seconds: float, mbit: float
) -> dict[str, float]:
    """An answer beside what it could have taken at least."""
    cost, seconds = answer["cost"], answer["seconds"]
    computed = sum(cost["stage_seconds"].values())
    transfer = sent / (mbit * 1e6 / 8)
    limit = cost["traversals"] * ring_seconds + computed + transfer
    return {
        "seconds": seconds,
        "first_seconds": answer["moments"][0],
        "bytes_per_second": written / seconds,
        "traversals": cost["traversals"],
        "bytes_per_traversal": written / cost["traversals"],
        "computed_seconds": computed,
        "transfer_seconds": transfer,
        "limit_seconds": limit,
        "of_limit": limit / seconds,
    }
