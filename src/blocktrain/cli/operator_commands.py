"""blocktrain invite: who may join a run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from blocktrain.cli import options
from blocktrain.cli.display import plain
from blocktrain.protocol import addresses

if TYPE_CHECKING:
    from blocktrain.coordinator.folder import CoordinatorFolder
    from blocktrain.coordinator.members import InviteState, Operator
    from blocktrain.protocol.invite import Invite

DAY = 24 * 3600


@click.group("invite")
def invite_command() -> None:
    """List, make or revoke invites; works on the coordinator's folder or database."""


@invite_command.command("new")
@options.data_dir
@options.database
@click.option("--uses", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--days", type=click.FloatRange(min=0.001), default=30.0, show_default=True)
@click.option(
    "--evaluate", is_flag=True, help="For workers that score versions instead of training."
)
@click.option(
    "--address",
    "written",
    multiple=True,
    metavar="HOST[:PORT]",
    help="Where the coordinator is reached; repeatable. Default: where it last said it is.",
)
@options.as_json
def new(
    data_dir: Path,
    database: str | None,
    uses: int,
    days: float,
    evaluate: bool,
    written: tuple[str, ...],
    as_json: bool,
) -> None:
    """Print a new invite; its secret is shown this once."""
    from blocktrain.coordinator.folder import CoordinatorFolder

    home = CoordinatorFolder(data_dir, database)
    operator = home.operator()
    draft = _draft(home, operator, written)  # before anything is made that could be joined with
    secret = operator.invite("evaluate" if evaluate else "train", uses, days * DAY)
    made = operator.invite_of(secret)
    assert made
    invite = replace(draft, secret=secret).encode()
    if as_json:
        click.echo(json.dumps({"id": made.invite, "invite": invite}))
        return
    click.echo(invite)
    click.echo(
        f"id {made.invite}: {uses} uses in {days:g} days, to {made.role};"
        f" end it: blocktrain invite revoke {made.invite}",
        err=True,
    )


@invite_command.command("list")
@options.data_dir
@options.database
@options.as_json
def show(data_dir: Path, database: str | None, as_json: bool) -> None:
    """Every invite: who it is for, how often and how long it can still be used."""
    from blocktrain.coordinator.folder import CoordinatorFolder

    found = CoordinatorFolder(data_dir, database).operator().invites()
    if as_json:
        click.echo(json.dumps([invite._asdict() for invite in found]))
        return
    click.echo(f"{'id':16s}  {'to':9s} {'uses left':>9s}  time left")
    for invite in found:
        click.echo(
            f"{invite.invite:16s}  {invite.role:9s} {invite.uses_left:>9d}  {_time_left(invite)}"
        )


@invite_command.command("revoke")
@click.argument("invite")
@click.option("--ban", is_flag=True, help="Ban everybody who joined with it, too.")
@options.data_dir
@options.database
def revoke(invite: str, ban: bool, data_dir: Path, database: str | None) -> None:
    """Nobody new joins with INVITE (its id, or all of it) any more; those who did stay, unless they
    are banned."""
    from blocktrain.coordinator.folder import CoordinatorFolder

    operator = CoordinatorFolder(data_dir, database).operator()
    named = _id_of(invite, operator) if "_" in invite else invite  # no id has one
    banned = operator.revoke(named, ban=ban)
    click.echo(f"revoked {named}" + (f", banned {len(banned)} who joined" if ban else ""))


def _draft(home: "CoordinatorFolder", operator: "Operator", written: tuple[str, ...]) -> "Invite":
    """An invite that lacks its secret."""
    from blocktrain.coordinator.run import run_row
    from blocktrain.protocol.invite import Invite
    from blocktrain.protocol.tls import Authority

    run = run_row(operator.ledger)
    authority = Authority.load(run.authority_certificate, run.authority_key)
    known = home.advertised()
    if not written and not known:
        raise click.UsageError(
            "no coordinator of this folder has said yet where it is reached: give --address"
        )
    said = known.addresses if known else (f"https://localhost:{addresses.DEFAULT_PORT}",)
    scheme, _, port = addresses.split_url(said[0])
    urls = tuple(addresses.as_url(place, scheme, port) for place in written) or said
    fingerprint = known.fingerprint if known else authority.fingerprint
    plain = all(url.startswith("http://") for url in urls)
    return Invite(urls, "unknown", None if plain else fingerprint, run.id)


def _id_of(written: str, operator: "Operator") -> str:
    """The id of an invite; what is secret in it is not shown, whatever is wrong with it."""
    from blocktrain.errors import InviteError
    from blocktrain.protocol.invite import Invite

    found = operator.invite_of(Invite.decode(written).secret)
    if found is None:
        raise InviteError("this invite is not of the run in this folder; see: invite list")
    return found.invite


def _time_left(invite: "InviteState") -> str:
    if invite.revoked:
        return "revoked"
    return f"{invite.seconds_left / DAY:.1f} days" if invite.seconds_left > 0 else "expired"


@click.command("ban")
@click.argument("worker")
@options.data_dir
@options.database
def ban_command(worker: str, data_dir: Path, database: str | None) -> None:
    """Take nothing more from WORKER (its name or id in `blocktrain status`, or how the id begins);
    what it was doing, or sent and was not merged yet, is handed out to others."""
    from blocktrain.coordinator.folder import CoordinatorFolder

    banned = CoordinatorFolder(data_dir, database).operator().ban(worker)
    click.echo(f"banned {banned.id} ({plain(banned.name)})")


@click.command("backup")
@options.data_dir
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
def backup_command(data_dir: Path, out: Path) -> None:
    """Copy the run in a coordinator's folder into one file; the coordinator may go on running.

    A ledger in PostgreSQL or chunks in a bucket are backed up with those systems' own tools."""
    from blocktrain.coordinator.backup import back_up

    size = back_up(data_dir, out)
    click.echo(f"{out}: {size / 1e6:,.1f} MB   back again: blocktrain restore {out} --data-dir NEW")


@click.command("restore")
@click.argument("archive", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--data-dir", type=click.Path(path_type=Path, file_okay=False), required=True)
def restore_command(archive: Path, data_dir: Path) -> None:
    """Unpack a backup into a new folder, every chunk checked against its hash."""
    from blocktrain.coordinator.backup import restore

    count = restore(archive, data_dir)
    click.echo(f"{count} chunks whole   go on: blocktrain coordinator --data-dir {data_dir}")
