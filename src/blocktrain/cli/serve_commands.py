"""blocktrain serve, stage and keys: an OpenAI-compatible server for the blocks of a run."""

import json
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from blocktrain.cli import options
from blocktrain.cli.options import COUNT, FILE_OR_FOLDER, FOLDER
from blocktrain.cli.terminal import open_page
from blocktrain.environment import PROGRAM

if TYPE_CHECKING:
    from blocktrain.config import Config

MEBIBYTE = 1 << 20
CHAT_PAGE = re.compile(r"chat page at (\S+)")
# `same_names` below: options with the same names as the fields of RouterSettings or StageSettings.


def host_ports(context: click.Context, option: click.Parameter, text: str) -> tuple[str, ...]:
    """Parse HOST:PORT,HOST:PORT,..."""
    parts = [part.strip() for part in text.split(",")]
    return tuple(options.host_port(context, option, part) for part in parts if part)


def web_origins(
    context: click.Context, option: click.Parameter, origins: tuple[str, ...]
) -> tuple[str, ...]:
    for origin in origins:
        parts = urlsplit(origin)
        if origin != "*" and (not parts.hostname or origin != f"{parts.scheme}://{parts.netloc}"):
            raise click.BadParameter(f"{origin!r} is not an origin like https://example.org")
    return origins


def block_range(context: click.Context, option: click.Parameter, text: str) -> range:
    """Parse K or FIRST-LAST."""
    first, dash, last = text.partition("-")
    try:
        blocks = range(int(first), int(last if dash else first) + 1)
    except ValueError:
        raise click.BadParameter("must be a block like 2, or a range like 1-3") from None
    if not blocks:
        raise click.BadParameter("the range ends before it begins")
    return blocks


def shared_options(command: options.Command) -> options.Command:
    """Options that a router and a stage share."""
    decorators = (
        click.option(
            "--keys", type=FOLDER, help="Folder made by `blocktrain keys`. Default: RUN/keys."
        ),
        click.option(
            "--plain-tcp",
            is_flag=True,
            help="Connect stages without TLS; only for a network that you trust.",
        ),
        click.option(
            "--warm-up-mb",
            type=click.FloatRange(0.0, 32.0),
            default=4.0,
            help="Most padding to send over a new connection between hosts, so that TCP slow start"
            " does not delay the first large messages; 0: none.",
        ),
        options.choice(
            "--readout",
            "auto",
            "product",
            "final",
            help="Prediction to use. product: all blocks' multiplied; final: the last block's;"
            " auto: product if tokens are bytes, else final. Must be the same for the router and"
            " its stages.",
        ),
        click.option(
            "--prefill-chunk",
            type=click.IntRange(0, 65_536),
            default=0,
            metavar="TOKENS",
            help="Tokens of prompts that are read between two steps of other requests: fewer for"
            " shorter pauses, more to read prompts faster. 0: 32 on a CPU, else 512.",
        ),
        click.option(
            "--prefix-gb",
            type=click.FloatRange(min=0.0),
            default=1.0,
            help="Most memory for contexts of ended requests, which later requests that begin alike"
            " need not compute again; 0: none are kept.",
        ),
        options.device,
        options.thread_count,
        options.force,
        options.log_options("info"),
        options.precision,
        options.choice(
            "--weights",
            "full",
            "int8",
            help="How matrices are stored. full: in the compute precision; int8: in 8 bits, to save"
            " memory.",
        ),
    )
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


