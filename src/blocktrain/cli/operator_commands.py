"""blocktrain invite, ban, backup and restore: what the operator of a coordinator does."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from blocktrain.cli import options
from blocktrain.cli.terminal import plain, size
from blocktrain.protocol import addresses

if TYPE_CHECKING:
    from blocktrain.coordinator.folder import CoordinatorFolder
    from blocktrain.coordinator.operator import InviteState, Operator
    from blocktrain.protocol.invite import Invite

DAY = 24 * 3600


@click.group("invite")
def invite_command() -> None:
    """List, make or revoke invites. These commands need the coordinator's folder or database, not
    a running coordinator."""


@invite_command.command("new")
@options.data_dir
@options.database
@click.option(
    "--uses",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="Number of workers that can join with it.",
)
@click.option(
    "--days",
    type=click.FloatRange(min=0.001),
    default=30.0,
    show_default=True,
    help="Days until it expires.",
)
@click.option(
    "--evaluate", is_flag=True, help="For workers that score versions instead of training."
)
@click.option(
    "--address",
    "hosts",
    multiple=True,
    metavar="HOST[:PORT]",
    help="Address of the coordinator; repeatable. Default: what it advertised at its last start.",
)
@options.as_json
def new(
    data_dir: Path,
    database: str | None,
    uses: int,
    days: float,
    evaluate: bool,
    hosts: tuple[str, ...],
    as_json: bool,
) -> None:
    """Print a new invite. Its secret is not stored and cannot be shown again."""
    from blocktrain.coordinator.folder import CoordinatorFolder

    home = CoordinatorFolder(data_dir, database)
    operator = home.operator()
    draft = _draft(home, operator, hosts)  # checks the addresses before a secret is made
    secret = operator.invite("evaluate" if evaluate else "train", uses, days * DAY)
    state = operator.invite_of(secret)
    assert state
    invite = replace(draft, secret=secret).encode()
    if as_json:
        click.echo(json.dumps({"id": state.invite, "invite": invite}))
        return
    click.echo(invite)
    click.echo(
        f"id {state.invite}, for {uses} workers within {days:g} days, role {state.role};"
        f" to revoke it: blocktrain invite revoke {state.invite}",
        err=True,
    )


@invite_command.command("list")
@options.data_dir
@options.database
@options.as_json
def show(data_dir: Path, database: str | None, as_json: bool) -> None:
    """List every invite with its role, its remaining uses and the time until it expires."""
    from blocktrain.coordinator.folder import CoordinatorFolder

    invites = CoordinatorFolder(data_dir, database).operator().invites()
    if as_json:
        click.echo(json.dumps([invite._asdict() for invite in invites]))
        return
    click.echo(f"{'id':16s}  {'role':9s} {'uses left':>9s}  time left")
    for invite in invites:
        click.echo(
            f"{invite.invite:16s}  {invite.role:9s} {invite.uses_left:>9d}  {_time_left(invite)}"
        )


@invite_command.command("revoke")
@click.argument("invite")
@click.option("--ban", is_flag=True, help="Also ban the workers that joined with it.")
@options.data_dir
@options.database
def revoke(invite: str, ban: bool, data_dir: Path, database: str | None) -> None:
    """Make INVITE (its id or its text) invalid. Workers that joined with it stay in the run, unless
    --ban is given."""
    from blocktrain.coordinator.folder import CoordinatorFolder

    operator = CoordinatorFolder(data_dir, database).operator()
    name = _id_of(invite, operator) if "_" in invite else invite  # an id has no underscore
    banned = operator.revoke(name, ban=ban)
    click.echo(f"revoked {name}" + (f"; banned {len(banned)} workers" if ban else ""))


def _draft(home: "CoordinatorFolder", operator: "Operator", hosts: tuple[str, ...]) -> "Invite":
    """An invite without its secret."""
    from blocktrain.coordinator.run import run_in
    from blocktrain.protocol.invite import Invite
    from blocktrain.protocol.tls import Authority

    run = run_in(operator.ledger)
    authority = Authority.load(run.authority_certificate, run.authority_key)
    advertised = home.advertised()
    if not hosts and not advertised:
        raise click.UsageError(
            "the coordinator's address is unknown, because it was not started in this folder yet:"
            " start it, or give --address"
        )
    known = advertised.addresses if advertised else (f"https://localhost:{addresses.DEFAULT_PORT}",)
    scheme, _, port = addresses.split_url(known[0])
    urls = tuple(addresses.as_url(host, scheme, port) for host in hosts) or known
    fingerprint = advertised.fingerprint if advertised else authority.fingerprint
    plain = all(url.startswith("http://") for url in urls)
    return Invite(urls, "unknown", None if plain else fingerprint, run.id)


def _id_of(text: str, operator: "Operator") -> str:
    """The id of an invite. No error shows the secret in it."""
    from blocktrain.errors import InviteError
    from blocktrain.protocol.invite import Invite

    invite = operator.invite_of(Invite.decode(text).secret)
    if invite is None:
        raise InviteError(
            "the run in this folder has no such invite; `blocktrain invite list` shows its invites"
        )
    return invite.invite


def _time_left(invite: "InviteState") -> str:
    if invite.revoked:
        return "revoked"
    return f"{invite.seconds_left / DAY:.1f} days" if invite.seconds_left > 0 else "expired"


@click.command("ban")
@click.argument("worker")
@options.data_dir
@options.database
def ban_command(worker: str, data_dir: Path, database: str | None) -> None:
    """Refuse WORKER from now on. WORKER is its name or id in `blocktrain status`, or the beginning
    of the id. Its leases and its updates that are not merged yet go to other workers."""
    from blocktrain.coordinator.folder import CoordinatorFolder

    banned = CoordinatorFolder(data_dir, database).operator().ban(worker)
    click.echo(f"banned {banned.id} ({plain(banned.name)})")


@click.command("backup")
@options.data_dir
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="New file."
)
def backup_command(data_dir: Path, out: Path) -> None:
    """Copy the run in a coordinator's folder into one file, also while the coordinator runs.

    Back up a ledger in PostgreSQL, or chunks in a bucket, with the tools of those systems."""
    from blocktrain.coordinator.snapshot import back_up

    count = back_up(data_dir, out)
    click.echo(f"{out}: {size(count)}   next: blocktrain restore {out} --data-dir NEW")


@click.command("restore")
@click.argument("archive", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="New folder.",
)
def restore_command(archive: Path, data_dir: Path) -> None:
    """Unpack a backup into a new folder and check every chunk against its hash."""
    from blocktrain.coordinator.snapshot import restore

    count = restore(archive, data_dir)
    click.echo(f"{count} chunks intact   next: blocktrain coordinator --data-dir {data_dir}")
