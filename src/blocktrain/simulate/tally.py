"""What is counted while a simulation runs, and looked at again and again on the way."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from blocktrain.simulate.virtual_coordinator import VirtualCoordinator
from blocktrain.simulate.virtual_worker import Activity, VirtualWorker


@dataclass(frozen=True)
class Sample:
    """How everything stood at one moment; counts are from the beginning."""

    seconds: float
    present: int
    slowest_progress: float
    mean_progress: float
    leases_met: int
    leases_missed: int
    updates_merged: int
    versions_behind: int  # of all merged updates together
    ce: float | None  # of the model as it stood, where something is learned


@dataclass
class Tally:
    seconds: list[float] = field(default_factory=lambda: [0.0] * len(Activity))
    present: int = 0
    steps_trained: float = 0.0
    bytes_up: float = 0.0
    bytes_down: float = 0.0
    samples: list[Sample] = field(default_factory=list)

    def sample(self, coordinator: VirtualCoordinator, now: float) -> None:
        shares = [block.merged_batches / block.total_batches for block in coordinator.blocks]
        staleness = coordinator.staleness
        self.samples.append(
            Sample(
                seconds=now,
                present=self.present,
                slowest_progress=min(shares),
                mean_progress=sum(shares) / len(shares),
                leases_met=coordinator.met,
                leases_missed=coordinator.missed,
                updates_merged=staleness.total(),
                versions_behind=sum(behind * count for behind, count in staleness.items()),
                ce=coordinator.learner.score(),
            )
        )

    def close(self, workers: Sequence[VirtualWorker], now: float) -> None:
        """Count what everybody was doing at the end."""
        for worker in workers:
            if worker.activity is not None:
                self.seconds[worker.activity] += now - worker.since
            if worker.activity is Activity.TRAINING:
                self.steps_trained += (now - worker.since) * worker.steps_per_second
