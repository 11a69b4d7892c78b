"""blocktrain ban: exclude a worker from a run."""

from pathlib import Path

import click

from blocktrain.cli import options
from blocktrain.cli.plain import plain


@click.command("ban")
@click.argument("worker")
@options.data_dir
@options.database
def command(worker: str, data_dir: Path, database: str | None) -> None:
    """Take nothing more from WORKER (its name or id in `blocktrain status`, or how the id begins);
    what it was doing, or sent and was not merged yet, is handed out to others."""
    from blocktrain.coordinator.home import Home

    banned = Home(data_dir, database).operator().ban(worker)
    click.echo(f"banned {banned.id} ({plain(banned.name)})")
