"""blocktrain export: one assembled safetensors file."""

import json
from pathlib import Path

import click

from blocktrain.cli import options
from blocktrain.cli.sizes import size


@click.command("export")
@options.run
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Directory to write.")
@options.as_json
def command(run: Path, out: Path, as_json: bool) -> None:
    """Write all blocks of RUN as one safetensors file plus config, which eval, generate and serve
    load."""
    from blocktrain.storage.run_dir import RunDir

    path = RunDir.open(run).export(out)
    count = path.stat().st_size
    click.echo(
        json.dumps({"file": str(path), "bytes": count}) if as_json else f"{path}  {size(count)}"
    )
