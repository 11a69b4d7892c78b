"""Line charts as PNG files, by matplotlib (extra `plots`). Knows nothing about what they show."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blocktrain.errors import ConfigError

INK, GRID = "#333333", "#dddddd"
Points = Sequence[tuple[float, float]]


def check_plots_installed() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib: pip install 'blocktrain[plots]'")


def write_figure(
    path: Path,
    title: str,
    x_label: str,
    lines: Mapping[str, Points],
    *,
    legend: str = "",
    lowest: float | None = None,
    highest: float | None = None,
    marked: bool = False,
) -> None:
    """One line for each label; `legend` is their title, and without one there is no legend.
    `marked`: every point has a dot, otherwise only the last."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for number, (label, points) in enumerate(lines.items()):
        color = colormaps["viridis"](0.05 + 0.8 * number / max(1, len(lines) - 1))
        x, y = [point[0] for point in points], [point[1] for point in points]
        axes.plot(x, y, label=label, color=color, linewidth=1.8)
        first = 0 if marked else -1
        axes.plot(x[first:], y[first:], "o", color=color, markersize=5)
    axes.set_title(title, loc="left", color=INK, fontsize=12, pad=12)
    axes.set_xlabel(x_label, color=INK)
    axes.set_xlim(left=0.0)
    axes.set_ylim(bottom=lowest, top=highest)
    _simplify(axes)
    if legend:
        axes.legend(title=legend, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    figure.savefig(path, dpi=150)


def _simplify(axes: Any) -> None:
    """Remove everything that distracts from the lines."""
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(color=GRID, labelcolor=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("bottom", "left"):
        axes.spines[side].set_color(GRID)
