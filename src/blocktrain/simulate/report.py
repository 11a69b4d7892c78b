"""What is counted during a simulation, and the report made of it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from blocktrain.simulate.scenario import Scenario
from blocktrain.simulate.virtual_coordinator import VirtualCoordinator
from blocktrain.simulate.virtual_worker import Activity, VirtualWorker


@dataclass(frozen=True)
class Sample:
    """The state of the run at one time; counts are from the beginning."""

    seconds: float
    present: int
    slowest_progress: float
    mean_progress: float
    leases_met: int
    leases_missed: int
    updates_merged: int
    versions_behind: int  # summed over all merged updates
    ce: float | None  # cross entropy of the model, if the simulation trains one


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
                leases_met=coordinator.leases_met,
                leases_missed=coordinator.leases_missed,
                updates_merged=staleness.total(),
                versions_behind=sum(behind * count for behind, count in staleness.items()),
                ce=coordinator.learner.score(),
            )
        )

    def count(self, worker: VirtualWorker, now: float) -> None:
        """Add a worker's time in its current activity, and the steps it trained in that time."""
        if worker.activity is None:
            return
        seconds = now - worker.activity_since
        self.seconds[worker.activity] += seconds
        if worker.activity is Activity.TRAINING:
            steps = seconds * worker.steps_per_second
            worker.steps_left = max(0.0, worker.steps_left - steps)
            self.steps_trained += steps

    def close(self, workers: Iterable[VirtualWorker], now: float) -> None:
        for worker in workers:
            self.count(worker, now)


@dataclass(frozen=True)
class Report:
    finished: bool
    virtual_seconds: float
    events: int
    workers: int
    batches: int  # of all blocks
    versions: tuple[int, ...]  # of each block
    merged_batches: tuple[int, ...]
    slowest_progress: float
    utilisation: dict[str, float]  # by activity, the share of the workers' time
    steps_trained: float
    useful_share: float  # of the steps trained, those that were merged
    leases_given: int
    leases_met: int
    leases_missed: int
    leases_returned: int
    participation_by_block: tuple[float, ...]
    staleness: dict[int, int]  # merged updates by versions behind
    refused: dict[str, int]  # updates by reason
    bytes_up: float
    bytes_down: float
    samples: tuple[Sample, ...]

    @property
    def participation(self) -> float:
        """The share of leases met in time, of all that have ended and were not given back."""
        return _participation(self.leases_met, self.leases_missed)

    @property
    def seconds_per_version(self) -> float:
        """Mean time that a block takes for a version; infinite if there is none."""
        made = sum(self.versions)
        return self.virtual_seconds * len(self.versions) / made if made else float("inf")

    @property
    def ce(self) -> float | None:
        """Cross entropy of the model at the end; None if none was trained."""
        return self.samples[-1].ce

    @property
    def mean_staleness(self) -> float:
        updates = sum(self.staleness.values())
        return sum(behind * n for behind, n in self.staleness.items()) / updates if updates else 0.0


def make_report(
    scenario: Scenario,
    coordinator: VirtualCoordinator,
    tally: Tally,
    virtual_seconds: float,
    events: int,
) -> Report:
    blocks = coordinator.blocks
    merged = tuple(block.merged_batches for block in blocks)
    worker_time = sum(tally.seconds) or 1.0
    return Report(
        finished=coordinator.finished,
        virtual_seconds=virtual_seconds,
        events=events,
        workers=scenario.simulate.workers,
        batches=len(blocks) * scenario.train.steps,
        versions=tuple(block.version for block in blocks),
        merged_batches=merged,
        slowest_progress=min(merged) / scenario.train.steps,
        utilisation={
            activity.name.lower(): tally.seconds[activity] / worker_time for activity in Activity
        },
        steps_trained=tally.steps_trained,
        useful_share=sum(merged) / tally.steps_trained if tally.steps_trained else 1.0,
        leases_given=coordinator.leases_given,
        leases_met=coordinator.leases_met,
        leases_missed=coordinator.leases_missed,
        leases_returned=coordinator.leases_returned,
        participation_by_block=tuple(
            _participation(block.leases_met, block.leases_missed) for block in blocks
        ),
        staleness=dict(sorted(coordinator.staleness.items())),
        refused=dict(sorted(coordinator.refused.items())),
        bytes_up=tally.bytes_up,
        bytes_down=tally.bytes_down,
        samples=tuple(tally.samples),
    )


def _participation(met: int, missed: int) -> float:
    return met / (met + missed) if met + missed else 1.0
