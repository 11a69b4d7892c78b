"""A line's speed is learnt by filling it, before anybody waits for an answer.

TCP sends as fast as it has seen a line to be, and a message smaller than what the line holds shows
it less than the line can. With BBR what was seen once is remembered, through silence too. Knows
lines only as something that takes padding.
"""

import math
from collections.abc import Awaitable, Callable
from contextlib import suppress

from blocktrain.errors import BlocktrainError

FIRST_BYTES = 1 << 15  # less than a HELLO may take: more is not welcome right after it
LONG = 2  # shortest times seen: the line was full for half of it


async def warm_up(
    pad: Callable[[int], Awaitable[None]], most: int, clock: Callable[[], float]
) -> None:
    """Twice as much padding each time, until it is under way for long because it is much."""
    size, shortest = FIRST_BYTES, math.inf
    with suppress(BlocktrainError):  # a connection that ends says so to those who use it
        while size <= most:
            began = clock()
            await pad(size)
            took = clock() - began
            if took > LONG * shortest:
                return
            size, shortest = 2 * size, min(shortest, took)
