"""blocktrain coordinator: start a run that others can join, or go on with one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from blocktrain.cli import options
from blocktrain.protocol import addresses

if TYPE_CHECKING:
    from blocktrain.coordinator.folder import CoordinatorFolder
    from blocktrain.coordinator.service import Service

FIRST_INVITE_USES = 100_000
FIRST_INVITE_SECONDS = 365 * 24 * 3600.0


@click.command("coordinator")
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help="Preset name or TOML file; needed for a new run.",
)
@options.overrides
@click.option(
    "--listen", default=f"0.0.0.0:{addresses.DEFAULT_PORT}", show_default=True, metavar="HOST:PORT"
)
@options.data_dir
@options.database
@options.blobs
@click.option(
    "--advertise",
    multiple=True,
    metavar="HOST[:PORT]",
    help="Address workers can reach this at, for the invite; repeatable. Default: this machine's.",
)
@click.option(
    "--certificate",
    nargs=2,
    type=click.Path(path_type=Path, exists=True),
    metavar="CERT KEY",
    help="A public certificate instead of one by the run's own authority.",
)
@click.option("--plain-http", is_flag=True, help="No TLS: only inside a network you trust.")
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
    """Serve a run: hand out work, take updates in, merge them into versions. Prints the invite
    that `blocktrain worker` joins with. Stop and start it at any moment; nothing is lost."""
    from blocktrain.cli.display import Chronicle
    from blocktrain.cli.options import resolve_config
    from blocktrain.config import load_config
    from blocktrain.coordinator.folder import Advertised, CoordinatorFolder
    from blocktrain.coordinator.server import own_addresses, own_tls, serve, tls_of
    from blocktrain.coordinator.service import Service
    from blocktrain.protocol.addresses import bound_socket
    from blocktrain.protocol.invite import Invite

    host, port = addresses.split_host_port(listen, default_host="0.0.0.0")
    home = CoordinatorFolder(data_dir, database, blobs)
    if config_path:
        config = load_config(resolve_config(config_path), overrides)
        listener = bound_socket(host, port)  # first: one that is taken leaves no new folder behind
        run = home.open_or_create(config)
    else:
        run = home.open()
        listener = bound_socket(host, port)
    service = Service(run)
    port = listener.getsockname()[1]
    scheme = "http" if plain_http else "https"
    places = [*advertise] or _reachable(host, own_addresses())
    urls = tuple(addresses.as_url(place, scheme, port) for place in places)
    pinned = None if plain_http or certificate else run.authority.fingerprint
    draft = Invite(urls, "unknown", pinned, run.id)  # before anything is made to join with
    tls = None
    if not plain_http:
        names = [*own_addresses(), *(addresses.split_url(url)[1] for url in urls)]
        tls = tls_of(*certificate) if certificate else own_tls(service, names)
    home.advertise(Advertised(urls, pinned))
    invite = replace(draft, secret=_first_invite(home, service)).encode()
    _announce(service, invite, urls, as_json=as_json)
    if as_json:
        serve(service, listener, tls)
        return
    with Chronicle(service):
        serve(service, listener, tls, on_stop=lambda: click.echo("stopping"))


def _first_invite(home: "CoordinatorFolder", service: "Service") -> str:
    """The same at every start, as long as somebody could join with it."""
    operator = service.operator

    def is_good(secret: str) -> bool:
        kept = operator.invite_of(secret)
        if kept is None or not kept.is_usable:
            click.echo("the invite of before was revoked or has ended: here is another", err=True)
        return kept is not None and kept.is_usable

    return home.invite_secret(
        lambda: operator.invite("train", FIRST_INVITE_USES, FIRST_INVITE_SECONDS), is_good
    )


def _announce(service: "Service", invite: str, urls: tuple[str, ...], *, as_json: bool) -> None:
    if as_json:
        told = {"run": service.run.id, "invite": invite, "addresses": urls}
        click.echo(json.dumps(told))
        return
    config = service.run.config
    click.echo(
        f"run     {service.run.id}: {config.objective.kind}, {config.block_count} blocks,"
        f" {config.train.steps} batches each"
    )
    click.echo(f"at      {', '.join(urls)}")
    click.echo(f"invite  {invite}")
    click.echo("join    blocktrain worker INVITE      look  blocktrain status INVITE --watch")


def _reachable(host: str, own: list[str]) -> list[str]:
    """Where it listens; for every interface, the one that leads outside, then this machine."""
    if host not in ("0.0.0.0", "::"):
        return [host]
    return [own[-1], "127.0.0.1"]
