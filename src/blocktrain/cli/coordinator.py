"""blocktrain coordinator: start a run that others can join, or go on with one."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from blocktrain.cli import options

if TYPE_CHECKING:
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
@click.option("--listen", default="0.0.0.0:7070", show_default=True, metavar="HOST:PORT")
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
def command(
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
    from blocktrain.cli.presets import resolve_config
    from blocktrain.config import load_config
    from blocktrain.coordinator.home import Home
    from blocktrain.coordinator.server import own_addresses, serve, write_certificate
    from blocktrain.coordinator.service import Service
    from blocktrain.protocol.invite import Invite
    from blocktrain.protocol.listening import bound_socket

    host, port = _place(listen)
    home = Home(data_dir, database, blobs)
    if config_path:
        run = home.open_or_found(load_config(resolve_config(config_path), overrides))
    else:
        run = home.open()
    service = Service(run)
    listener = bound_socket(host, port)
    port = listener.getsockname()[1]
    hosts = [*advertise] or _reachable(host, own_addresses())
    scheme = "http" if plain_http else "https"
    addresses = tuple(f"{scheme}://{_with_port(name, port)}" for name in hosts)
    secret = home.invite_secret(
        lambda: service.members.invite("train", FIRST_INVITE_USES, FIRST_INVITE_SECONDS)
    )
    pinned = None if plain_http or certificate else run.authority.fingerprint
    invite = Invite(addresses, secret, pinned, run.id).encode()
    tls = None
    if not plain_http:
        names = [*own_addresses(), *(name.rpartition(":")[0] or name for name in advertise)]
        tls = certificate or write_certificate(service, names, data_dir / "tls")
    _announce(service, invite, addresses, as_json=as_json)
    serve(service, listener, tls)


def _announce(
    service: "Service", invite: str, addresses: tuple[str, ...], *, as_json: bool
) -> None:
    if as_json:
        told = {"run": service.run.id, "invite": invite, "addresses": addresses}
        click.echo(json.dumps(told))
        return
    config = service.run.config
    click.echo(
        f"run     {service.run.id}: {config.objective.kind}, {config.units} blocks,"
        f" {config.train.steps} batches each"
    )
    click.echo(f"at      {', '.join(addresses)}")
    click.echo(f"invite  {invite}")
    click.echo("join    blocktrain worker INVITE      look  blocktrain status INVITE --watch")


def _place(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise click.BadParameter(f"{listen!r} is not HOST:PORT", param_hint="--listen")
    return host.strip("[]") or "0.0.0.0", int(port)


def _reachable(host: str, own: list[str]) -> list[str]:
    """Where it listens; for every interface, the one that leads outside, then this machine."""
    if host not in ("0.0.0.0", "::"):
        return [host]
    return [own[-1], "127.0.0.1"]


def _with_port(name: str, port: int) -> str:
    has_port = name.rpartition(":")[2].isdigit() and name.count(":") == 1
    if has_port or name.endswith("]"):
        return name if has_port else f"{name}:{port}"
    return f"[{name}]:{port}" if name.count(":") > 1 else f"{name}:{port}"
