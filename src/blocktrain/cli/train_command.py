"""blocktrain train: the blocks of a run, one after another or side by side."""

from pathlib import Path

import click

from blocktrain.cli import options


@click.command("train")
@options.config
@options.overrides
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Run directory.")
@click.option(
    "--block", "blocks", type=int, multiple=True, help="Train only this block; repeatable."
)
@click.option(
    "--parallel",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Blocks to train side by side, each in a process of its own.",
)
@options.thread_count
@options.as_json
def train_command(
    config_path: Path,
    overrides: tuple[str, ...],
    out: Path,
    blocks: tuple[int, ...],
    parallel: int,
    as_json: bool,
) -> None:
    """Train a run. The same command again resumes it where it stopped.

    The loss and ce that are shown are the training's own, on batches and, where blocks denoise,
    with the answer in sight through the noise: not scores, which `blocktrain eval` gives."""
    from blocktrain.cli.display import shown
    from blocktrain.cli.options import PROGRAM, resolve_config, stop_on_signal
    from blocktrain.config import load_config
    from blocktrain.errors import ConfigError
    from blocktrain.train.run_session import open_session

    config = load_config(resolve_config(config_path), overrides)
    for block in blocks:
        if not 0 <= block < config.block_count:
            raise ConfigError(f"--block {block}: the run has blocks 0 to {config.block_count - 1}")
    for warning in config.warnings:
        click.echo(f"warning: {warning}", err=True)
    chosen = list(blocks) or list(range(config.block_count))
    session = open_session(config, out)
    for note in session.notes(chosen):
        click.echo(note, err=True)
    with stop_on_signal() as stop, shown("block", as_json=as_json) as on_progress:
        if parallel > 1:
            done = session.train_side_by_side(chosen, parallel, on_progress, stop, PROGRAM)
        else:
            done = session.train_in_turn(chosen, on_progress, stop)
    if not done:
        click.echo(f"stopped; the same command resumes {out}", err=True)
        raise SystemExit(130)
    if not as_json:
        click.echo(f"trained: {out}   next: blocktrain eval {out}")
