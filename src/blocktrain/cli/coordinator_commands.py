"""blocktrain coordinator: start a run that other machines can join, or resume one; and invite,
backup and restore: its administration."""

import json
import logging
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
from sqlalchemy.exc import SQLAlchemyError

from blocktrain.cli import options
from blocktrain.cli.local_validators import LocalValidators, torch_is_installed
from blocktrain.cli.options import AMOUNT, COUNT, FILE, FOLDER
from blocktrain.cli.terminal import command, plain, size, tokenising_progress
from blocktrain.config import load_config
from blocktrain.coordinator.folder import (
    VALIDATORS_FILE,
    Advertised,
    CoordinatorFolder,
    back_up,
    restore,
)
from blocktrain.coordinator.members import DAY, InviteState, Operator
from blocktrain.coordinator.page_settings import PageSettings
from blocktrain.coordinator.run import run_row
from blocktrain.coordinator.server import own_addresses, own_tls, serve, tls_of
from blocktrain.coordinator.service import Service
from blocktrain.coordinator.webhooks import Webhooks
from blocktrain.errors import DeviceError, InviteError
from blocktrain.protocol import addresses
from blocktrain.protocol.invite import Invite
from blocktrain.protocol.limited_server import ConnectionLimits
from blocktrain.protocol.messages import Role
from blocktrain.protocol.status_messages import Event
from blocktrain.protocol.tls import Authority

FIRST_INVITE_USES = 100_000
FIRST_INVITE_SECONDS = 365 * DAY
ROUTINE = ("leased", "uploaded", "late", "invited", "revoked")  # events logged at debug
UNDEFENDED = (
    "unless other validators check updates, a worker can ruin the run by sending harmful ones, and"
    " earn credit without training"
)
UNSCORED = "nothing scores the run either, unless a worker with --evaluate or --validate joins"
FINISHED = "the run is finished; `blocktrain fetch INVITE --out FOLDER` downloads the model"

log = logging.getLogger(__name__)


def _http_urls(
    context: click.Context, option: click.Parameter, urls: tuple[str, ...]
) -> tuple[str, ...]:
    for url in urls:
        if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", url):
            raise click.BadParameter(f"{url!r} is not an address that begins with http(s)://")
    return urls


