"""Options and arguments that several commands share, and their parsing."""

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from blocktrain import environment
from blocktrain.cli.terminal import LOG_FORMATTERS, LOG_LEVELS, configure_logging, show_retry
from blocktrain.errors import ConfigError

if TYPE_CHECKING:
    from blocktrain.protocol.invite import Invite
    from blocktrain.worker.client import Client

Command = Callable[..., None]
Decorator = Callable[[Command], Command]

MOST_THREADS = 1024
FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)
FILE_OR_FOLDER = click.Path(path_type=Path)
SEED = click.IntRange(0, 2**63 - 1)
COUNT = click.IntRange(min=1)
AMOUNT = click.FloatRange(min=0.001)


def config_file(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    """The path itself, or the file of the preset with that name."""
    from blocktrain.config.presets import config_path

    return path and config_path(path, "--config")


def host_port(context: click.Context, option: click.Parameter, text: str) -> str:
    """Check HOST:PORT while parsing options, so that the error names the option."""
    from blocktrain.protocol.addresses import split_host_port

    try:
        split_host_port(text)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from None
    return text


def use_threads(context: click.Context, option: click.Parameter, text: str) -> None:
    """Set the number of threads, for this process and those that it starts."""
    if text == "auto":
        return
    if not text.isdecimal() or not 1 <= int(text) <= MOST_THREADS:
        raise click.BadParameter(
            f"{text!r} is neither auto nor a whole number from 1 to {MOST_THREADS}"
        )
    environment.THREADS.set(str(int(text)))
    import torch  # otherwise it prefers MKL_NUM_THREADS, and never exceeds the number of cores

    torch.set_num_threads(int(text))


def choice(flag: str, *values: str, help: str) -> Decorator:
    """An option with these values; the first is the default."""
    return click.option(flag, type=click.Choice(values), default=values[0], help=help)


def out(help: str) -> Decorator:
    return click.option("--out", type=FOLDER, required=True, help=help)


def config_option(**changes: Any) -> Decorator:
    """The option --config. `changes` override its declaration, such as its default."""
    declared = {
        "required": "default" not in changes,
        "metavar": "NAME or FILE",
        "help": "Name of a preset (tiny, demo, ...), a TOML file, or the folder of a run.",
        **changes,
    }
    return click.option(
        "--config",
        "config_path",
        type=FILE_OR_FOLDER,
        callback=config_file,
        shell_complete=_preset_names,
        **declared,
    )


def _preset_names(
    context: click.Context, option: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """The presets that begin like this, and files."""
    from blocktrain.config.presets import presets

    names = [name for name in presets() if name.startswith(incomplete)]
    return [*map(CompletionItem, names), CompletionItem(incomplete, type="file")]


def log_options(default_level: str) -> Decorator:
    """The options --log-level and --log-format. Configures logging before the command runs."""

    def decorate(command: Command) -> Command:
        @click.option(
            "--log-level",
            type=click.Choice(LOG_LEVELS),
            default=default_level,
            envvar=environment.LOG_LEVEL.name,
            show_envvar=True,
            help="Lowest level of log lines on standard error.",
        )
        @click.option(
            "--log-format",
            type=click.Choice(list(LOG_FORMATTERS)),
            default="text",
            envvar=environment.LOG_FORMAT.name,
            show_envvar=True,
            help="Format of log lines: text (shorter on a terminal), or one JSON object each.",
        )
        @functools.wraps(command)
        def logging_command(log_level: str, log_format: str, **values: Any) -> None:
            _pass_on("log_level", environment.LOG_LEVEL, log_level)
            _pass_on("log_format", environment.LOG_FORMAT, log_format)
            configure_logging(log_level, log_format)
            command(**values)

        return logging_command

    return decorate


def _pass_on(parameter: str, variable: environment.Variable, value: str) -> None:
    """Apply an option from the command line to child processes too."""
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
run = click.argument("run", type=FILE_OR_FOLDER)
as_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
device = click.option("--device", default="auto", help="auto, cpu, mps, cuda or cuda:N.")
thread_count = click.option(
    "--threads",
    callback=use_threads,
    expose_value=False,
    default="auto",
    metavar="N or auto",
    help="CPU threads, divided among the processes that the command starts."
    " auto: OMP_NUM_THREADS if it is set, otherwise one per core; workers on one machine share its"
    " cores, and leave one to other programs if there are four or more.",
)
precision = choice(
    "--precision",
    "auto",
    "fp32",
    "bf16",
    help="Compute precision. auto: bf16 if the device is fast at it, otherwise fp32.",
)
profile = click.option(
    "--profile",
    type=FILE_OR_FOLDER,
    metavar="FILE",
    help="Measure where the time of traversals goes: a table at the end, and a trace in FILE, which"
    " https://ui.perfetto.dev opens.",
)
first_blocks = click.option(
    "--blocks",
    "first_blocks",
    type=COUNT,
    metavar="N",
    help="Use only the first N blocks (early exit). Default: all.",
)
force = click.option(
    "--force", is_flag=True, help="Start even if the model does not fit into free memory."
)
data_dir = click.option(
    "--data-dir", type=FOLDER, default=Path("runs/coordinator"), help="The coordinator's folder."
)
database = click.option(
    "--db",
    "database",
    metavar="URL",
    help="Address of a PostgreSQL database. Default: a SQLite file in --data-dir.",
)
blobs = click.option(
    "--blobs",
    metavar="URL",
    help="Where the weights are: s3://BUCKET/PREFIX or a folder. Default: in --data-dir.",
)


def _read_invite(context: click.Context, argument: click.Parameter, text: str) -> str:
    """The invite itself; for `-`, a line of standard input, which no list of processes shows."""
    return sys.stdin.readline().strip() if text == "-" else text


invite = click.argument("invite", callback=_read_invite)
at = click.option(
    "--at",
    multiple=True,
    metavar="URL",
    help="Address of the coordinator, instead of those in the invite; repeatable. For a coordinator"
    " that has moved.",
)


def decoded_invite(invite: str, at: Sequence[str]) -> "Invite":
    """The invite, with other addresses if there are any."""
    from blocktrain.protocol.invite import Invite

    decoded = Invite.decode(invite)
    return decoded.at(at) if at else decoded


def client_of(invite: str, at: Sequence[str] = ()) -> "Client":
    """A client for the invite's coordinator that tells the user about retries."""
    from blocktrain.protocol.identity import WorkerKey
    from blocktrain.worker.client import Client

    client = Client(decoded_invite(invite, at), WorkerKey.create())
    client.http.on_unreachable = show_retry
    return client


def connections(total: int) -> Callable[[Command], Command]:
    """Options for the connections of an HTTP server."""

    def add(command: Command) -> Command:
        per_address = click.option(
            "--most-connections-per-address",
            type=COUNT,
            help="Open connections from one address (IPv6: one /64 network). Default: a quarter of"
            " all.",
        )
        most = click.option(
            "--most-connections",
            type=COUNT,
            default=total,
            help="Open connections. Beyond it, strangers are closed first, then idle ones.",
        )
        return most(per_address(command))

    return add
