"""blocktrain fetch: a run's current model, assembled here."""

import json
from pathlib import Path

import click

from blocktrain.cli import options
from blocktrain.cli.calling import caller
from blocktrain.cli.sizes import size


@click.command("fetch")
@options.invite
@click.option("--out", type=click.Path(path_type=Path), required=True, help="New run directory.")
@options.as_json
def command(invite: str, out: Path, as_json: bool) -> None:
    """Download every block's current version into a run directory that eval, generate and export
    accept. Can be done at any moment of a run."""
    from blocktrain.worker.model_fetch import fetch_model

    fetched = fetch_model(caller(invite), out)
    if as_json:
        told = {"out": str(out), "versions": fetched.versions, "bytes_moved": fetched.bytes_moved}
        click.echo(json.dumps(told))
        return
    click.echo(
        f"{out}: blocks at versions {', '.join(map(str, fetched.versions))},"
        f" {size(fetched.bytes_moved)} moved   next: blocktrain eval {out}"
    )