@click.command("coordinator")
@options.config_option(required=False, help="Preset or TOML file; only for a new run.")
@options.overrides
@click.option(
    "--listen", default=f"0.0.0.0:{addresses.DEFAULT_PORT}", metavar="HOST:PORT",
    callback=options.host_port, help="Address for workers; 0.0.0.0 listens on every interface.",
)  # fmt: skip
@options.data_dir
@options.database
@options.blobs
@click.option(
    "--advertise",
    multiple=True,
    metavar="HOST[:PORT]",
    help="Address that the invite gives to workers; repeatable. Default: this machine's.",
)
@click.option(
    "--certificate",
    nargs=2,
    type=click.Path(path_type=Path, exists=True),
    metavar="CERT KEY",
    help="Publicly trusted certificate and its key (PEM). Default: a certificate of the run's own"
    " authority, whose fingerprint is in the invite.",
)
@click.option(
    "--plain-http", is_flag=True, help="Use HTTP without TLS; only for a network that you trust."
)
@click.option("--title", help="Name of the run on its web page; remembered.")
@click.option(
    "--reference",
    type=AMOUNT,
    metavar="NATS",
    help="Score to compare with on the run page, in nats per byte; remembered.",
)
@click.option(
    "--public-page/--private-page",
    "public_page",
    default=None,
    help="Who sees the run page: anybody who reaches the coordinator, or only the operator and"
    " those who have an invite. Default: as at the last start, at first public.",
)
@options.force
@click.option(
    "--webhook",
    "webhooks",
    multiple=True,
    metavar="URL",
    callback=_http_urls,
    help="Address that gets a POST request with JSON when the run is finished, a lease is lost or"
    " an update is refused; repeatable.",
)
@click.option(
    "--validators",
    type=click.IntRange(min=0),
    help="How many processes on this machine check updates before they count, and now and then"
    " score the model; 0 if validators run elsewhere only. Default: 1, if torch is installed.",
)
@click.option(
    "--no-validate",
    is_flag=True,
    help="Merge updates unchecked. Any worker can then ruin the run; for workers that you trust."
    " Nothing scores the run, unless a worker evaluates it.",
)
@options.connections(8192)
@options.log_options("info")
@options.as_json
def coordinator_command(
    config_path: Path | None,
    overrides: tuple[str, ...],
    listen: str,
    data_dir: Path,
    database: str | None,
    blobs: str | None,
    advertise: tuple[str, ...],
    certificate: tuple[Path, Path] | None,
    plain_http: bool,
    title: str | None,
    reference: float | None,
    public_page: bool | None,
    webhooks: tuple[str, ...],
    force: bool,
    validators: int | None,
    no_validate: bool,
    most_connections: int,
    most_connections_per_address: int | None,
    as_json: bool,
) -> None:
    """Coordinate a run: lease blocks to workers, check their updates and merge them into new
    versions. Prints the invite that `blocktrain worker` joins with, and the address of the run
    page. The coordinator can be stopped at any time; the same command resumes the run, and then
    needs no --config."""
    host, port = addresses.split_host_port(listen, default_host="0.0.0.0")
    local_validators = _validator_count(validators, no_validate=no_validate)
    home = CoordinatorFolder(data_dir, database, blobs)
    if config_path:
        config = load_config(config_path, overrides)
        # First, so that a port in use leaves no folder behind.
        listener = addresses.bound_socket(host, port)
        with tokenising_progress(hidden=as_json) as on_text:
            run = home.open_or_create(config, on_text, force=force)
    else:
        run = home.open()
        listener = addresses.bound_socket(host, port)
    if no_validate or local_validators or validators is not None:
        run.require_checks(not no_validate)
    limits = ConnectionLimits.fitting(most_connections, most_connections_per_address)
    port = listener.getsockname()[1]
    scheme = "http" if plain_http else "https"
    # If it listens on every interface: the outgoing interface's address and loopback.
    own = [own_addresses()[-1], "127.0.0.1"] if host in ("0.0.0.0", "::") else [host]
    own_urls = tuple(addresses.as_url(each, scheme, port) for each in own)
    urls = tuple(addresses.as_url(each, scheme, port) for each in advertise) or own_urls
    pinned = None if plain_http or certificate else run.authority.fingerprint
    draft = Invite(urls, "unknown", pinned, run.id)  # checks the addresses before a secret is made
    tls = None
    if not plain_http:
        names = [*own_addresses(), *(addresses.split_url(url)[1] for url in (*own_urls, *urls))]
        tls = tls_of(*certificate) if certificate else own_tls(run, names)
    home.advertise(Advertised(urls, pinned))
    choices = home.page_choices(title=title, reference=reference, is_public=public_page)
    page = PageSettings(**choices, operator_token=home.operator_token, draft=draft)
    service = Service(run, page=page)
    invite = replace(draft, secret=_first_invite(home, service)).encode()
    token = home.operator_token() or home.renew_operator_token()
    _announce(service, invite, urls, token, as_json=as_json)
    # A publicly trusted certificate is not valid for this machine's own addresses.
    reached_at = urls if certificate else (*reversed(own_urls), *urls)
    secret = _validators_invite(home, service) if local_validators else "none"
    own_invite = replace(draft, secret=secret, addresses=tuple(dict.fromkeys(reached_at)))
    device = run.config.train.device
    with (
        Webhooks(run.id, webhooks) as hooks,
        EventLog(service, hooks.notify),
        LocalValidators(local_validators, own_invite.encode(), data_dir, device),
    ):
        serve(service, listener, tls, limits)


def _validator_count(wanted: int | None, *, no_validate: bool) -> int:
    """How many validators to start on this machine."""
    if no_validate:
        if wanted:
            raise click.UsageError("--validators and --no-validate exclude each other")
        log.warning("--no-validate: %s; %s", UNDEFENDED, UNSCORED)
        return 0
    if torch_is_installed():
        return 1 if wanted is None else wanted
    if wanted:
        raise DeviceError(
            "validators need torch, which is not installed here; install it, or give --validators 0"
            " and start validators elsewhere: blocktrain worker INVITE --validate"
        )
    if wanted is None:
        log.warning(
            "torch is not installed, so no validator is started here: %s; %s", UNDEFENDED, UNSCORED
        )
    return 0


def _first_invite(home: CoordinatorFolder, service: Service) -> str:
    """The secret of the invite that is printed at every start. It stays the same until the invite
    is revoked, used up or expired."""

    def is_good(secret: str) -> bool:
        is_usable = _is_usable(service, secret)
        if not is_usable:
            log.warning("the previous invite is revoked, used up or expired; printing a new one")
        return is_usable

    return home.invite_secret(
        lambda: service.operator.invite("train", FIRST_INVITE_USES, FIRST_INVITE_SECONDS), is_good
    )


def _validators_invite(home: CoordinatorFolder, service: Service) -> str:
    """The secret of the invite of this machine's own validators."""
    return home.invite_secret(
        lambda: service.operator.invite("validate", FIRST_INVITE_USES, FIRST_INVITE_SECONDS),
        partial(_is_usable, service),
        VALIDATORS_FILE,
    )


