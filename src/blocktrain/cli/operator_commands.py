"""What the operator of a run does while it goes on: blocktrain pause, drain, resume, page, ban and
unmerge.

These commands need the coordinator's folder or database; the coordinator itself need not run.
"""

import json
import re
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import click

from blocktrain.cli import options
from blocktrain.cli.coordinator_commands import operator_page
from blocktrain.cli.terminal import command, plain
from blocktrain.config import from_toml
from blocktrain.coordinator.control import set_control
from blocktrain.coordinator.folder import CoordinatorFolder
from blocktrain.coordinator.members import Operator, find_worker
from blocktrain.coordinator.run import Run, run_row
from blocktrain.coordinator.unmerger import Choice, Unmerger, removable_updates
from blocktrain.errors import NotFoundError
from blocktrain.ledger.schema import UpdateRow
from blocktrain.protocol.page_messages import Control

VERSION = re.compile(r"([0-9]{1,9}):([0-9]{1,9})")


@click.command("pause")
@options.data_dir
@options.database
def pause_command(data_dir: Path, database: str | None) -> None:
    """Stop training until `blocktrain resume`. Workers stay, and stop at their next heartbeat. What
    they have trained of open leases is lost; the batches are handed out again."""
    ended = _set(data_dir, database, "paused")
    click.echo(f"paused; {ended} open leases ended   next: {_resume(data_dir)}")


@click.command("drain")
@options.data_dir
@options.database
def drain_command(data_dir: Path, database: str | None) -> None:
    """Hand out no new leases until `blocktrain resume`. Workers finish the leases that they hold,
    so nothing is lost."""
    _set(data_dir, database, "draining")
    click.echo(f"draining; the run page says when it is done   next: {_resume(data_dir)}")


@click.command("resume")
@options.data_dir
@options.database
def resume_command(data_dir: Path, database: str | None) -> None:
    """Go on after `blocktrain pause` or `blocktrain drain`."""
    _set(data_dir, database, "running")
    click.echo("running; waiting workers ask again within seconds")


@click.command("page")
@options.data_dir
@click.option(
    "--new-token", is_flag=True, help="Replace the token, so that the old one is refused."
)
@options.as_json
def page_command(data_dir: Path, new_token: bool, as_json: bool) -> None:
    """Print the address of the run page for the operator. Its last part is a token with which the
    page can pause the run, ban workers and make invites; keep it secret."""
    home = CoordinatorFolder(data_dir)
    advertised = home.advertised()
    if advertised is None:
        raise click.UsageError(
            f"no coordinator was started in {data_dir} yet; give its folder with --data-dir, or"
            f" start it with: {command('coordinator')}"
        )
    token = "" if new_token else home.operator_token()
    page = operator_page(advertised.addresses, token or home.renew_operator_token())
    click.echo(json.dumps({"page": page}) if as_json else page)


@click.command("ban")
@click.argument("worker")
@click.option(
    "--unmerge", is_flag=True, help="Also remove its merged updates, like `blocktrain unmerge`."
)
@options.data_dir
@options.database
@options.blobs
def ban_command(
    worker: str, unmerge: bool, data_dir: Path, database: str | None, blobs: str | None
) -> None:
    """Refuse WORKER from now on. WORKER is its name or id in `blocktrain status`, or a prefix of
    the id. The batches of its leases and unmerged updates go to other workers."""
    home = CoordinatorFolder(data_dir, database, blobs)
    operator = home.operator()
    with closing(operator.ledger):
        banned = operator.ban(worker)
        merged = _removable(operator, banned.id)
    click.echo(f"banned {banned.id} ({plain(banned.name)})")
    if merged and unmerge:
        _unmerge(home, [banned.id], f"worker {plain(banned.name)} was banned")
    elif merged:
        ledger = ("--db", database) if database else ()
        removal = command("unmerge", banned.id, "--data-dir", data_dir, *ledger)
        click.echo(f"{merged} merged updates of it remain; to remove them: {removal}")


@click.command("unmerge")
@click.argument("targets", nargs=-1, required=True, metavar="WORKER|BLOCK:VERSION...")
@click.option("--reason", default="removed by the operator", help="For the run's events.")
@options.data_dir
@options.database
@options.blobs
def unmerge_command(
    targets: tuple[str, ...],
    reason: str,
    data_dir: Path,
    database: str | None,
    blobs: str | None,
) -> None:
    """Rebuild blocks without the merged updates of WORKER, or without those that were merged into a
    version (such as 2:14, version 14 of block 2). The coordinator may be running.

    A block becomes what it would be without these updates, as its next version, and their batches
    are trained again. The updates of the newest versions are kept for this (swarm.keep_updates);
    older ones stay in the model. A worker that is not banned continues to train.
    """
    _unmerge(CoordinatorFolder(data_dir, database, blobs), targets, reason)


def _set(data_dir: Path, database: str | None, control: Control) -> int:
    operator = CoordinatorFolder(data_dir, database).operator()
    return set_control(operator.ledger, operator.clock, control)


def _resume(data_dir: Path) -> str:
    return command("resume", "--data-dir", data_dir)


def _removable(operator: Operator, worker: str) -> int:
    """How many merged updates of a worker can be removed."""
    keep = from_toml(run_row(operator.ledger).config).swarm.keep_updates
    with operator.ledger.read() as tx:
        blocks = [state.index for state in tx.blocks.states()]
        rows = [row for block in blocks for row in removable_updates(tx, block, keep)[1]]
    return sum(row.worker == worker for row in rows)


def _unmerge(home: CoordinatorFolder, names: Sequence[str], reason: str) -> None:
    run = home.open()
    with closing(run.ledger):
        choices = [_choice(run, name) for name in names]
        count = 0
        for block in range(run.config.block_count):
            done = Unmerger(run).unmerge(
                block, lambda row: any(chosen(row) for chosen in choices), reason
            )
            if done:
                click.echo(f"block {block}: {done} ({done.seconds:.1f} s)")
                count += len(done.removed)
    if not count:
        raise NotFoundError(
            f"no update of {', '.join(names)} can be removed; only those of each block's last"
            f" {run.config.swarm.keep_updates} versions are kept (swarm.keep_updates)"
        )


def _choice(run: Run, name: str) -> Choice:
    if match := VERSION.fullmatch(name):
        return partial(_is_of_version, int(match[1]), int(match[2]))
    with run.ledger.read() as tx:
        return partial(_is_of_worker, find_worker(tx, name).id)


def _is_of_version(block: int, version: int, row: UpdateRow) -> bool:
    return (row.block, row.merged_into) == (block, version)


def _is_of_worker(worker: str, row: UpdateRow) -> bool:
    return row.worker == worker
