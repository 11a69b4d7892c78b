"""blocktrain backup: a coordinator's folder as one file."""

from pathlib import Path

import click

from blocktrain.cli import options


@click.command("backup")
@options.data_dir
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
def command(data_dir: Path, out: Path) -> None:
    """Copy the run in a coordinator's folder into one file; the coordinator may go on running.

    A ledger in PostgreSQL or chunks in a bucket are backed up with those systems' own tools."""
    from blocktrain.coordinator.backup import back_up

    size = back_up(data_dir, out)
    click.echo(f"{out}: {size / 1e6:,.1f} MB   back again: blocktrain restore {out} --data-dir NEW")
