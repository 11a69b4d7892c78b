"""blocktrain serve: an OpenAI-compatible server over the blocks of a run."""

import json
from pathlib import Path

import click

from blocktrain.cli import options


@click.command("serve", context_settings={"auto_envvar_prefix": "BLOCKTRAIN_SERVE"})
@options.run
@click.option(
    "--listen", default="127.0.0.1:8000", show_default=True, metavar="HOST:PORT",
    callback=options.host_port, help="Where clients ask; every interface is 0.0.0.0:8000.",
)  # fmt: skip
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    envvar="BLOCKTRAIN_API_KEY",
    help="What clients must present; repeatable, or BLOCKTRAIN_API_KEY in the environment, where"
    " other users of this machine cannot see it. Without one, whoever reaches the port may ask.",
)
@click.option(
    "--tls-cert", type=click.Path(path_type=Path), metavar="FILE",
    help="Certificate (PEM, its chain included) of the HTTP port; with --tls-key. Default: no TLS.",
)  # fmt: skip
@click.option(
    "--tls-key", type=click.Path(path_type=Path), metavar="FILE", help="The certificate's key."
)
@click.option(
    "--stages",
    default="",
    metavar="HOST:PORT,...",
    callback=options.host_ports,
    help="Where `blocktrain stage` holds the blocks after the first; more than one for a block are"
    " replicas. Default: processes on this machine.",
)
@options.keys
@options.plain_tcp
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
    help="Answered at once; as many again wait.",
)  # fmt: skip
@click.option(
    "--most-bytes", type=click.IntRange(min=1), default=4096, show_default=True,
    help="Longest answer.",
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
    stages: tuple[str, ...],
    keys: Path | None,
    plain_tcp: bool,
    wire: str,
    readout: str,
    device: str,
    precision: str,
    weights: str,
    most_requests: int,
    most_bytes: int,
    patience: float,
) -> None:
    """Serve RUN with an OpenAI-compatible API. The router holds block 0; the other blocks are
    processes on this machine, or stages on other hosts. Every option can also be set as
    BLOCKTRAIN_SERVE_OPTION in the environment, the API key as BLOCKTRAIN_API_KEY."""
    from blocktrain.storage.run_dir import RunDir

    units = RunDir.open(run).config.block_count
    loaded = "block 0" if stages or units == 1 else f"{units} blocks"
    click.echo(
        f"loading {loaded} of {run} ...", err=True
    )  # which takes seconds, torch most of them

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
        most_requests=most_requests,
        most_bytes=most_bytes,
        patience_seconds=patience,
        tls_cert=tls_cert,
        tls_key=tls_key,
    )
    serve_router(settings, click.echo)


def block_range(context: click.Context, option: click.Parameter, text: str) -> range:
    """K or FIRST-LAST."""
    first, dash, last = text.partition("-")
    try:
        blocks = range(int(first), int(last if dash else first) + 1)
    except ValueError:
        raise click.BadParameter("must be a block, like 2, or a range, like 1-3") from None
    if not blocks:
        raise click.BadParameter("must not end before it begins")
    return blocks


@click.command("stage")
@options.run
@click.option(
    "--block",
    "blocks",
    required=True,
    callback=block_range,
    metavar="K or FIRST-LAST",
    help="The blocks to hold.",
)
@click.option(
    "--listen",
    default="0.0.0.0:7101",
    show_default=True,
    metavar="HOST:PORT",
    callback=options.host_port,
    help="Where the router and the stage before reach this one.",
)
@click.option(
    "--announce",
    default="",
    metavar="HOST:PORT",
    help="Address the stage before can reach this at, where it is not the router's for it.",
)
@options.keys
@click.option(
    "--name", default="", help="Which of the keys is this stage's. Default: the only one."
)
@options.plain_tcp
@options.served_readout
@options.device
@options.thread_count
@options.log_options("info")
@options.precision
@options.weights
@click.option(
    "--most-requests", type=click.IntRange(min=1), default=64, show_default=True,
    help="Requests to compute at once.",
)  # fmt: skip
@click.option(
    "--cache-gb",
    type=click.FloatRange(min=0.01),
    default=4.0,
    show_default=True,
    help="Most memory for the keys and values of requests.",
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
    most_requests: int,
    cache_gb: float,
    until_stdin_closes: bool,
    as_json: bool,
) -> None:
    """Hold blocks of RUN and compute them for `blocktrain serve`, here or on another host."""
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
        most_requests=most_requests,
        cache_bytes=int(cache_gb * 1e9),
        until_stdin_closes=until_stdin_closes,
    )

    def tell(address: str) -> None:
        if as_json:
            click.echo(json.dumps({"listening": address, "blocks": list(blocks)}))
        else:
            held = ", ".join(map(str, blocks))
            secured = "no TLS" if plain_tcp else "TLS"
            click.echo(f"stage at {address} ({secured}), block {held} of {run}")

    serve_stage(settings, tell)


@click.command("keys")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--stages", type=click.IntRange(0, 10_000), default=0, help="Stages stage-1 to stage-N."
)
@click.option("--name", "names", multiple=True, help="A stage of this name; repeatable.")
@click.option("--router", "routers", multiple=True, help="A further router; repeatable.")
def keys_command(
    folder: Path, stages: int, names: tuple[str, ...], routers: tuple[str, ...]
) -> None:
    """Make the certificates with which a router and its stages know each other.

    The first call makes an authority and the certificate of `router`; every call adds the members
    it names, and renews those that expire within 30 days. A member's machine needs ca.pem,
    NAME.pem and NAME.key. ca.key stays here: who has it can admit anyone.
    """
    from blocktrain.protocol.ring_keys import ROUTER, STAGE, Keyring

    keyring = Keyring(folder)
    asked = [(ROUTER, name) for name in ("router", *routers)]
    asked += [(STAGE, name) for name in (*(f"stage-{i + 1}" for i in range(stages)), *names)]
    for role, name in asked:
        state = "made" if keyring.add(role, name) else "kept"
        click.echo(f"{state}  {role:6s}  {folder / name}.pem")
