"""blocktrain simulate: a run with virtual workers, to see what its settings lead to."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blocktrain.cli import options
from blocktrain.cli.terminal import duration, size

if TYPE_CHECKING:
    from rich.console import JustifyMethod
    from rich.table import Table

    from blocktrain.simulate.report import Report
    from blocktrain.simulate.scenario import Scenario

PIPED_WIDTH = 120


@click.command("simulate")
@options.config
@options.overrides
@click.option(
    "--sweep",
    metavar="SECTION.KEY=VALUE,VALUE,...",
    help="Simulate once for each value of a setting, and show one row for each.",
)
@options.thread_count
@options.log_options("warning")
@options.as_json
@click.option(
    "--plots",
    "plots_folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write PNG plots into this folder (extra blocktrain[plots]).",
)
def simulate_command(
    config_path: Path,
    overrides: tuple[str, ...],
    sweep: str | None,
    as_json: bool,
    plots_folder: Path | None,
) -> None:
    """Simulate a run with virtual workers on a virtual clock. Time and traffic are simulated; all
    decisions are made by the coordinator's own code. With simulate.learn every update that counts
    is trained for real, which shows for a small model how the settings affect its score."""
    from rich.console import Console

    from blocktrain.simulate import plots
    from blocktrain.simulate.scenario import load_scenario

    if plots_folder:
        plots.check_installed()  # before minutes of simulation that could not be plotted
    name, values = _swept(sweep)
    scenarios = {
        value: load_scenario(config_path, [*overrides, f"{name}={value}"] if name else overrides)
        for value in values
    }
    reports = {value: _simulated(scenario) for value, scenario in scenarios.items()}
    if plots_folder:
        plots.write(plots_folder, name, reports)
    if as_json:
        rows = [{name: value, **_as_json(report)} for value, report in reports.items()]
        click.echo(json.dumps(rows if name else _as_json(reports[""])))
        return
    console = Console(width=None if Console().is_terminal else PIPED_WIDTH)
    console.print(_sweep_table(name, reports, console.width) if name else _table(reports[""]))


def _simulated(scenario: "Scenario") -> "Report":
    if scenario.simulate.learn:
        from blocktrain.simulate.learning import simulate_learning

        return simulate_learning(scenario)
    from blocktrain.simulate.simulation import simulate

    return simulate(scenario)


def _swept(sweep: str | None) -> tuple[str, list[str]]:
    """The setting to vary and its values; without a sweep, an empty name and one empty value."""
    if sweep is None:
        return "", [""]
    name, _, listed = sweep.partition("=")
    values = [value.strip() for value in listed.split(",")]
    if not name.strip() or not all(values):
        raise click.BadParameter(
            f"{sweep!r} is not of the form section.key=value,value", param_hint="--sweep"
        )
    return name.strip(), values


def _as_json(report: "Report") -> dict[str, Any]:
    return {
        **asdict(report),
        "ce": report.ce,
        "participation": report.participation,
        "mean_staleness": report.mean_staleness,
        "seconds_per_version": report.seconds_per_version if sum(report.versions) else None,
    }


def _table(report: "Report") -> "Table":
    from rich.table import Table

    table = Table(title=_title(report), title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("how much", justify="right")
    for section in (_run_rows(report), _worker_rows(report), _update_rows(report)):
        for what, how_much in section:
            table.add_row(what, how_much)
        table.add_section()
    return table


def _title(report: "Report") -> str:
    how = "finished after" if report.finished else "not finished after"
    return (
        f"{report.workers:,} workers, {len(report.versions)} blocks:"
        f" {how} {duration(report.virtual_seconds)}"
    )


def _run_rows(report: "Report") -> list[tuple[str, str]]:
    fewest, most = min(report.versions), max(report.versions)
    return [
        *([("cross entropy on valid", _ce(report))] if report.ce is not None else []),
        ("batches merged", f"{sum(report.merged_batches):,} of {report.batches:,}"),
        ("progress of the slowest block", _percent(report.slowest_progress)),
        ("versions per block", f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"),
        ("time per version of a block", duration(report.seconds_per_version)),
    ]


def _worker_rows(report: "Report") -> list[tuple[str, str]]:
    return [
        *((f"time {activity}", _percent(share)) for activity, share in report.utilisation.items()),
        ("steps trained that were merged", _percent(report.useful_share)),
        ("sent up", size(report.bytes_up)),
        ("sent down", size(report.bytes_down)),
    ]


def _update_rows(report: "Report") -> list[tuple[str, str]]:
    merged = sum(report.staleness.values())
    return [
        ("leases given", f"{report.leases_given:,}"),
        ("  met in time", f"{report.leases_met:,} ({_percent(report.participation)})"),
        ("  met of the block with the fewest", _percent(min(report.participation_by_block))),
        ("  missed", f"{report.leases_missed:,}"),
        ("  given back", f"{report.leases_returned:,}"),
        ("updates merged", f"{merged:,}"),
        *(
            (f"  {behind} versions behind", f"{count:,} ({_percent(count / merged)})")
            for behind, count in report.staleness.items()
        ),
        ("updates refused", f"{sum(report.refused.values()):,}"),
        *((f"  {reason}", f"{count:,}") for reason, count in report.refused.items()),
    ]


def _sweep_table(name: str, reports: "dict[str, Report]", width: int) -> "Table":
    """A row for each value. If the terminal is too narrow, the last columns are left out rather
    than cut."""
    from rich.table import Table

    table = Table(title=name, title_justify="left", caption_justify="left")
    columns = {"value": list(reports), **_sweep_columns(list(reports.values()))}
    left_out = list(columns)
    room = width - 1
    for title, cells in columns.items():
        room -= max(map(len, (title, *cells))) + 3  # a line and a space on either side
        if room < 0 and table.columns:
            break
        justify: JustifyMethod = "right" if table.columns else "left"
        table.add_column(title, justify=justify, overflow="fold")
        left_out.remove(title)
    shown = [columns[title] for title in columns if title not in left_out]
    for row in zip(*shown, strict=True):
        table.add_row(*row)
    if left_out:
        table.caption = f"no room for: {', '.join(left_out)} (--json has all)"
    return table


def _sweep_columns(reports: "list[Report]") -> dict[str, list[str]]:
    """Columns by title, the most important first."""
    learned = any(report.ce is not None for report in reports)
    return {
        **({"CE": [_ce(report) for report in reports]} if learned else {}),
        "done": [_percent(report.slowest_progress) for report in reports],
        "in": [duration(report.virtual_seconds) for report in reports],
        "training": [_percent(report.utilisation["training"]) for report in reports],
        "waiting": [_percent(report.utilisation["waiting"]) for report in reports],
        "in time": [_percent(report.participation) for report in reports],
        "stale": [f"{report.mean_staleness:.2f}" for report in reports],
        "refused": [f"{sum(report.refused.values()):,}" for report in reports],
        "useful": [_percent(report.useful_share) for report in reports],
        "up": [size(report.bytes_up) for report in reports],
        "down": [size(report.bytes_down) for report in reports],
    }


def _ce(report: "Report") -> str:
    return "-" if report.ce is None else f"{report.ce:.4f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
