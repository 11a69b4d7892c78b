"""What a simulation found, as numbers."""

from dataclasses import dataclass

from blocktrain.simulate.agenda import Agenda
from blocktrain.simulate.scenario import Scenario
from blocktrain.simulate.tally import Sample, Tally
from blocktrain.simulate.virtual_coordinator import VirtualCoordinator
from blocktrain.simulate.virtual_worker import Activity


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
    utilisation: dict[str, float]  # share of the workers' time
    steps_trained: float
    useful_share: float  # of the steps trained: merged
    leases_given: int
    leases_met: int
    leases_missed: int
    leases_returned: int
    participation_by_block: tuple[float, ...]
    staleness: dict[int, int]  # merged updates by versions behind
    refused: dict[str, int]  # updates by why
    bytes_up: float
    bytes_down: float
    samples: tuple[Sample, ...]

    @property
    def participation(self) -> float:
        """Leases met in time, of all given that are over and were not given back."""
        return _participation(self.leases_met, self.leases_missed)

    @property
    def seconds_per_version(self) -> float:
        """Of a block, on average; infinite where there is none."""
        made = sum(self.versions)
        return self.virtual_seconds * len(self.versions) / made if made else float("inf")

    @property
    def ce(self) -> float | None:
        """Of the model at the end, where something was learned."""
        return self.samples[-1].ce

    @property
    def mean_staleness(self) -> float:
        updates = sum(self.staleness.values())
        return sum(behind * n for behind, n in self.staleness.items()) / updates if updates else 0.0


def report_of(
    scenario: Scenario, coordinator: VirtualCoordinator, tally: Tally, agenda: Agenda
) -> Report:
    blocks = coordinator.blocks
    merged = tuple(block.merged_batches for block in blocks)
    worker_time = sum(tally.seconds) or 1.0
    return Report(
        finished=coordinator.finished,
        virtual_seconds=agenda.now,
        events=agenda.happened,
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
        leases_given=coordinator.given,
        leases_met=coordinator.met,
        leases_missed=coordinator.missed,
        leases_returned=coordinator.returned,
        participation_by_block=tuple(_participation(block.met, block.missed) for block in blocks),
        staleness=dict(sorted(coordinator.staleness.items())),
        refused=dict(sorted(coordinator.refused.items())),
        bytes_up=tally.bytes_up,
        bytes_down=tally.bytes_down,
        samples=tuple(tally.samples),
    )


def _participation(met: int, missed: int) -> float:
    return met / (met + missed) if met + missed else 1.0
