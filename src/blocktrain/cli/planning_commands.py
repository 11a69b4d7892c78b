"""blocktrain estimate, simulate and settings: plan a run before it starts."""

import json
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from blocktrain.cli import options
from blocktrain.cli.options import FOLDER
from blocktrain.cli.terminal import compute, duration, size
from blocktrain.training.estimation import FLOPS

if TYPE_CHECKING:
    from blocktrain.simulate.report import Report
    from blocktrain.simulate.scenario import Scenario

PIPED_WIDTH = 120


@click.command("estimate")
@options.config
@options.overrides
@click.option(
    "--on",
    "device",
    type=click.Choice(list(FLOPS)),
    default="h200",
    help="Device to estimate the time for.",
)
@options.as_json
def estimate_command(
    config_path: Path, overrides: tuple[str, ...], device: str, as_json: bool
) -> None:
    """Estimate parameters, memory per worker, FLOPs, traffic, and the time on a device."""
    from blocktrain.config import load_config
    from blocktrain.data.run_text import expected_vocabulary
    from blocktrain.training.estimation import estimate

    config = load_config(config_path, overrides)
    config = replace(config, vocab=expected_vocabulary(config))
    needs = estimate(config)
    seconds = needs.seconds(FLOPS[device])
    if as_json:
        answer = {
            **asdict(needs),
            "memory_per_worker": needs.memory_per_worker,
            "device": device,
            "seconds_per_block": seconds,
        }
        click.echo(json.dumps(answer))
        return
    ratio = needs.parameters / needs.end_to_end_parameters
    cache = config.objective.feature_cache
    frozen = "on disk, one of them at a time in memory"
    if config.train.frozen_in == "memory":
        frozen = "in memory" if cache == "off" else "in memory while the feature cache is filled"
    rows = {
        "parameters": f"{needs.parameters / 1e6:,.2f} M in {config.block_count}"
        f" block{'s' * (config.block_count > 1)}"
        f" ({ratio:.3f} x the end-to-end model's {needs.end_to_end_parameters / 1e6:,.2f} M)",
        "per worker": f"{needs.parameters_per_block / 1e6:,.2f} M parameters",
        "  weights, gradients, optimizer": size(needs.fixed_bytes_per_worker),
        "  activations (estimate)": size(needs.activation_bytes_per_worker),
        "  together": size(needs.memory_per_worker),
        "  frozen blocks": f"{size(needs.frozen_bytes)}, {frozen}",
        f"  feature cache ({cache})": size(needs.feature_cache_bytes),
        "compute": f"{needs.flops_per_step / 1e12:,.4f} TFLOP per step, {needs.steps} steps",
        "  all workers, whole run": compute(config),
        "data": f"{size(needs.bytes_per_block)} per block",
        "vocabulary": f"{config.vocabulary.size:,} tokens,"
        f" {needs.vocabulary_parameters / 1e6:,.2f} M parameters of a block",
        "network traffic": f"{size(needs.wire_bytes_per_round)} per worker and round (a version"
        " down, an update up)",
        f"time on {device} (estimate)": f"{duration(seconds)} per block",
    }
    if config.vocabulary.is_bytes:
        del rows["vocabulary"]
    else:
        rows["data"] = f"{needs.tokens_per_block:,} tokens, about {rows['data']}"
    if not needs.frozen_bytes:
        del rows["  frozen blocks"]
    if not needs.feature_cache_bytes:
        del rows[f"  feature cache ({cache})"]
    for name, value in rows.items():
        click.echo(f"{name:34s}{value}")


@click.command("settings")
@options.as_json
def settings_command(as_json: bool) -> None:
    """List every setting of a config with its default, its meaning and its allowed values."""
    from blocktrain.config import describe
    from blocktrain.simulate.scenario import Scenario

    settings = describe(Scenario)
    if as_json:
        click.echo(json.dumps([setting._asdict() for setting in settings]))
        return
    width = max(len(setting.name) for setting in settings)
    for name, default, allowed, doc in settings:
        click.echo(f"{name:{width}}  {json.dumps(default):12}  {doc} [{allowed}]")


@click.command("simulate")
@options.config
@options.overrides
@click.option(
    "--sweep",
    metavar="SECTION.KEY=VALUE,VALUE,...",
    help="Simulate once for each value of a setting, and print one row for each.",
)
@options.thread_count
@options.log_options("warning")
@options.as_json
@click.option(
    "--plots",
    "plots_folder",
    type=FOLDER,
    help="Write PNG plots into this folder; needs blocktrain[plots].",
)
def simulate_command(
    config_path: Path,
    overrides: tuple[str, ...],
    sweep: str | None,
    as_json: bool,
    plots_folder: Path | None,
) -> None:
    """Simulate a run with virtual workers, without training anything.

    The coordinator's own rules make all decisions; time and traffic are simulated. The section
    [simulate] of the settings describes the workers: their number, speed, network and availability.

    With simulate.learn=true, every update that is merged is really trained, which shows the effect
    on the loss. Use a small model for that (preset simulate-learn).
    """
    from blocktrain.figures import check_plots_installed
    from blocktrain.simulate.report import write_plots
    from blocktrain.simulate.scenario import load_scenario

    if plots_folder:
        check_plots_installed()  # before a simulation that may take minutes
    name, values = _parse_sweep(sweep)
    scenarios = {
        value: load_scenario(config_path, [*overrides, f"{name}={value}"] if name else overrides)
        for value in values
    }
    reports = {value: _simulated(scenario) for value, scenario in scenarios.items()}
    if plots_folder:
        write_plots(plots_folder, name, reports)
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


