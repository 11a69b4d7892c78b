"""blocktrain serve, stage and keys: an OpenAI-compatible server over the blocks of a run."""

import json
from pathlib import Path
from urllib.parse import urlsplit

import click

from blocktrain.cli import options


def web_origins(
    context: click.Context, option: click.Parameter, origins: tuple[str, ...]
) -> tuple[str, ...]:
    for origin in origins:
        parts = urlsplit(origin)
        if origin != "*" and (not parts.hostname or origin != f"{parts.scheme}://{parts.netloc}"):
            raise click.BadParameter(f"{origin!r} is not an origin like https://example.org")
    return origins


@click.command("serve", context_settings={"auto_envvar_prefix": "BLOCKTRAIN_SERVE"})
@options.run
@click.option(
    "--listen", default="127.0.0.1:8000", show_default=True, metavar="HOST:PORT",
    callback=options.host_port, help="Address for clients; 0.0.0.0:8000 is every interface.",
)  # fmt: skip
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    envvar="BLOCKTRAIN_API_KEY",
    help="A key that clients may use; repeatable. Better in BLOCKTRAIN_API_KEY, which other users"
    " of this machine cannot see. Without any, everyone who reaches the port may use the model.",
)
@click.option(
    "--tls-cert", type=click.Path(path_type=Path), metavar="FILE",
    help="Certificate of the HTTP port with its chain (PEM); needs --tls-key. Default: no TLS.",
)  # fmt: skip
@click.option(
    "--tls-key", type=click.Path(path_type=Path), metavar="FILE", help="The certificate's key."
)
@click.option(
    "--origin", "origins", multiple=True, metavar="URL", callback=web_origins,
    help="A web site whose pages may use this API from a browser (CORS), like https://example.org;"
    " repeatable; * is every site.",
)  # fmt: skip
@click.option(
    "--stages",
    default="",
    metavar="HOST:PORT,...",
    callback=options.host_ports,
    help="Addresses of `blocktrain stage` with the blocks after the first; several with the same"
    " block are replicas. Default: processes on this machine.",
)
@options.keys
@options.plain_tcp
@options.warm_up
@click.option(
    "--wire",
    type=click.Choice(["fp32", "bf16", "int8"]),
    default="fp32",
    show_default=True,
    help="Number type between stages.",
)
@options.served_readout
@options.device
@options.thread_count
@options.log_options("info")
@options.precision
@options.weights
@click.option(
    "--most-requests", type=click.IntRange(min=1), default=32, show_default=True,
    help="Answers in progress; as many requests again may wait.",
)  # fmt: skip
@click.option(
    "--most-bytes", type=click.IntRange(min=1), default=4096, show_default=True,
    help="Bytes of the longest answer.",
)  # fmt: skip
@click.option(
    "--patience", type=click.FloatRange(min=0.0), default=10.0, show_default=True,
    help="Seconds a request waits for a lost stage to come back.",
)  # fmt: skip
def serve_command(
    run: Path,
    listen: str,
    api_keys: tuple[str, ...],
    tls_cert: Path | None,
    tls_key: Path | None,
    origins: tuple[str, ...],
    stages: tuple[str, ...],
    keys: Path | None,
    plain_tcp: bool,
    warm_up_mb: float,
    wire: str,
    readout: str,
    device: str,
    precision: str,
    weights: str,
    most_requests: int,
    most_bytes: int,
    patience: float,
) -> None:
    """Serve RUN with an OpenAI-compatible API.

    This process computes block 0; the other blocks are processes on this machine, or stages on
    other hosts. Every option can also be set in the environment as BLOCKTRAIN_SERVE_OPTION, the API
    key as BLOCKTRAIN_API_KEY.
    """
    from blocktrain.storage.run_dir import RunDir

    units = RunDir.open(run).config.block_count
    loaded = "block 0" if stages or units == 1 else f"{units} blocks"
    click.echo(f"loading {loaded} of {run} ...", err=True)  # before torch, which takes seconds

    from blocktrain.serve.ring.connection import Terms
    from blocktrain.serve.router.router_server import RouterSettings, serve_router

    settings = RouterSettings(
        run=run,
        listen=listen,
        api_keys=tuple(key for key in api_keys if key),
        stages=stages,
        keys=keys or run / "keys",
        plain_tcp=plain_tcp,
        wire=wire,
        readout=readout,
        device=device,
        precision=precision,
        weights=weights,
        max_requests=most_requests,
        max_bytes=most_bytes,
        patience_seconds=patience,
        tls_cert=tls_cert,
        tls_key=tls_key,
        origins=origins,
        stage_command=(*options.PROGRAM, "stage"),
        terms=Terms(padding=int(warm_up_mb * (1 << 20))),
    )
    serve_router(settings, click.echo)