def _is_usable(service: Service, secret: str) -> bool:
    invite = service.operator.invite_of(secret)
    return invite is not None and invite.is_usable


def _announce(
    service: Service, invite: str, urls: tuple[str, ...], token: str, *, as_json: bool
) -> None:
    page = operator_page(urls, token)
    if as_json:
        printed = {"run": service.run.id, "invite": invite, "addresses": urls, "page": page}
        click.echo(json.dumps(printed))
        return
    config = service.run.config
    click.echo(
        f"run     {service.run.id}: {config.objective.kind}, {config.block_count} blocks,"
        f" {config.train.steps} batches each\n"
        f"at      {', '.join(urls)}\n"
        f"join    blocktrain worker {invite}\n"
        f"watch   {command('status', invite, '--watch')}\n"
        f"page    {urls[0]}/ for everybody, and for you, the operator:\n"
        f"        {page}"
    )


def operator_page(urls: tuple[str, ...], token: str) -> str:
    """The run page with the operator's token. Browsers do not send the part after the #."""
    return f"{urls[0]}/#operator={token}"


class EventLog:
    """Logs new events of the run, from every coordinator that shares its ledger."""

    SECONDS = 1.0  # between two reads of the ledger
    PAGE = 1000  # events per read

    def __init__(
        self, service: Service, notify: Callable[[Event, str], None] = lambda event, text: None
    ) -> None:
        """`notify` is called for each event, with a sentence about it."""
        self._reports, self._notify = service.reports, notify
        self._names: dict[str, str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="event log", daemon=True)

    def __enter__(self) -> "EventLog":
        self._after = self._reports.last_event()
        if self._reports.status().state == "finished":
            log.info(FINISHED)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def log_new(self) -> None:
        while events := self._reports.events(self._after, self.PAGE):
            for event in events:
                self._log(event)
            self._after = events[-1].number

    def _follow(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stop.wait(self.SECONDS)
            try:
                self.log_new()
            except SQLAlchemyError as error:  # also logged elsewhere; retried here
                log.debug("cannot read the run's events: %s", error)

    def _log(self, event: Event) -> None:
        worker, block = self._name(event.worker), f"block {event.block}"
        messages = {
            "leased": f"leased {event.detail} of {block} to worker {worker}",
            "uploaded": f"received an update of {block} from worker {worker}: {event.detail}",
            "late": f"received a late update of {block} from worker {worker}: {event.detail}",
            "joined": f"worker {worker} joined",
            "merged": f"{block}: {event.detail}",
            "returned": f"worker {worker} returned a lease of {block}: {event.detail}",
            "lost": f"lost a lease of {block} by worker {worker}: {event.detail}; these batches are"
            " leased again",
            "refused": f"refused an update of {block} from worker {worker}: {event.detail}",
            "banned": f"banned worker {worker}",
            "checked": f"check of an update of {block} from worker {worker}: {event.detail}",
            "clipped": f"clipped an update of {block} from worker {worker}: {event.detail}",
            "excluded": f"excluded worker {event.detail}",
            "unmerged": f"unmerged from {block}: {event.detail}",
            "scored": f"{'the model' if event.block is None else block}: {event.detail}",
            "finished": FINISHED,
            "paused": f"the operator has paused the run: {event.detail}",
            "resumed": "the operator has resumed the run",
            "draining": "the operator drains the run: open leases end, no new ones are handed out",
            "extended": f"the operator has extended the run {event.detail}",
            "invited": f"new {event.detail}",
            "revoked": f"revoked {event.detail}",
        }
        ids = {"event": event.kind, "worker": event.worker, "block": event.block}
        fields = {name: value for name, value in ids.items() if value is not None}
        level = logging.DEBUG if event.kind in ROUTINE else logging.INFO
        log.log(level, "%s", messages[event.kind], extra=fields)
        self._notify(event, plain(messages[event.kind]))

    def _name(self, worker: str | None) -> str:
        if worker is not None and worker not in self._names:
            self._names = {each.worker: each.name for each in self._reports.status().workers}
        return self._names.get(worker or "", worker or "")


@click.group("invite")
def invite_command() -> None:
    """List, make or revoke invites. These commands need the coordinator's folder or database; the
    coordinator itself need not run."""


@invite_command.command("new")
@options.data_dir
@options.database
@click.option(
    "--uses", type=COUNT, default=100, help="Number of workers that can join with the invite."
)
@click.option("--days", type=AMOUNT, default=30.0, help="Days until the invite expires.")
@click.option(
    "--evaluate", is_flag=True, help="For workers that score versions instead of training."
)
@click.option(
    "--validate", is_flag=True, help="For workers that check the updates of others; trust them."
)
@click.option(
    "--address",
    "hosts",
    multiple=True,
    metavar="HOST[:PORT]",
    help="Address of the coordinator; repeatable. Default: the addresses of its last start.",
)
@options.as_json
def new(
    data_dir: Path,
    database: str | None,
    uses: int,
    days: float,
    evaluate: bool,
    validate: bool,
    hosts: tuple[str, ...],
    as_json: bool,
) -> None:
    """Print a new invite. Its secret is not stored and cannot be shown again."""
    if evaluate and validate:
        raise click.UsageError("an invite is for one role; give --evaluate or --validate")
    home = CoordinatorFolder(data_dir, database)
    operator = home.operator()
    draft = _draft(home, operator, hosts)  # checks the addresses before a secret is made
    role: Role = "evaluate" if evaluate else "validate" if validate else "train"
    made = operator.new_invite(role, uses, days * DAY)
    invite = replace(draft, secret=made.secret).encode()
    if as_json:
        click.echo(json.dumps({"id": made.invite, "invite": invite}))
        return
    click.echo(invite)
    click.echo(
        f"id {made.invite}, for {uses} workers within {days:g} days, role {role};"
        f" to revoke it: {command('invite', 'revoke', made.invite)}",
        err=True,
    )


@invite_command.command("list")
@options.data_dir
@options.database
@options.as_json
def show(data_dir: Path, database: str | None, as_json: bool) -> None:
    """List all invites with role, remaining uses and time until they expire."""
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
@click.option("--ban", is_flag=True, help="Also ban the workers that joined with the invite.")
@options.data_dir
@options.database
def revoke(invite: str, ban: bool, data_dir: Path, database: str | None) -> None:
    """Revoke INVITE (its id or its text). Workers that joined with it stay in the run, unless --ban
    is given."""
    operator = CoordinatorFolder(data_dir, database).operator()
    name = _id_of(invite, operator) if "_" in invite else invite  # an id has no underscore
    banned = operator.revoke(name, ban=ban)
    click.echo(f"revoked {name}" + (f"; banned {len(banned)} workers" if ban else ""))


def _draft(home: CoordinatorFolder, operator: Operator, hosts: tuple[str, ...]) -> Invite:
    """An invite whose secret is still missing."""
    run = run_row(operator.ledger)
    authority = Authority.load(run.authority_certificate, run.authority_key)
    advertised = home.advertised()
    if not hosts and not advertised:
        raise click.UsageError(
            "the coordinator's address is unknown, because it has not been started in this folder"
            " yet; start it, or give --address"
        )
    last = advertised.addresses if advertised else (f"https://localhost:{addresses.DEFAULT_PORT}",)
    scheme, _, port = addresses.split_url(last[0])
    urls = tuple(addresses.as_url(host, scheme, port) for host in hosts) or last
    fingerprint = advertised.fingerprint if advertised else authority.fingerprint
    plain = all(url.startswith("http://") for url in urls)
    return Invite(urls, "unknown", None if plain else fingerprint, run.id)


def _id_of(text: str, operator: Operator) -> str:
    """The id of an invite. Errors never show the secret."""
    invite = operator.invite_of(Invite.decode(text).secret)
    if invite is None:
        raise InviteError(
            "the run in this folder has no such invite; `blocktrain invite list` lists all of them"
        )
    return invite.invite


def _time_left(invite: InviteState) -> str:
    if invite.revoked:
        return "revoked"
    return f"{invite.seconds_left / DAY:.1f} days" if invite.seconds_left > 0 else "expired"


@click.command("backup")
@options.data_dir
@click.option("--out", type=FILE, required=True, help="New file.")
def backup_command(data_dir: Path, out: Path) -> None:
    """Copy the run in a coordinator's folder into one file. The coordinator may be running.

    Back up a ledger in PostgreSQL, or chunks in a bucket, with the tools of those systems.
    """
    count = back_up(data_dir, out)
    click.echo(f"{out}: {size(count)}   next: {command('restore', out, '--data-dir', 'NEW')}")


@click.command("restore")
@click.argument("archive", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--data-dir", type=FOLDER, required=True, help="New folder.")
def restore_command(archive: Path, data_dir: Path) -> None:
    """Unpack a backup into a new folder and check every chunk against its hash."""
    count = restore(archive, data_dir)
    click.echo(f"{count} chunks intact   next: {command('coordinator', '--data-dir', data_dir)}")
