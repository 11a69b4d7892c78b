"""What a simulation tells whoever really trains what it plays.

Only who holds what, and when it counts; how weights come about is the other side's business, and a
simulation without one plays on all the same.
"""

from collections.abc import Sequence
from typing import Protocol

from blocktrain.simulate.virtual_block import VirtualBlock, VirtualLease


class Learner(Protocol):
    def taken(self, lease: VirtualLease) -> None:
        """A worker begins a lease, for the first time or again after an absence."""
        ...

    def left(self, worker: str, block: int) -> None:
        """What this worker had in memory, which was of this block, is gone."""
        ...

    def merged(self, block: VirtualBlock, leases: Sequence[VirtualLease]) -> None:
        """These updates become the block's next version; it still has the one before."""
        ...

    def score(self) -> float | None:
        """Cross entropy of the model as it stands, in nats per byte."""
        ...


class NothingLearned:
    """Time, traffic and who does what, and no more."""

    def taken(self, lease: VirtualLease) -> None:
        pass

    def left(self, worker: str, block: int) -> None:
        pass

    def merged(self, block: VirtualBlock, leases: Sequence[VirtualLease]) -> None:
        pass

    def score(self) -> None:
        return None
