"""blocktrain restore: a coordinator's folder from a backup."""

from pathlib import Path

import click


@click.command("restore")
@click.argument("archive", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--data-dir", type=click.Path(path_type=Path, file_okay=False), required=True)
def command(archive: Path, data_dir: Path) -> None:
    """Unpack a backup into a new folder, every chunk checked against its hash."""
    from blocktrain.coordinator.backup import restore

    count = restore(archive, data_dir)
    click.echo(f"{count} chunks whole   go on: blocktrain coordinator --data-dir {data_dir}")
