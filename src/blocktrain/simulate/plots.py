"""Plots of simulations against virtual time: progress, participation, staleness."""

import importlib.util
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

from blocktrain.errors import ConfigError
from blocktrain.simulate.report import Report
from blocktrain.simulate.tally import Sample

Value = Callable[[Sample, Sample], float | None]  # of the time from one sample to the next


def check_installed() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib: pip install 'blocktrain[plots]'")


def write(folder: Path, varied: str, reports: Mapping[str, Report]) -> None:
    """One PNG for each question, with a line for each report; what tells them apart is the value
    of the setting that was varied, if one was."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (words, value) in PLOTS.items():
        _write_plot(folder / f"{name}.png", words, value, varied, reports)


def _write_plot(
    path: Path, words: str, value: Value, varied: str, reports: Mapping[str, Report]
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for label, report in reports.items():
        points = [
            (now.seconds / 3600.0, value(then, now)) for then, now in pairwise(report.samples)
        ]
        drawn = [(hours, height) for hours, height in points if height is not None]
        axes.plot([hours for hours, _ in drawn], [height for _, height in drawn], label=label)
    axes.set_xlabel("virtual hours")
    axes.set_ylabel(words)
    axes.set_ylim(bottom=0.0)
    if varied:
        axes.legend(title=varied)
    figure.savefig(path, dpi=120)


def _progress(then: Sample, now: Sample) -> float:
    return now.slowest_progress


def _participation(then: Sample, now: Sample) -> float | None:
    met, missed = now.leases_met - then.leases_met, now.leases_missed - then.leases_missed
    return met / (met + missed) if met + missed else None


def _staleness(then: Sample, now: Sample) -> float | None:
    updates = now.updates_merged - then.updates_merged
    return (now.versions_behind - then.versions_behind) / updates if updates else None


PLOTS: dict[str, tuple[str, Value]] = {
    "progress": ("share of the slowest block that is merged", _progress),
    "participation": ("leases met, of those that ended", _participation),
    "staleness": ("versions behind, mean of merged updates", _staleness),
}
