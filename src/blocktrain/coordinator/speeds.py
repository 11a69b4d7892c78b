"""How fast workers are by the coordinator's own clock, as a bound on what they claim.

In memory: a coordinator that was just started, or another one of the run, knows none of them yet
and begins with first leases.
"""

from blocktrain.config import SwarmConfig
from blocktrain.swarm import plan

SHORTEST = 1e-3  # seconds, of a clock that has not moved


class Speeds:
    def __init__(self, swarm: SwarmConfig) -> None:
        self._swarm = swarm
        self._measured: dict[str, float] = {}  # by worker, steps a second: the most of any lease

    def completed(self, worker: str, steps: int, seconds: float) -> None:
        """Its update of so many steps counts, and came so long after the lease was handed out."""
        speed = steps / max(SHORTEST, seconds)
        self._measured[worker] = max(speed, self._measured.get(worker, 0.0))

    def trusted(self, worker: str, claimed: float | None) -> float | None:
        return plan.trusted_speed(self._swarm, claimed, self._measured.get(worker))
