"""The counters of a simulation, the report on it, and plots of reports."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from blocktrain.figures import write_figure
from blocktrain.simulate.scenario import Scenario
from blocktrain.simulate.virtual_coordinator import VirtualCoordinator
from blocktrain.simulate.virtual_worker import Activity, VirtualWorker

MOST_POINTS = 40  # per line
SMOOTHED = 8  # counts are averaged over 1/8 of the line
UNITS = ((7200.0, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))


@dataclass(frozen=True)
class Sample:
    """The state of the run at one time, with counts since its start."""

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
        """Add a worker's time in its current activity, and the steps that it trained meanwhile."""
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
    utilisation: dict[str, float]  # share of the workers' time, by activity
    steps_trained: float
    useful_share: float  # share of the trained steps that were merged
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
        """The share of leases met in time, of those met or missed."""
        return _participation(self.leases_met, self.leases_missed)

    @property
    def seconds_per_version(self) -> float:
        """Mean time between versions of a block; infinite if there is none."""
        total = sum(self.versions)
        return self.virtual_seconds * len(self.versions) / total if total else float("inf")

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


# Plots against virtual time

Value = Callable[[Sample, Sample], float | None]  # over the time between two samples


@dataclass(frozen=True)
class Plot:
    title: str
    value: Value
    lowest: float | None = 0.0
    highest: float | None = None
    fits_from: float = 0.0  # share of the line, from its start, that does not scale the y axis


def write_plots(folder: Path, varied: str, reports: Mapping[str, Report]) -> None:
    """Write one PNG per plot, with one line per report. `varied`: the setting that differs, if any;
    `reports` are by its value."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, plot in PLOTS.items():
        lines = {label: _points(report, plot.value) for label, report in reports.items()}
        if any(lines.values()):
            _write_plot(folder / f"{name}.png", plot, varied, lines)


def _points(report: Report, value: Value) -> list[tuple[float, float]]:
    """(seconds, value) of the samples that have a value."""
    *early, last = report.samples
    shown = [*early[:: 1 + len(early) // MOST_POINTS], last]
    back = 1 + len(shown) // SMOOTHED
    points = [
        (now.seconds, value(shown[max(0, number - back)], now)) for number, now in enumerate(shown)
    ]
    return [(seconds, height) for seconds, height in points if height is not None]


def _write_plot(
    path: Path, plot: Plot, varied: str, lines: Mapping[str, list[tuple[float, float]]]
) -> None:
    longest = max(seconds for points in lines.values() for seconds, _ in points)
    size, unit = next((size, unit) for least, size, unit in UNITS if longest >= least)
    scaled = {
        label: [(seconds / size, height) for seconds, height in points]
        for label, points in lines.items()
    }
    top = plot.highest or _top(plot, lines)
    x_label = f"virtual {unit}"
    write_figure(path, plot.title, x_label, scaled, legend=varied, lowest=plot.lowest, highest=top)


def _top(plot: Plot, lines: Mapping[str, list[tuple[float, float]]]) -> float | None:
    """The upper end of the y axis; None: automatic."""
    if not plot.fits_from:
        return None
    shown = [points[int(plot.fits_from * len(points)) :] for points in lines.values()]
    heights = [height for points in shown for _, height in points]
    return max(heights) + 0.05 * (max(heights) - min(heights))


def _ce(then: Sample, now: Sample) -> float | None:
    return now.ce


def _progress(then: Sample, now: Sample) -> float:
    return 100.0 * now.slowest_progress


def _recent_participation(then: Sample, now: Sample) -> float | None:
    met, missed = now.leases_met - then.leases_met, now.leases_missed - then.leases_missed
    return 100.0 * met / (met + missed) if met + missed else None


def _staleness(then: Sample, now: Sample) -> float | None:
    updates = now.updates_merged - then.updates_merged
    return (now.versions_behind - then.versions_behind) / updates if updates else None


PLOTS = {
    "ce": Plot("Cross entropy on valid, nats per byte", _ce, None, fits_from=0.15),
    "progress": Plot("Merged batches of the slowest block, %", _progress, 0.0, 103.0),
    "participation": Plot(
        "Leases met in time, % of those that ended", _recent_participation, 0, 103
    ),
    "staleness": Plot("Mean versions that merged updates were behind", _staleness),
}
