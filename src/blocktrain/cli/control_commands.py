"""blocktrain pause, resume, drain: stop a run for a while; and page: the address of its web page.

These commands need the coordinator's folder or database; the coordinator itself need not run.
"""

import json
from pathlib import Path

import click

from blocktrain.cli import options
from blocktrain.cli.coordinator_commands import operator_page
from blocktrain.cli.terminal import command
from blocktrain.coordinator.control import set_control
from blocktrain.coordinator.folder import CoordinatorFolder
from blocktrain.protocol.page_messages import Control


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


def _set(data_dir: Path, database: str | None, control: Control) -> int:
    operator = CoordinatorFolder(data_dir, database).operator()
    return set_control(operator.ledger, operator.clock, control)


def _resume(data_dir: Path) -> str:
    return command("resume", "--data-dir", data_dir)
