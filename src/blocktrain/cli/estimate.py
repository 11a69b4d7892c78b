"""blocktrain estimate: what a run will need, before anything runs."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from blocktrain.cli import options
from blocktrain.cli.sizes import size


@click.command("estimate")
@options.config
@options.overrides
@click.option(
    "--on", "device", default="h200", show_default=True, help="Device to state the time for."
)
@options.as_json
def command(config_path: Path, overrides: tuple[str, ...], device: str, as_json: bool) -> None:
    """Parameters, memory per worker, arithmetic, bytes on the wire, and time on a stated device."""
    from blocktrain.cli.presets import resolve_config
    from blocktrain.config import load_config
    from blocktrain.train.estimate import DEVICES, estimate

    if device not in DEVICES:
        raise click.BadParameter(
            f"{device!r} is not one of {', '.join(DEVICES)}", param_hint="--on"
        )
    config = load_config(resolve_config(config_path), overrides)
    needs = estimate(config)
    seconds = needs.seconds(DEVICES[device])
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
            f"{needs.parameters / 1e6:,.2f} M in {config.units} blocks"
            f" ({ratio:.3f} x the end-to-end model's {needs.end_to_end_parameters / 1e6:,.2f} M)",
        ),
        ("per worker", f"{needs.parameters_per_block / 1e6:,.2f} M parameters"),
        ("  weights, gradients, optimizer", f"{needs.fixed_bytes_per_worker / 1e9:,.3f} GB"),
        ("  activations (estimate)", f"{needs.activation_bytes_per_worker / 1e9:,.3f} GB"),
        ("  together", f"{needs.memory_per_worker / 1e9:,.3f} GB"),
        *_cache_row(config.objective.feature_cache, needs.feature_cache_bytes),
        ("arithmetic", f"{needs.flops_per_step / 1e12:,.4f} TFLOP per step, {needs.steps} steps"),
        ("data", f"{needs.bytes_per_block / 1e6:,.1f} MB per block"),
        (
            "on the wire",
            f"{size(needs.wire_bytes_per_round)} per worker and round (a version down,"
            " an update up)",
        ),
        (f"time on {device} (estimate)", f"{_duration(seconds)} per block"),
    ]
    for name, value in rows:
        click.echo(f"{name:34s}{value}")


def _cache_row(where: str, size: int) -> list[tuple[str, str]]:
    return [(f"  feature cache ({where})", f"{size / 1e9:,.3f} GB")] if size else []


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