def _parse_sweep(sweep: str | None) -> tuple[str, list[str]]:
    """The setting to vary and its values. Without a sweep: an empty name and one empty value."""
    if sweep is None:
        return "", [""]
    name, _, listed = sweep.partition("=")
    values = [value.strip() for value in listed.split(",")]
    if not name.strip() or not all(values):
        raise click.BadParameter(
            f"{sweep!r} must have the form section.key=value,value", param_hint="--sweep"
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


def _table(report: "Report") -> Table:
    outcome = "finished after" if report.finished else "not finished after"
    title = f"{report.workers:,} workers, {len(report.versions)} blocks: {outcome}"
    title += f" {duration(report.virtual_seconds)}"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for section in (_run_rows(report), _worker_rows(report), _update_rows(report)):
        for row in section.items():
            table.add_row(*row)
        table.add_section()
    return table


def _run_rows(report: "Report") -> dict[str, str]:
    fewest, most = min(report.versions), max(report.versions)
    score = {} if report.ce is None else {"cross entropy on valid (nats/byte)": _ce(report)}
    return score | {
        "batches merged": f"{sum(report.merged_batches):,} of {report.batches:,}",
        "progress of the slowest block": f"{report.slowest_progress:.1%}",
        "versions per block": f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}",
        "mean time per version": duration(report.seconds_per_version),
    }


def _worker_rows(report: "Report") -> dict[str, str]:
    time = {f"worker time {name}": f"{share:.1%}" for name, share in report.utilisation.items()}
    return time | {
        "trained steps that were merged": f"{report.useful_share:.1%}",
        "uploaded": size(report.bytes_up),
        "downloaded": size(report.bytes_down),
    }


def _update_rows(report: "Report") -> dict[str, str]:
    merged = sum(report.staleness.values())
    by_age = {
        f"  {behind} {'version' if behind == 1 else 'versions'} behind": (
            f"{count:,} ({count / merged:.1%})"
        )
        for behind, count in report.staleness.items()
    }
    return {
        "leases given": f"{report.leases_given:,}",
        "  met in time": f"{report.leases_met:,} ({report.participation:.1%})",
        "  met in time, worst block": f"{min(report.participation_by_block):.1%}",
        "  missed or too late": f"{report.leases_missed:,}",
        "  returned by their workers": f"{report.leases_returned:,}",
        "updates merged": f"{merged:,}",
        **by_age,
        "updates refused": f"{sum(report.refused.values()):,}",
        **{f"  {reason}": f"{count:,}" for reason, count in report.refused.items()},
    }


def _sweep_table(name: str, reports: "dict[str, Report]", width: int) -> Table:
    """One row per value. In a narrow terminal the last columns are left out, not cut off."""
    columns = {name: list(reports), **_sweep_columns(list(reports.values()))}
    # A column needs three more characters for its border and padding.
    widths = [max(map(len, (title, *cells))) + 3 for title, cells in columns.items()]
    fitting = max(1, sum(right_edge < width for right_edge in accumulate(widths)))
    titles, left_out = list(columns)[:fitting], list(columns)[fitting:]
    caption = f"no room for: {', '.join(left_out)} (use --json)" if left_out else None
    table = Table(caption=caption, caption_justify="left")
    for title in titles:
        table.add_column(title, justify="right" if table.columns else "left", overflow="fold")
    for row in zip(*(columns[title] for title in titles), strict=True):
        table.add_row(*row)
    return table


def _sweep_columns(reports: "list[Report]") -> dict[str, list[str]]:
    """The columns of the table of a sweep, by title, the most important first."""
    learned = any(report.ce is not None for report in reports)
    return {
        **({"CE": [_ce(report) for report in reports]} if learned else {}),
        "merged": [f"{report.slowest_progress:.1%}" for report in reports],
        "time": [duration(report.virtual_seconds) for report in reports],
        "training": [f"{report.utilisation['training']:.1%}" for report in reports],
        "waiting": [f"{report.utilisation['waiting']:.1%}" for report in reports],
        "in time": [f"{report.participation:.1%}" for report in reports],
        "behind": [f"{report.mean_staleness:.2f}" for report in reports],
        "refused": [f"{sum(report.refused.values()):,}" for report in reports],
        "useful": [f"{report.useful_share:.1%}" for report in reports],
        "uploaded": [size(report.bytes_up) for report in reports],
        "downloaded": [size(report.bytes_down) for report in reports],
    }


def _ce(report: "Report") -> str:
    return "not learned" if report.ce is None else f"{report.ce:.4f}"