@click.command("serve", context_settings={"auto_envvar_prefix": "BLOCKTRAIN_SERVE"})
@options.run
@click.option(
    "--listen", default="127.0.0.1:8000", metavar="HOST:PORT", callback=options.host_port,
    help="Address for clients; 0.0.0.0:8000 listens on every interface.",
)  # fmt: skip
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    envvar="BLOCKTRAIN_API_KEY",
    help="API key that clients must send; repeatable. Prefer BLOCKTRAIN_API_KEY, which other users"
    " of this machine cannot see. Without a key, anyone who reaches the port may use the model.",
)
@click.option(
    "--tls-cert", type=FILE_OR_FOLDER, metavar="FILE",
    help="TLS certificate with its chain (PEM); needs --tls-key. Default: no TLS.",
)  # fmt: skip
@click.option("--tls-key", type=FILE_OR_FOLDER, metavar="FILE", help="Key of the certificate.")
@click.option(
    "--origin", "origins", multiple=True, metavar="URL", callback=web_origins,
    help="A web site whose pages may use this API from a browser (CORS), like https://example.org;"
    " repeatable; * is every site.",
)  # fmt: skip
@click.option(
    "--stages", default="", show_default=False, metavar="HOST:PORT,...", callback=host_ports,
    help="Addresses of stages (`blocktrain stage`) for the blocks after the first; stages with the"
    " same blocks are replicas. Default: processes on this machine.",
)  # fmt: skip
@click.option(
    "--draft", type=FOLDER, metavar="RUN",
    help="Smaller model with the same tokenizer, which writes drafts for the speculative mode."
    " Default: the first block writes them, or they are copied from the text.",
)  # fmt: skip
@options.choice("--wire", "fp32", "bf16", "int8", help="Precision of activations between stages.")
@shared_options
@click.option(
    "--most-requests", type=COUNT, default=32,
    help="Answers generated at the same time; further requests wait.",
)  # fmt: skip
@click.option(
    "--most-waiting", type=click.IntRange(min=0), default=64,
    help="Requests of one API key that may wait for a place. A free place goes to the key with the"
    " fewest answers in progress.",
)  # fmt: skip
@click.option(
    "--queue-seconds", type=click.FloatRange(min=0.0), default=30.0,
    help="How long a request may wait for a place.",
)  # fmt: skip
@options.connections(2048)
@click.option("--most-tokens", type=COUNT, default=4096, help="Tokens of the longest answer.")
@options.choice(
    "--long-prompts", "truncate", "reject",
    help="What happens to a prompt that exceeds the model's window. truncate: only its end is read,"
    " and the answer says how much was left out; reject: it is an error.",
)  # fmt: skip
@click.option(
    "--request-log", type=FILE_OR_FOLDER, metavar="FILE",
    help="Append a line of JSON for each request: times, tokens and drafts, but no texts.",
)  # fmt: skip
@options.profile
@click.option(
    "--patience", type=click.FloatRange(min=0.0), default=10.0,
    help="Seconds a request waits for a lost stage to come back.",
)  # fmt: skip
@click.option("--open", "opens", is_flag=True, help="Open the chat page in a browser.")
def serve_command(
    run: Path,
    api_keys: tuple[str, ...],
    stages: tuple[str, ...],
    keys: Path | None,
    warm_up_mb: float,
    prefix_gb: float,
    most_requests: int,
    most_tokens: int,
    patience: float,
    opens: bool,
    force: bool,
    **same_names: Any,
) -> None:
    """Serve RUN with an OpenAI-compatible API.

    This process computes block 0; processes on this machine, or stages on other hosts, compute the
    other blocks. Every option can also be set as an environment variable BLOCKTRAIN_SERVE_OPTION,
    the API key as BLOCKTRAIN_API_KEY.
    """
    from blocktrain.storage.run_dir import RunDir

    config = RunDir.open(run).config
    blocks = range(1 if stages else config.block_count)
    if not force:
        _check_memory(config, blocks, len(blocks), same_names)
    loaded = "block 0" if len(blocks) == 1 else f"{len(blocks)} blocks"
    click.echo(f"loading {loaded} of {run} ...", err=True)  # importing torch takes seconds

    from blocktrain.serve.ring.connection import Terms
    from blocktrain.serve.router.router_server import RouterSettings, serve_router

    settings = RouterSettings(
        run=run,
        api_keys=tuple(key for key in api_keys if key),
        stages=stages,
        keys=keys or run / "keys",
        max_requests=most_requests,
        max_tokens=most_tokens,
        patience_seconds=patience,
        stage_command=(*PROGRAM, "stage"),
        prefix_bytes=int(prefix_gb * 1e9),
        terms=Terms(padding=int(warm_up_mb * MEBIBYTE)),
        **same_names,
    )
    serve_router(settings, partial(_announce, opens=opens))


