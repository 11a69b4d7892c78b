"""The `blocktrain` command. Each subcommand's module is imported only when it is used.

Importing torch or numpy here would make every command and --help slow to start.
"""

import importlib
import sys
from typing import NamedTuple, NoReturn

import click
from click.shell_completion import CompletionItem

from blocktrain import __version__
from blocktrain.cli.terminal import plain
from blocktrain.environment import COMPLETE, sleep_at_barriers
from blocktrain.errors import (
    BlocktrainError,
    DeviceError,
    RefusedError,
    UnreachableError,
    closest_match,
)
from blocktrain.memory import is_out_of_memory


class Verb(NamedTuple):
    module: str  # in blocktrain.cli; it defines a function VERB_command
    help: str
    failure: str = ""  # prefix of errors that come from another machine


VERBS = {
    "train": Verb("train_commands", "Train the blocks of a run on this machine."),
    "eval": Verb(
        "train_commands", "Score a run by its cross entropy on text it was not trained on."
    ),
    "generate": Verb("model_commands", "Continue a prompt."),
    "import": Verb("model_commands", "Make a run of a Hugging Face model."),
    "export": Verb("model_commands", "Write a run's model for other programs."),
    "info": Verb("info_command", "Show the settings, size and progress of a run."),
    "plot": Verb(
        "plot_command", "Draw loss, score against bytes moved, and quality against latency."
    ),
    "extend": Verb("extend_command", "Plan a run for more steps."),
    "tokenizer": Verb("train_commands", "Train a tokenizer on a text."),
    "estimate": Verb("planning_commands", "Estimate memory, traffic and time of a run."),
    "simulate": Verb("planning_commands", "Simulate a run with virtual workers."),
    "settings": Verb("planning_commands", "List all settings of a config."),
    "serve": Verb("serve_commands", "Serve a run with an OpenAI-compatible API."),
    "stage": Verb("serve_commands", "Compute some blocks for a server on another host."),
    "keys": Verb("serve_commands", "Make certificates for a router and its stages."),
    "coordinator": Verb("coordinator_commands", "Start a run that other machines can join."),
    "worker": Verb(
        "worker_command",
        "Join a run by its invite and train for it.",
        "cannot take part in the run",
    ),
    "status": Verb(
        "status_command", "Show the blocks and workers of a run.", "cannot show the run"
    ),
    "fetch": Verb("model_commands", "Download a run's current model.", "cannot download the model"),
    "invite": Verb("coordinator_commands", "List, make or revoke invites of a run."),
    "ban": Verb("operator_commands", "Exclude a worker from a run."),
    "unmerge": Verb("operator_commands", "Remove merged updates from a run again."),
    "pause": Verb("operator_commands", "Stop a run for a while."),
    "drain": Verb("operator_commands", "Let open leases end and hand out no new ones."),
    "resume": Verb("operator_commands", "Continue a run that was paused or drained."),
    "page": Verb("operator_commands", "Print the address of a run's web page."),
    "backup": Verb("coordinator_commands", "Copy a coordinator's folder into one file."),
    "restore": Verb("coordinator_commands", "Unpack a backup into a new folder."),
    "doctor": Verb(
        "doctor_command", "Check this machine, and the way to a run.", "cannot check the run"
    ),
    "completion": Verb("completion_command", "Make a shell complete blocktrain's commands."),
    "demo": Verb("demo_command", "Train, score and sample a small model on this machine."),
}


class LazyGroup(click.Group):
    """Imports a subcommand's module only when it is used, so that --help needs no torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"blocktrain.cli.{VERBS[cmd_name].module}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        guess = closest_match(args[0], VERBS)
        if args[0] not in VERBS and guess:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {guess!r}?")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [name for name in VERBS if name.startswith(incomplete)]
        commands = [CompletionItem(name, help=VERBS[name].help) for name in names]
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.help) for name, verb in VERBS.items()])


@click.group(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "show_default": True}
)
@click.version_option(__version__)
def cli() -> None:
    """Train one model as independent blocks, on machines that have no common owner."""


def main() -> None:
    sleep_at_barriers()  # before any command imports torch
    try:
        cli(prog_name="blocktrain", complete_var=COMPLETE.name, standalone_mode=False)
    except BlocktrainError as error:
        is_remote = isinstance(error, UnreachableError | RefusedError)
        verb = VERBS.get(" ".join(sys.argv[1:2])) if is_remote else None
        context = f"{verb.failure}: " if verb and verb.failure else ""
        _fail(f"{context}{plain(str(error))}", error.exit_code)
    except (click.exceptions.Abort, KeyboardInterrupt):
        sys.exit(130)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()  # its message is the help page
        sys.exit(error.exit_code)
    except click.ClickException as error:
        _fail(_one_line(error), error.exit_code)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _fail(
            "there is too little free memory; end other programs, or use a smaller model",
            DeviceError.exit_code,
        )
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}", 1)


def _one_line(error: click.ClickException) -> str:
    """An error of the option parser in the form of all others."""
    message = " ".join(error.format_message().split()).removesuffix(".")
    usage = error.ctx if isinstance(error, click.UsageError) else None
    hint = f"; see {usage.command_path} --help" if usage else ""
    is_word = message[1:2].islower()  # not an option's name, or an abbreviation
    return f"{message[:1].lower() if is_word else message[:1]}{message[1:]}{hint}"


def _fail(message: str, exit_code: int) -> NoReturn:
    click.echo(f"error: {message}", err=True)
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
