"""Plots of simulations against virtual time: cross entropy, progress, participation, staleness."""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blocktrain.errors import ConfigError
from blocktrain.simulate.report import Report, Sample

Value = Callable[[Sample, Sample], float | None]  # over the time between two samples

MOST_POINTS = 40  # per line
SMOOTHED = 8  # counts are averaged over an eighth of the line
INK, GRID = "#333333", "#dddddd"
UNITS = ((7200.0, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))


@dataclass(frozen=True)
class Plot:
    title: str
    value: Value
    lowest: float | None = 0.0
    highest: float | None = None
    fits_from: float = 0.0  # the y axis fits the line after this share of it


def check_installed() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib: pip install 'blocktrain[plots]'")


def write(folder: Path, varied: str, reports: Mapping[str, Report]) -> None:
    """One PNG for each plot, with one line for each report. `varied`: the setting they differ in,
    or empty. Reports are by its value."""
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
    axes.set_title(plot.title, loc="left", color=INK, fontsize=12, pad=12)
    axes.set_xlabel(f"virtual {unit}", color=INK)
    axes.set_xlim(left=0.0)
    axes.set_ylim(bottom=plot.lowest, top=plot.highest or _top(plot, lines))
    _simplify(axes)
    if varied:
        axes.legend(title=varied, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    figure.savefig(path, dpi=150)


def _top(plot: Plot, lines: Mapping[str, list[tuple[float, float]]]) -> float | None:
    """The upper end of the y axis; None: automatic."""
    if not plot.fits_from:
        return None
    shown = [points[int(plot.fits_from * len(points)) :] for points in lines.values()]
    heights = [height for points in shown for _, height in points]
    return max(heights) + 0.05 * (max(heights) - min(heights))


def _simplify(axes: Any) -> None:
    """Remove everything that distracts from the lines."""
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


PLOTS = {
    "ce": Plot("Cross entropy on valid, nats per byte", _ce, None, fits_from=0.15),
    "progress": Plot("Merged batches of the slowest block, %", _progress, 0.0, 103.0),
    "participation": Plot("Leases met in time, % of those that ended", _participation, 0, 103),
    "staleness": Plot("Mean versions that merged updates were behind", _staleness),
}
