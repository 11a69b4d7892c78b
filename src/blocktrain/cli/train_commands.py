"""blocktrain train; and estimate and settings, which say beforehand what a config leads to."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from blocktrain.cli import options
from blocktrain.cli.terminal import duration, size, stop_on_signal
from blocktrain.train.estimation import FLOPS


@click.command("train")
@options.config
@options.overrides
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="The run's folder.",
)
@click.option(
    "--block", "blocks", type=int, multiple=True, help="Train only this block; repeatable."
)
@click.option(
    "--parallel",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of blocks to train at the same time, each in its own process.",
)
@options.thread_count
@options.log_options("warning")
@options.as_json
def train_command(
    config_path: Path,
    overrides: tuple[str, ...],
    out: Path,
    blocks: tuple[int, ...],
    parallel: int,
    as_json: bool,
) -> None:
    """Train a run. The same command resumes it after an interruption.

    The loss and ce shown are those of the training batches; where blocks denoise, the input of a
    block contains the answer plus noise. They are not scores; `blocktrain eval` computes those."""
    from blocktrain.cli.progress import training_progress
    from blocktrain.config import load_config
    from blocktrain.errors import ConfigError
    from blocktrain.train.run_session import open_session

    config = load_config(config_path, overrides)
    for block in blocks:
        if not 0 <= block < config.block_count:
            raise ConfigError(f"--block {block}: the run has blocks 0 to {config.block_count - 1}")
    for warning in config.warnings:
        click.echo(f"warning: {warning}", err=True)
    chosen = list(blocks) or list(range(config.block_count))
    session = open_session(config, out)
    for note in session.notes(chosen):
        click.echo(note, err=True)
    with stop_on_signal() as stop, training_progress("block", as_json=as_json) as on_progress:
        if parallel > 1:
            done = session.train_side_by_side(chosen, parallel, on_progress, stop, options.PROGRAM)
        else:
            done = session.train_in_turn(chosen, on_progress, stop)
    if not done:
        click.echo(f"stopped; the same command resumes {out}", err=True)
        raise SystemExit(130)
    if not as_json:
        click.echo(f"trained: {out}   next: blocktrain eval {out}")


@click.command("estimate")
@options.config
@options.overrides
@click.option(
    "--on",
    "device",
    type=click.Choice(list(FLOPS)),
    default="h200",
    show_default=True,
    help="Device to estimate the time for.",
)
@options.as_json
def estimate_command(
    config_path: Path, overrides: tuple[str, ...], device: str, as_json: bool
) -> None:
    """Estimate parameters, memory per worker, arithmetic, traffic, and the time on a device."""
    from blocktrain.config import load_config
    from blocktrain.train.estimation import estimate

    config = load_config(config_path, overrides)
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
    rows = [
        (
            "parameters",
            f"{needs.parameters / 1e6:,.2f} M in {config.block_count} blocks"
            f" ({ratio:.3f} x the end-to-end model's {needs.end_to_end_parameters / 1e6:,.2f} M)",
        ),
        ("per worker", f"{needs.parameters_per_block / 1e6:,.2f} M parameters"),
        ("  weights, gradients, optimizer", size(needs.fixed_bytes_per_worker)),
        ("  activations (estimate)", size(needs.activation_bytes_per_worker)),
        ("  together", size(needs.memory_per_worker)),
        *_cache_row(config.objective.feature_cache, needs.feature_cache_bytes),
        ("arithmetic", f"{needs.flops_per_step / 1e12:,.4f} TFLOP per step, {needs.steps} steps"),
        ("data", f"{size(needs.bytes_per_block)} per block"),
        (
            "network traffic",
            f"{size(needs.wire_bytes_per_round)} per worker and round (a version down,"
            " an update up)",
        ),
        (f"time on {device} (estimate)", f"{duration(seconds)} per block"),
    ]
    for name, value in rows:
        click.echo(f"{name:34s}{value}")


def _cache_row(place: str, count: int) -> list[tuple[str, str]]:
    return [(f"  feature cache ({place})", size(count))] if count else []


@click.command("settings")
@options.as_json
def settings_command(as_json: bool) -> None:
    """List every setting of a config with its default and its meaning."""
    from blocktrain.config import describe
    from blocktrain.simulate.scenario import Scenario

    settings = describe(Scenario)
    if as_json:
        keys = ("name", "default", "doc")
        click.echo(json.dumps([dict(zip(keys, setting, strict=True)) for setting in settings]))
        return
    width = max(len(name) for name, _, _ in settings)
    for name, default, doc in settings:
        click.echo(f"{name:{width}}  {json.dumps(default):12}  {doc}")
