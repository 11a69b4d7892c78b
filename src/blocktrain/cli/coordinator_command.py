"""blocktrain coordinator: start a run that other machines can join, or resume one."""

import json
import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from blocktrain.cli import options
from blocktrain.protocol import addresses

if TYPE_CHECKING:
    from blocktrain.coordinator.folder import CoordinatorFolder
    from blocktrain.coordinator.service import Service
    from blocktrain.protocol.messages import Event

FIRST_INVITE_USES = 100_000
FIRST_INVITE_SECONDS = 365 * 24 * 3600.0

log = logging.getLogger(__name__)


@click.command("coordinator")
@options.config_option(required=False, help="Preset or TOML file; only for a new run.")
@options.overrides
@click.option(
    "--listen", default=f"0.0.0.0:{addresses.DEFAULT_PORT}", show_default=True, metavar="HOST:PORT",
    callback=options.host_port, help="Where workers connect; 0.0.0.0 is every interface.",
)  # fmt: skip
@options.data_dir
@options.database
@options.blobs
@click.option(
    "--advertise",
    multiple=True,
    metavar="HOST[:PORT]",
    help="Address to put into the invite, for workers to connect to; repeatable. Default: this"
    " machine's.",
)
@click.option(
    "--certificate",
    nargs=2,
    type=click.Path(path_type=Path, exists=True),
    metavar="CERT KEY",
    help="Certificate of a public authority (PEM). Default: one of the run's own authority, whose"
    " fingerprint is in the invite.",
)
@click.option(
    "--plain-http", is_flag=True, help="HTTP without TLS; only for a network that you trust."
)
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
    as_json: bool,
) -> None:
    """Coordinate a run: lease blocks to workers, accept their updates and merge them into new
    versions. Prints the invite that `blocktrain worker` joins with. It can be stopped at any time;
    the same command resumes the run, and --config is not needed then."""
    from blocktrain.config import load_config
    from blocktrain.coordinator.folder import Advertised, CoordinatorFolder
    from blocktrain.coordinator.process import own_addresses, own_tls, serve, tls_of
    from blocktrain.coordinator.service import Service
    from blocktrain.protocol.addresses import bound_socket
    from blocktrain.protocol.invite import Invite

    host, port = addresses.split_host_port(listen, default_host="0.0.0.0")
    home = CoordinatorFolder(data_dir, database, blobs)
    if config_path:
        config = load_config(config_path, overrides)
        listener = bound_socket(host, port)  # first, so that a port in use leaves no folder behind
        run = home.open_or_found(config)
    else:
        run = home.open()
        listener = bound_socket(host, port)
    service = Service(run)
    port = listener.getsockname()[1]
    scheme = "http" if plain_http else "https"
    hosts = [*advertise] or _reachable(host, own_addresses())
    urls = tuple(addresses.as_url(each, scheme, port) for each in hosts)
    pinned = None if plain_http or certificate else run.authority.fingerprint
    draft = Invite(urls, "unknown", pinned, run.id)  # checks the addresses before a secret is made
    tls = None
    if not plain_http:
        names = [*own_addresses(), *(addresses.split_url(url)[1] for url in urls)]
        tls = tls_of(*certificate) if certificate else own_tls(service, names)
    home.advertise(Advertised(urls, pinned))
    invite = replace(draft, secret=_first_invite(home, service)).encode()
    _announce(service, invite, urls, as_json=as_json)
    with EventLog(service):
        serve(service, listener, tls, on_stop=lambda: log.info("stopping"))


def _first_invite(home: "CoordinatorFolder", service: "Service") -> str:
    """The same at every start, until it is revoked or expires."""
    operator = service.operator

    def is_good(secret: str) -> bool:
        invite = operator.invite_of(secret)
        if invite is None or not invite.good:
            log.warning("the previous invite was revoked or has expired; this is a new one")
        return invite is not None and invite.good

    return home.invite_secret(
        lambda: operator.invite("train", FIRST_INVITE_USES, FIRST_INVITE_SECONDS), is_good
    )


def _announce(service: "Service", invite: str, urls: tuple[str, ...], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"run": service.run.id, "invite": invite, "addresses": urls}))
        return
    config = service.run.config
    click.echo(
        f"run     {service.run.id}: {config.objective.kind}, {config.block_count} blocks,"
        f" {config.train.steps} batches each"
    )
    click.echo(f"at      {', '.join(urls)}")
    click.echo(f"invite  {invite}")
    click.echo("join    blocktrain worker INVITE")
    click.echo("watch   blocktrain status INVITE --watch")


def _reachable(host: str, own: list[str]) -> list[str]:
    """The host it listens at; for every interface, the outgoing one's address and loopback."""
    if host not in ("0.0.0.0", "::"):
        return [host]
    return [own[-1], "127.0.0.1"]


class EventLog:
    """Logs the run's events from now on: those of every coordinator that shares its ledger."""

    SECONDS = 1.0  # between two looks into the ledger
    PAGE = 1000  # events read at once

    def __init__(self, service: "Service") -> None:
        self._reports = service.reports
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
        from sqlalchemy.exc import SQLAlchemyError

        while not self._stop.wait(self.SECONDS):
            try:
                self.log_new()
            except SQLAlchemyError as error:  # it is logged elsewhere, too, and tried again here
                log.debug("cannot read the run's events: %s", error)

    def _log(self, event: "Event") -> None:
        worker, block = self._name(event.worker), f"block {event.block}"
        routine = {
            "leased": f"leased {event.detail} of {block} to worker {worker}",
            "uploaded": f"received an update of {block} from worker {worker}: {event.detail}",
            "late": f"received a late update of {block} from worker {worker}: {event.detail}",
        }
        message = {
            "joined": f"worker {worker} joined",
            "merged": f"{block}: {event.detail}",
            "returned": f"worker {worker} returned a lease of {block}: {event.detail}",
            "lost": f"lost a lease of {block}: no heartbeat from worker {worker};"
            f" its {event.detail} will be leased again",
            "refused": f"refused an update of {block} from worker {worker}: {event.detail}",
            "banned": f"banned worker {worker}",
            "scored": event.detail if event.block is None else f"{block}: {event.detail}",
            "finished": FINISHED,
        }
        ids = {"event": event.kind, "worker": event.worker, "block": event.block}
        fields = {name: value for name, value in ids.items() if value is not None}
        level = logging.DEBUG if event.kind in routine else logging.INFO
        log.log(level, "%s", {**routine, **message}[event.kind], extra=fields)

    def _name(self, worker: str | None) -> str:
        if worker is not None and worker not in self._names:
            self._names = {each.worker: each.name for each in self._reports.status().workers}
        return self._names.get(worker or "", worker or "")


FINISHED = "the run is finished; `blocktrain fetch INVITE --out FOLDER` downloads the model"
