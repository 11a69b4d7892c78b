"""blocktrain serve: an OpenAI-compatible server over the blocks of a run."""

import logging
from pathlib import Path

import click

from blocktrain.cli import options


@click.command("serve", context_settings={"auto_envvar_prefix": "BLOCKTRAIN_SERVE"})
@options.run
@click.option(
    "--listen", default="127.0.0.1:8000", show_default=True, metavar="HOST:PORT",
    callback=options.place, help="Where clients ask; every interface is 0.0.0.0:8000.",
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
    callback=options.places,
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
def command(
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

    units = RunDir.open(run).config.units
    loaded = "block 0" if stages or units == 1 else f"{units} blocks"
    click.echo(
        f"loading {loaded} of {run} ...", err=True
    )  # which takes seconds, torch most of them

    from blocktrain.serve.router_server import RouterSettings, serve_router

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
    logging.basicConfig(format="%(message)s")
    if settings.stages:  # the operator wants to see who comes, not only who goes
        logging.getLogger("blocktrain.serve.pipeline").setLevel(logging.INFO)
    serve_router(settings, click.echo)