def block_range(context: click.Context, option: click.Parameter, text: str) -> range:
    """K or FIRST-LAST."""
    first, dash, last = text.partition("-")
    try:
        blocks = range(int(first), int(last if dash else first) + 1)
    except ValueError:
        raise click.BadParameter("must be a block like 2, or a range like 1-3") from None
    if not blocks:
        raise click.BadParameter("the range ends before it begins")
    return blocks


@click.command("stage")
@options.run
@click.option(
    "--block",
    "blocks",
    required=True,
    callback=block_range,
    metavar="K or FIRST-LAST",
    help="The blocks to compute.",
)
@click.option(
    "--listen",
    default="0.0.0.0:7101",
    show_default=True,
    metavar="HOST:PORT",
    callback=options.host_port,
    help="Address to listen on.",
)
@click.option(
    "--announce",
    default="",
    metavar="HOST:PORT",
    help="Address under which other stages reach this one. Default: the one given to the router.",
)
@options.keys
@click.option(
    "--name",
    default="",
    help="Name of this stage's key in the folder. Default: the only one there.",
)
@options.plain_tcp
@options.served_readout
@options.device
@options.thread_count
@options.log_options("info")
@options.precision
@options.weights
@options.warm_up
@click.option(
    "--most-requests",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Requests whose keys and values are cached.",
)
@click.option(
    "--cache-gb",
    type=click.FloatRange(min=0.01),
    default=4.0,
    show_default=True,
    help="Memory for the keys and values of all requests, at most.",
)
@click.option("--until-stdin-closes", is_flag=True, hidden=True)
@options.as_json
def stage_command(
    run: Path,
    blocks: range,
    listen: str,
    announce: str,
    keys: Path | None,
    name: str,
    plain_tcp: bool,
    readout: str,
    device: str,
    precision: str,
    weights: str,
    warm_up_mb: float,
    most_requests: int,
    cache_gb: float,
    until_stdin_closes: bool,
    as_json: bool,
) -> None:
    """Compute blocks of RUN for a `blocktrain serve` on this or another host."""
    from blocktrain.serve.ring.connection import Terms
    from blocktrain.serve.stage.stage_server import StageSettings, serve_stage

    settings = StageSettings(
        run=run,
        blocks=blocks,
        listen=listen,
        announce=announce,
        keys=None if plain_tcp else keys or run / "keys",
        name=name,
        device=device,
        precision=precision,
        weights=weights,
        readout=readout,
        max_requests=most_requests,
        cache_bytes=int(cache_gb * 1e9),
        until_stdin_closes=until_stdin_closes,
        terms=Terms(padding=int(warm_up_mb * (1 << 20))),
    )

    def tell(address: str) -> None:
        if as_json:
            click.echo(json.dumps({"listening": address, "blocks": list(blocks)}))
        else:
            listed = ", ".join(map(str, blocks))
            security = "no TLS" if plain_tcp else "TLS"
            click.echo(f"stage at {address} ({security}), block {listed} of {run}")

    serve_stage(settings, tell)


@click.command("keys")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--stages", type=click.IntRange(0, 10_000), default=0, help="Make keys for stage-1 to stage-N."
)
@click.option(
    "--name", "names", multiple=True, help="Make a key for a stage of this name; repeatable."
)
@click.option(
    "--router", "routers", multiple=True, help="Make a key for a further router; repeatable."
)
def keys_command(
    folder: Path, stages: int, names: tuple[str, ...], routers: tuple[str, ...]
) -> None:
    """Make the certificates by which a router and its stages identify each other.

    The first call makes a certificate authority and the router's certificate. Every call adds the
    members it names, and renews those that expire within 30 days. A member's machine needs ca.pem,
    NAME.pem and NAME.key. Keep ca.key here: its owner can admit anyone.
    """
    from blocktrain.protocol.ring_keys import ROUTER, STAGE, Keyring

    keyring = Keyring(folder)
    members = [(ROUTER, name) for name in ("router", *routers)]
    members += [(STAGE, name) for name in (*(f"stage-{i + 1}" for i in range(stages)), *names)]
    for role, name in members:
        state = "made" if keyring.add(role, name) else "kept"
        click.echo(f"{state}  {role:6s}  {folder / name}.pem")
