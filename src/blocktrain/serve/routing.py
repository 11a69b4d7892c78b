"""Which stages a request goes through: a pure function of who is there.

Knows nothing of connections. The router holds block 0; a route covers all blocks after it, in
order, each stage with the blocks it holds.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

Edge = tuple[str, str]


@dataclass(frozen=True)
class Place:
    """A stage that answers: where it is, what it holds, how much it has to do."""

    address: str
    first: int
    stop: int  # the block after its last
    load: int = 0


Route = tuple[str, ...]


def choose(places: Sequence[Place], blocks: int, broken: Collection[Edge] = ()) -> Route | None:
    """The route whose busiest stage has least to do; of those the shortest. None: blocks are
    missing. `broken` are pairs of stages that do not reach each other."""
    found = _ways(places, 1, blocks, frozenset(broken))
    best = min(found, key=_burden, default=None)
    return None if best is None else tuple(place.address for place in best)


def missing(places: Sequence[Place], blocks: int) -> list[int]:
    """The blocks that no stage holds."""
    held = {block for place in places for block in range(place.first, place.stop)}
    return [block for block in range(1, blocks) if block not in held]


def _burden(way: Sequence[Place]) -> tuple[int, int, list[str]]:
    return max((place.load for place in way), default=0), len(way), [p.address for p in way]


def _ways(
    places: Sequence[Place], block: int, blocks: int, broken: frozenset[Edge], before: str = ""
) -> list[list[Place]]:
    """The best way on through each stage that holds the next block."""
    if block >= blocks:
        return [[]]
    result = []
    for place in places:
        if place.first != block or (before, place.address) in broken:
            continue
        onward = _ways(places, place.stop, blocks, broken, place.address)
        if onward:
            result.append([place, *min(onward, key=_burden)])
    return result
