"""The `blocktrain` command: one subcommand per verb, loaded when it is used."""

import importlib
import sys
from typing import NamedTuple

import click

from blocktrain import __version__, threads
from blocktrain.cli.terminal import plain
from blocktrain.config import closest_match
from blocktrain.errors import BlocktrainError, RefusedError, UnreachableError


class Verb(NamedTuple):
    module: str  # in blocktrain.cli; the verb's function there is VERB_command
    help: str
    failure: str = ""  # what did not work, if another machine refuses or cannot be reached


VERBS = {
    "train": Verb("train_commands", "Train the blocks of a run on this machine."),
    "eval": Verb("eval_command", "Score a run by its cross entropy on text it was not trained on."),
    "generate": Verb("model_commands", "Continue a prompt."),
    "export": Verb("model_commands", "Write a run's model into one safetensors file."),
    "info": Verb("model_commands", "Show what a run folder contains."),
    "estimate": Verb("train_commands", "Estimate what a run will need, before it starts."),
    "simulate": Verb("simulate_command", "Simulate a run with virtual workers."),
    "settings": Verb("train_commands", "List every setting that a config can have."),
    "serve": Verb("serve_commands", "Serve a run with an OpenAI-compatible API."),
    "stage": Verb("serve_commands", "Compute some blocks of a run for a server on another host."),
    "keys": Verb("serve_commands", "Make certificates for a router and its stages."),
    "coordinator": Verb("coordinator_command", "Start a run that other machines can join."),
    "worker": Verb(
        "worker_command",
        "Join a run by its invite and train for it.",
        "cannot take part in the run",
    ),
    "status": Verb(
        "status_command", "Show the blocks and workers of a run.", "cannot show the run"
    ),
    "fetch": Verb("model_commands", "Download a run's current model.", "cannot download the model"),
    "invite": Verb("operator_commands", "List, make or revoke invites of a run."),
    "ban": Verb("operator_commands", "Exclude a worker from a run."),
    "backup": Verb("operator_commands", "Copy a coordinator's folder into one file."),
    "restore": Verb("operator_commands", "Unpack a backup into a new folder."),
    "demo": Verb("demo_command", "Train, score and sample a small model on this machine."),
}


class LazyGroup(click.Group):
    """Imports a verb's module only when it is used, so that --help needs no torch."""

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

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.help) for name, verb in VERBS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Train one model as independent blocks, on machines that have no common owner."""


def main() -> None:
    threads.sleep_at_barriers()  # before any command imports torch
    try:
        cli(prog_name="blocktrain", standalone_mode=False)
    except (UnreachableError, RefusedError) as error:
        verb = VERBS.get(sys.argv[1]) if len(sys.argv) > 1 else None
        context = f"{verb.failure}: " if verb and verb.failure else ""
        click.echo(f"error: {context}{plain(str(error))}", err=True)
        sys.exit(error.exit_code)
    except BlocktrainError as error:
        click.echo(f"error: {plain(str(error))}", err=True)
        sys.exit(error.exit_code)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        click.echo(f"error: {where}{error.strerror or error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
