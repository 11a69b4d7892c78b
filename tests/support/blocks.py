"""States of blocks to decide on: made up for an example, or drawn by hypothesis."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from blocktrain.config import SwarmConfig
from blocktrain.swarm.state import BlockState, PendingUpdate

NOW = 1000.0
SWARM = SwarmConfig(quorum=2, grace_seconds=5.0)
WORKERS = ("ann", "bob", "eve")


def block(index: int = 0, **changes: Any) -> BlockState:
    """A block of 100 batches that nobody has touched."""
    fresh = BlockState(
        index=index, version=0, merged_batches=0, next_batch=0, total_batches=100,
        returned_batches=0, leased_batches=0, open_leases=0, workers=frozenset(),
        finishing=frozenset(), pending=(),
    )  # fmt: skip
    return replace(fresh, **changes)


def merged(index: int, batches: int, **changes: Any) -> BlockState:
    return block(index, merged_batches=batches, next_batch=batches, **changes)


def update(worker: str = "ann", committed: float = NOW, steps: int = 10) -> PendingUpdate:
    return PendingUpdate(f"lease of {worker}", worker, 0, steps, committed)


@st.composite
def states(draw: st.DrawFn, index: int = 0) -> BlockState:
    """Any state a block can be in."""
    total = draw(st.integers(1, 200))
    handed_out = draw(st.integers(0, total))
    cuts = sorted(draw(st.integers(0, handed_out)) for _ in range(3))
    done, leased, waiting = cuts[0], cuts[1] - cuts[0], cuts[2] - cuts[1]
    holders = draw(st.sets(st.sampled_from(WORKERS), min_size=1)) if leased else set()
    senders = draw(st.lists(st.sampled_from(WORKERS), min_size=1, max_size=3)) if waiting else []
    times = st.floats(NOW - 100, NOW)
    shares = [waiting // len(senders)] * len(senders) if senders else []
    pending = tuple(
        update(worker, draw(times), steps) for worker, steps in zip(senders, shares, strict=True)
    )
    workers = frozenset(holders) | frozenset(senders)
    finishing = draw(st.sets(st.sampled_from(sorted(workers)))) if workers else set()
    return BlockState(
        index=index,
        version=draw(st.integers(0, 5)),
        merged_batches=done,
        next_batch=handed_out,
        total_batches=total,
        returned_batches=handed_out - cuts[2],
        leased_batches=leased,
        open_leases=len(holders),
        workers=workers,
        finishing=frozenset(finishing),
        pending=pending,
    )


some_blocks = st.integers(1, 5).flatmap(
    lambda count: st.tuples(*(states(index) for index in range(count)))
)
swarms = st.builds(
    SwarmConfig,
    lease_seconds=st.floats(0.1, 1000),
    first_steps=st.integers(1, 500),
    most_steps=st.integers(1, 500),
    deadline_factor=st.floats(1, 10),
    shortest_deadline=st.floats(0.5, 500),
    quorum=st.integers(1, 4),
    grace_seconds=st.floats(0, 60),
    most_stale=st.integers(0, 5),
    late_discount=st.floats(0.01, 1),
)
speeds = st.none() | st.floats(1e-3, 1e5)
