"""blocktrain invite: who may join a run."""

import json
from pathlib import Path

import click

from blocktrain.cli import options

DAY = 24 * 3600


@click.group("invite")
def command() -> None:
    """List, make or revoke invites; works on the coordinator's folder or database."""


@command.command("new")
@options.data_dir
@options.database
@click.option("--uses", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--days", type=click.FloatRange(min=0.001), default=30.0, show_default=True)
@click.option(
    "--evaluate", is_flag=True, help="For workers that score versions instead of training."
)
@click.option(
    "--address",
    "addresses",
    multiple=True,
    required=True,
    metavar="URL",
    help="Where the coordinator is reached, e.g. https://host:7070; repeatable.",
)
def new(
    data_dir: Path,
    database: str | None,
    uses: int,
    days: float,
    evaluate: bool,
    addresses: tuple[str, ...],
) -> None:
    """Print a new invite; its secret is shown this once."""
    from blocktrain.coordinator.home import Home
    from blocktrain.coordinator.members import Members
    from blocktrain.protocol.invite import Invite

    run = Home(data_dir, database).open()
    secret = Members(run).invite("evaluate" if evaluate else "train", uses, days * DAY)
    pinned = run.authority.fingerprint if addresses[0].startswith("https://") else None
    click.echo(Invite(addresses, secret, pinned, run.id).encode())


@command.command("list")
@options.data_dir
@options.database
@options.as_json
def show(data_dir: Path, database: str | None, as_json: bool) -> None:
    """Every invite: who it is for, how often and how long it can still be used."""
    from blocktrain.coordinator.home import Home
    from blocktrain.coordinator.members import Members

    found = Members(Home(data_dir, database).open()).invites()
    if as_json:
        click.echo(json.dumps([invite._asdict() for invite in found]))
        return
    for invite in found:
        state = "revoked" if invite.revoked else f"{max(0.0, invite.seconds_left) / DAY:.1f} days"
        click.echo(f"{invite.invite}  {invite.role:9s} {invite.uses_left:>7d} uses  {state}")


@command.command("revoke")
@click.argument("invite")
@options.data_dir
@options.database
def revoke(invite: str, data_dir: Path, database: str | None) -> None:
    """Nobody new joins with INVITE any more; those who did stay."""
    from blocktrain.coordinator.home import Home
    from blocktrain.coordinator.members import Members

    Members(Home(data_dir, database).open()).revoke(invite)
    click.echo(f"revoked {invite}")
