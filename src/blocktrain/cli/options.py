"""Presets by name: `--config demo` finds the demo.toml that ships with the package."""

import math
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from blocktrain import threads
from blocktrain.cli.display import plain
from blocktrain.config import closest_match
from blocktrain.errors import ConfigError

if TYPE_CHECKING:
    from blocktrain.worker.client import Client

PROGRAM = (sys.executable, "-m", "blocktrain.cli.main")  # starts this command in another process
PACKAGE = Path(__file__).resolve().parent.parent
# Inside an installed package, or beside src/ in a checkout.
FOLDERS = (PACKAGE / "presets", PACKAGE.parent.parent / "configs")


def resolve_config(path: Path) -> Path:
    """The path itself, or the preset of that name where no such file exists."""
    if path.is_file() or path.suffix or len(path.parts) > 1:
        return path
    presets = {file.stem: file for folder in FOLDERS for file in sorted(folder.glob("*.toml"))}
    if path.name not in presets:
        guess = closest_match(path.name, presets)
        raise ConfigError(
            f"no preset and no file {path.name!r};"
            + (f" did you mean {guess}?" if guess else "")
            + f" there are {', '.join(presets)}"
        )
    return presets[path.name]


def host_port(context: click.Context, option: click.Parameter, text: str) -> str:
    """A callback for an option that is HOST:PORT."""
    from blocktrain.protocol.addresses import split_host_port

    try:
        split_host_port(text)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from None
    return text


def host_ports(context: click.Context, option: click.Parameter, text: str) -> tuple[str, ...]:
    """A callback for an option that is HOST:PORT,HOST:PORT,..."""
    listed = [part.strip() for part in text.split(",")]
    return tuple(host_port(context, option, part) for part in listed if part)


MOST_THREADS = 1024


def use_threads(context: click.Context, option: click.Parameter, text: str) -> None:
    """Compute with this many threads, before the command begins."""
    if text == "auto":
        return
    if not text.isdecimal() or not 1 <= int(text) <= MOST_THREADS:
        raise click.BadParameter(f"{text!r} is neither auto nor from 1 to {MOST_THREADS}")
    threads.use(int(text))


config = click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    required=True,
    metavar="NAME or FILE",
    help="Preset name (tiny, demo, wikitext2-small, ...) or TOML file.",
)
overrides = click.option(
    "--set", "overrides", multiple=True, metavar="A.B=C", help="Override one setting; repeatable."
)
run = click.argument("run", type=click.Path(path_type=Path))
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
device = click.option(
    "--device", default="auto", show_default=True, help="auto, cpu, mps, cuda[:N]."
)
thread_count = click.option(
    "--threads",
    callback=use_threads,
    expose_value=False,
    default="auto",
    show_default=True,
    metavar="N or auto",
    help="Processor threads to compute with; processes this command starts share them.",
)
precision = click.option(
    "--precision",
    type=click.Choice(["auto", "fp32", "bf16"]),
    default="auto",
    show_default=True,
    help="Compute type.",
)
weights = click.option(
    "--weights",
    type=click.Choice(["full", "int8"]),
    default="full",
    show_default=True,
    help="How the layers' matrices are held: in the compute type, or in 8 bits for less memory.",
)
first_blocks = click.option(
    "--blocks",
    "first_blocks",
    type=click.IntRange(min=1),
    help="Exit early: use only this many blocks, from the first.",
)
data_dir = click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs/coordinator"),
    show_default=True,
    help="The coordinator's folder.",
)
database = click.option(
    "--db", "database", metavar="URL", help="PostgreSQL instead of a file in the folder."
)
blobs = click.option(
    "--blobs", metavar="URL", help="s3://BUCKET/PREFIX or a folder, instead of one in --data-dir."
)
invite = click.argument("invite")
keys = click.option(
    "--keys",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder made by `blocktrain keys`. Default: RUN/keys.",
)
plain_tcp = click.option(
    "--plain-tcp", is_flag=True, help="No TLS between stages: only inside a network you trust."
)
served_readout = click.option(
    "--readout",
    type=click.Choice(["product", "final"]),
    default="product",
    show_default=True,
    help="product: all blocks predict together; final: the last one alone. Router and stages need"
    " the same.",
)


warm_up = click.option(
    "--warm-up-mb",
    type=click.FloatRange(0.0, 32.0),
    default=4.0,
    show_default=True,
    help="Most padding sent at once over a new connection between hosts, so that the first large"
    " messages travel at full speed; 0: none.",
)


def caller(invite: str) -> "Client":
    from blocktrain.protocol.identity import WorkerKey
    from blocktrain.protocol.invite import Invite
    from blocktrain.worker.client import Client

    client = Client(Invite.decode(invite), WorkerKey.create())
    client.http.on_unreachable = _tell
    return client


def _tell(reason: str, seconds: float) -> None:
    how_long = "" if math.isinf(seconds) else f" for {seconds:.0f} s"
    click.echo(f"{plain(reason)}; trying again{how_long}", err=True)


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    asked: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
