"""blocktrain stage: hold some blocks of a run behind a port."""

import json
from pathlib import Path

import click

from blocktrain.cli import options


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
    callback=options.place,
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
@options.precision
@options.weights
@click.option("--most-requests", type=click.IntRange(min=1), default=64, show_default=True)
@click.option(
    "--cache-gb",
    type=click.FloatRange(min=0.01),
    default=4.0,
    show_default=True,
    help="Most memory for the keys and values of requests.",
)
@click.option("--until-stdin-closes", is_flag=True, hidden=True)
@options.as_json
def command(
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
    from blocktrain.serve.stage_server import StageSettings, serve_stage

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