def _announce(line: str, *, opens: bool) -> None:
    click.echo(line)
    if opens and (page := CHAT_PAGE.search(line)):
        open_page(page[1])


@click.command("stage")
@options.run
@click.option(
    "--block", "blocks", required=True, callback=block_range, metavar="K or FIRST-LAST",
    help="Blocks to compute.",
)  # fmt: skip
@click.option(
    "--listen", default="0.0.0.0:7101", metavar="HOST:PORT", callback=options.host_port,
    help="Address to listen on.",
)  # fmt: skip
@click.option(
    "--announce", default="", show_default=False, metavar="HOST:PORT",
    help="Address at which other stages reach this one. Default: the address given to the router.",
)  # fmt: skip
@click.option(
    "--name", default="", show_default=False,
    help="Name of this stage's key in --keys. Default: the only one there.",
)  # fmt: skip
@shared_options
@click.option(
    "--most-requests", type=COUNT, default=64,
    help="Most requests in the key/value cache.",
)  # fmt: skip
@click.option(
    "--cache-gb", type=click.FloatRange(min=0.01), default=4.0,
    help="Most memory for the key/value cache.",
)  # fmt: skip
@click.option("--until-stdin-closes", is_flag=True, hidden=True)
@options.as_json
def stage_command(
    run: Path,
    blocks: range,
    keys: Path | None,
    plain_tcp: bool,
    warm_up_mb: float,
    prefix_gb: float,
    most_requests: int,
    cache_gb: float,
    force: bool,
    as_json: bool,
    **same_names: Any,
) -> None:
    """Compute blocks of RUN for a `blocktrain serve` on this or another host."""
    if not force:
        from blocktrain.storage.run_dir import RunDir

        _check_memory(RunDir.open(run).config, blocks, 1, same_names)

    from blocktrain.serve.ring.connection import Terms
    from blocktrain.serve.ring.stage import StageSettings, serve_stage

    settings = StageSettings(
        run=run,
        blocks=blocks,
        keys=None if plain_tcp else keys or run / "keys",
        max_requests=most_requests,
        cache_bytes=int(cache_gb * 1e9),
        prefix_bytes=int(prefix_gb * 1e9),
        terms=Terms(padding=int(warm_up_mb * MEBIBYTE)),
        **same_names,
    )

    def tell(address: str) -> None:
        if as_json:
            click.echo(json.dumps({"listening": address, "blocks": list(blocks)}))
        else:
            listed = ", ".join(map(str, blocks))
            security = "no TLS" if plain_tcp else "TLS"
            click.echo(f"stage at {address} ({security}), block {listed} of {run}")

    serve_stage(settings, tell)


def _check_memory(
    config: "Config", blocks: range, processes: int, settings: dict[str, Any]
) -> None:
    from blocktrain.training.memory_check import check_serving

    device, precision, weights = (settings[name] for name in ("device", "precision", "weights"))
    known = range(blocks.start, min(blocks.stop, config.block_count))
    check_serving(config, device, precision, weights, known, processes)


@click.command("keys")
@click.argument("folder", type=FOLDER)
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
    """Make the certificates with which a router and its stages authenticate each other.

    The first call makes a certificate authority and the router's certificate. Every call adds the
    members that it names, and renews certificates that expire within 30 days. A member's machine
    needs ca.pem, NAME.pem and NAME.key. Keep ca.key here: its owner can admit anyone.
    """
    from blocktrain.protocol.ring_keys import ROUTER, STAGE, Keyring

    keyring = Keyring(folder)
    members = [(ROUTER, name) for name in ("router", *routers)]
    members += [(STAGE, name) for name in (*(f"stage-{i + 1}" for i in range(stages)), *names)]
    for role, name in members:
        state = "made" if keyring.add(role, name) else "kept"
        click.echo(f"{state}  {role:6s}  {folder / name}.pem")
