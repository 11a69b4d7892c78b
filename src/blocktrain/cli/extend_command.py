"""blocktrain extend: plan a run for more steps, on one machine or in a coordinator's folder."""

from pathlib import Path

import click

from blocktrain.cli import options
from blocktrain.cli.options import COUNT, FOLDER
from blocktrain.cli.terminal import command


@click.command("extend")
@click.argument("run", type=FOLDER)
@click.option("--steps", type=COUNT, required=True, help="New number of steps per block, in total.")
@options.database
def extend_command(run: Path, steps: int, database: str | None) -> None:
    """Plan RUN for more steps per block. RUN is the folder of a run on this machine or of a
    coordinator, and may be finished. Then the next command that is printed trains it further.

    Learning rates before the former end stay as they are. After it, the rate warms up again to the
    cosine that the run would have followed with the new number of steps, and follows that one. The
    steps of the warm-up are train.warmup, but at most a tenth of the extension.

    A coordinator that is running ends, and must be started again. Workers that are connected then
    join again by themselves; those that have ended because the run was finished must be started.
    """
    if database or _is_coordinators(run):
        from blocktrain.coordinator.control import extend
        from blocktrain.coordinator.folder import CoordinatorFolder

        operator = CoordinatorFolder(run, database).operator()
        config = extend(operator.ledger, operator.clock, steps)
        following = command("coordinator", "--data-dir", run)
    else:
        from blocktrain.storage.run_dir import RunDir

        config = RunDir.open(run).extend(steps).config
        following = command("train", "--config", run, "--out", run)
    former = config.train.extended_at[-1]
    click.echo(f"{run}: {steps} steps per block instead of {former}   next: {following}")


def _is_coordinators(folder: Path) -> bool:
    from blocktrain.coordinator.folder import LEDGER_FILE

    return (folder / LEDGER_FILE).exists()
