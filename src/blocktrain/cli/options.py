"""Options and arguments that several commands share, and how their text becomes a value."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blocktrain import environment, threads
from blocktrain.cli import logs
from blocktrain.cli.terminal import show_retry
from blocktrain.config import closest_match
from blocktrain.errors import ConfigError

if TYPE_CHECKING:
    from blocktrain.worker.client import Client

Command = Callable[..., None]
Decorator = Callable[[Command], Command]

PROGRAM = (sys.executable, "-m", "blocktrain.cli.main")  # starts this command in another process
PACKAGE = Path(__file__).resolve().parent.parent
# Inside an installed package, or beside src/ in a checkout.
PRESET_FOLDERS = (PACKAGE / "presets", PACKAGE.parent.parent / "configs")
MOST_THREADS = 1024


def config_file(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    """The path itself, or the file of the preset with that name if there is no such path."""
    if path is None or path.is_file() or path.suffix or len(path.parts) > 1:
        return path
    presets = {
        file.stem: file for folder in PRESET_FOLDERS for file in sorted(folder.glob("*.toml"))
    }
    if path.name not in presets:
        guess = closest_match(path.name, presets)
        raise ConfigError(
            f"--config {path.name}: no such file or preset"
            + (f"; did you mean {guess}?" if guess else ";")
            + f" The presets are {', '.join(presets)}."
        )
    return presets[path.name]


def host_port(context: click.Context, option: click.Parameter, text: str) -> str:
    """HOST:PORT, checked while the options are read, so that the error names the option."""
    from blocktrain.protocol.addresses import split_host_port

    try:
        split_host_port(text)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from None
    return text


def host_ports(context: click.Context, option: click.Parameter, text: str) -> tuple[str, ...]:
    """Several of them, separated by commas."""
    parts = [part.strip() for part in text.split(",")]
    return tuple(host_port(context, option, part) for part in parts if part)


def use_threads(context: click.Context, option: click.Parameter, text: str) -> None:
    """Set the number of threads before the command begins."""
    if text == "auto":
        return
    if not text.isdecimal() or not 1 <= int(text) <= MOST_THREADS:
        raise click.BadParameter(
            f"{text!r} is neither auto nor a whole number from 1 to {MOST_THREADS}"
        )
    threads.use(int(text))


def config_option(**changes: Any) -> Decorator:
    """--config, with what a command declares otherwise, such as a default."""
    declared = {
        "required": "default" not in changes,
        "metavar": "NAME or FILE",
        "help": "Name of a preset (tiny, demo, wikitext2-small, ...) or a TOML file.",
        **changes,
    }
    path = click.Path(path_type=Path)
    return click.option("--config", "config_path", type=path, callback=config_file, **declared)


def log_options(default_level: str) -> Decorator:
    """--log-level and --log-format; logging is configured before the command runs."""

    def decorate(command: Command) -> Command:
        @click.option(
            "--log-level",
            type=click.Choice(logs.LEVELS),
            default=default_level,
            show_default=True,
            envvar=environment.LOG_LEVEL.name,
            show_envvar=True,
            help="Least severe log lines to write to standard error.",
        )
        @click.option(
            "--log-format",
            type=click.Choice(list(logs.FORMATTERS)),
            default="text",
            show_default=True,
            envvar=environment.LOG_FORMAT.name,
            show_envvar=True,
            help="Log lines as text, or each as a JSON object.",
        )
        @functools.wraps(command)
        def logging_command(log_level: str, log_format: str, **values: Any) -> None:
            _pass_on("log_level", environment.LOG_LEVEL, log_level)
            _pass_on("log_format", environment.LOG_FORMAT, log_format)
            logs.configure(log_level, log_format)
            command(**values)

        return logging_command

    return decorate


def _pass_on(parameter: str, variable: environment.Variable, value: str) -> None:
    """What the command line says holds for the processes that the command starts, too."""
    source = click.get_current_context().get_parameter_source(parameter)
    if source == click.core.ParameterSource.COMMANDLINE:
        variable.set(value)


config = config_option()
overrides = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Change one setting of the config; repeatable. `blocktrain settings` lists them.",
)
run = click.argument("run", type=click.Path(path_type=Path))
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
device = click.option(
    "--device", default="auto", show_default=True, help="auto, cpu, mps, cuda or cuda:N."
)
thread_count = click.option(
    "--threads",
    callback=use_threads,
    expose_value=False,
    default="auto",
    show_default=True,
    metavar="N or auto",
    help="CPU threads to compute with, divided among the processes that the command starts."
    " auto: OMP_NUM_THREADS if it is set, else one per core.",
)
precision = click.option(
    "--precision",
    type=click.Choice(["auto", "fp32", "bf16"]),
    default="auto",
    show_default=True,
    help="Number type to compute in. auto: bf16 where the device is fast at it, else fp32.",
)
weights = click.option(
    "--weights",
    type=click.Choice(["full", "int8"]),
    default="full",
    show_default=True,
    help="How matrices are stored: full in the compute type, int8 in 8 bits to save memory.",
)
first_blocks = click.option(
    "--blocks",
    "first_blocks",
    type=click.IntRange(min=1),
    metavar="N",
    help="Use only the first N blocks (early exit). Default: all.",
)
data_dir = click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs/coordinator"),
    show_default=True,
    help="The coordinator's folder.",
)
database = click.option(
    "--db",
    "database",
    metavar="URL",
    help="Address of a PostgreSQL database; default: a SQLite file in --data-dir.",
)
blobs = click.option(
    "--blobs",
    metavar="URL",
    help="Where to store weights: s3://BUCKET/PREFIX or a folder; default: in --data-dir.",
)
invite = click.argument("invite")
keys = click.option(
    "--keys",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder made by `blocktrain keys`. Default: RUN/keys.",
)
plain_tcp = click.option(
    "--plain-tcp",
    is_flag=True,
    help="Connections between stages without TLS; only for a network that you trust.",
)
served_readout = click.option(
    "--readout",
    type=click.Choice(["product", "final"]),
    default="product",
    show_default=True,
    help="product: all blocks predict together; final: the last block alone. Router and stages need"
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


def client_of(invite: str) -> "Client":
    """A client of the coordinator that made the invite; it tells the user about retries."""
    from blocktrain.protocol.identity import WorkerKey
    from blocktrain.protocol.invite import Invite
    from blocktrain.worker.client import Client

    client = Client(Invite.decode(invite), WorkerKey.create())
    client.http.on_unreachable = show_retry
    return client
