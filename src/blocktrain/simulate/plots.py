"""Plots of simulations against virtual time: cross entropy, progress, participation, staleness."""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blocktrain.errors import ConfigError
from blocktrain.simulate.report import Report, Sample

Value = Callable[[Sample, Sample], float | None]  # of the time from one sample to another

MOST_POINTS = 40  # of a line
SMOOTHED = 8  # what is counted is counted over an eighth of the line
INK, GRID = "#333333", "#dddddd"
UNITS = ((7200.0, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))


@dataclass(frozen=True)
class Question:
    title: str
    value: Value
    lowest: float | None = 0.0
    highest: float | None = None
    fits_from: float = 0.0  # share of a line after which all of it is in the picture


def check_installed() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib: pip install 'blocktrain[plots]'")


def write(folder: Path, varied: str, reports: Mapping[str, Report]) -> None:
    """One PNG for each question, with a line for each report; what tells them apart is the value
    of the setting that was varied, if one was."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, question in QUESTIONS.items():
        lines = {label: _points(report, question.value) for label, report in reports.items()}
        if any(lines.values()):
            _write_plot(folder / f"{name}.png", question, varied, lines)


def _points(report: Report, value: Value) -> list[tuple[float, float]]:
    """(seconds, height) wherever there is something to tell."""
    *early, last = report.samples
    shown = [*early[:: 1 + len(early) // MOST_POINTS], last]
    back = 1 + len(shown) // SMOOTHED
    found = [
        (now.seconds, value(shown[max(0, number - back)], now)) for number, now in enumerate(shown)
    ]
    return [(seconds, height) for seconds, height in found if height is not None]


def _write_plot(
    path: Path, question: Question, varied: str, lines: Mapping[str, list[tuple[float, float]]]
) -> None:
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.5), layout="constrained")
    axes = figure.add_subplot()
    longest = max(seconds for points in lines.values() for seconds, _ in points)
    size, unit = next((size, unit) for least, size, unit in UNITS if longest >= least)
    for number, (label, points) in enumerate(lines.items()):
        place = 0.05 + 0.8 * number / max(1, len(lines) - 1)
        times, heights = [seconds / size for seconds, _ in points], [h for _, h in points]
        axes.plot(times, heights, label=label, color=colormaps["viridis"](place), linewidth=1.8)
        axes.plot(times[-1:], heights[-1:], "o", color=colormaps["viridis"](place), markersize=5)
    axes.set_title(question.title, loc="left", color=INK, fontsize=12, pad=12)
    axes.set_xlabel(f"virtual {unit}", color=INK)
    axes.set_xlim(left=0.0)
    axes.set_ylim(bottom=question.lowest, top=question.highest or _top(question, lines))
    _quieten(axes)
    if varied:
        axes.legend(title=varied, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    figure.savefig(path, dpi=150)


def _top(question: Question, lines: Mapping[str, list[tuple[float, float]]]) -> float | None:
    """None: wherever the lines end."""
    if not question.fits_from:
        return None
    shown = [points[int(question.fits_from * len(points)) :] for points in lines.values()]
    heights = [height for points in shown for _, height in points]
    return max(heights) + 0.05 * (max(heights) - min(heights))


def _quieten(axes: Any) -> None:
    """Leave the lines alone on the page."""
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(color=GRID, labelcolor=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("bottom", "left"):
        axes.spines[side].set_color(GRID)


def _ce(then: Sample, now: Sample) -> float | None:
    return now.ce


def _progress(then: Sample, now: Sample) -> float:
    return 100.0 * now.slowest_progress


def _participation(then: Sample, now: Sample) -> float | None:
    met, missed = now.leases_met - then.leases_met, now.leases_missed - then.leases_missed
    return 100.0 * met / (met + missed) if met + missed else None


def _staleness(then: Sample, now: Sample) -> float | None:
    updates = now.updates_merged - then.updates_merged
    return (now.versions_behind - then.versions_behind) / updates if updates else None


QUESTIONS = {
    "ce": Question("Cross entropy on valid, nats per byte", _ce, None, fits_from=0.15),
    "progress": Question("Batches of the slowest block that are merged, %", _progress, 0.0, 103.0),
    "participation": Question("Leases met in time, % of those that ended", _participation, 0, 103),
    "staleness": Question("Versions an update was behind when merged, mean", _staleness),
}
