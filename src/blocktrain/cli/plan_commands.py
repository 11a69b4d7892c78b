"""blocktrain estimate: what a run will need, before anything runs."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from blocktrain.cli import options
from blocktrain.cli.display import duration, size
from blocktrain.train.estimation import FLOPS


@click.command("estimate")
@options.config
@options.overrides
@click.option(
    "--on",
    "device",
    type=click.Choice(list(FLOPS)),
    default="h200",
    show_default=True,
    help="Device to state the time for.",
)
@options.as_json
def estimate_command(
    config_path: Path, overrides: tuple[str, ...], device: str, as_json: bool
) -> None:
    """Parameters, memory per worker, arithmetic, bytes on the wire, and time on a stated device."""
    from blocktrain.cli.options import resolve_config
    from blocktrain.config import load_config
    from blocktrain.train.estimation import estimate

    config = load_config(resolve_config(config_path), overrides)
    needs = estimate(config)
    seconds = needs.seconds(FLOPS[device])
    if as_json:
        click.echo(
            json.dumps(
                {
                    **asdict(needs),
                    "memory_per_worker": needs.memory_per_worker,
                    "device": device,
                    "seconds_per_block": seconds,
                }
            )
        )
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
            "on the wire",
            f"{size(needs.wire_bytes_per_round)} per worker and round (a version down,"
            " an update up)",
        ),
        (f"time on {device} (estimate)", f"{duration(seconds)} per block"),
    ]
    for name, value in rows:
        click.echo(f"{name:34s}{value}")


def _cache_row(where: str, count: int) -> list[tuple[str, str]]:
    return [(f"  feature cache ({where})", size(count))] if count else []


@click.command("settings")
@options.as_json
def settings_command(as_json: bool) -> None:
    """List every setting, its default and a sentence about it."""
    from blocktrain.config import describe
    from blocktrain.simulate.scenario import Scenario

    settings = describe(Scenario)
    if as_json:
        keys = ("name", "default", "doc")
        click.echo(json.dumps([dict(zip(keys, setting, strict=True)) for setting in settings]))
        return
    width = max(len(name) for name, _, _ in settings)
    for name, default, doc in settings:
        shown = json.dumps(default)
        click.echo(f"{name:{width}}  {shown:12}  {doc}")
