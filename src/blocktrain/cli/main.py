"""The `blocktrain` command: one thin file per verb; nothing heavy is imported to print help."""

import importlib
import sys

import click

from blocktrain import __version__, threads
from blocktrain.cli.display import plain
from blocktrain.config import closest_match
from blocktrain.errors import BlocktrainError

VERBS = {
    "train": "Train the blocks of a run on this machine.",
    "eval": "Score a run with an honest cross entropy.",
    "generate": "Continue a prompt.",
    "export": "Write one assembled safetensors file.",
    "info": "Show what a run holds.",
    "estimate": "Tell what a run will need, before anything runs.",
    "simulate": "Play a run with virtual workers, before anybody joins.",
    "settings": "List every setting a config may have.",
    "serve": "Answer an OpenAI-compatible API with a run.",
    "stage": "Hold some blocks of a run for a server on another host.",
    "keys": "Make certificates for a router and its stages.",
    "coordinator": "Run a training that other machines can join.",
    "worker": "Join a run by its invite and train for it.",
    "status": "Show how a run stands.",
    "fetch": "Assemble a run's current model here.",
    "invite": "List, make or revoke invites of a run.",
    "ban": "Exclude a worker from a run.",
    "backup": "Copy a coordinator's folder into one file, while it runs.",
    "restore": "Unpack a backup into a new folder.",
    "demo": "Train, score and sample a small model, beside its end-to-end twin.",
}


MODULES = {
    "train": "train_command",
    "eval": "eval_command",
    "generate": "model_commands",
    "export": "model_commands",
    "info": "model_commands",
    "fetch": "model_commands",
    "estimate": "plan_commands",
    "settings": "plan_commands",
    "simulate": "simulate_command",
    "serve": "serve_commands",
    "stage": "serve_commands",
    "keys": "serve_commands",
    "coordinator": "coordinator_command",
    "worker": "worker_command",
    "status": "status_command",
    "invite": "operator_commands",
    "ban": "operator_commands",
    "backup": "operator_commands",
    "restore": "operator_commands",
    "demo": "demo_command",
}


class LazyGroup(click.Group):
    """Loads a verb's module when it is used, so that --help stays instant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"blocktrain.cli.{MODULES[cmd_name]}")
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
            formatter.write_dl(list(VERBS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Train one model as independent blocks, on machines nobody owns together."""


def main() -> None:
    threads.sleep_at_barriers()  # before any command imports torch
    try:
        cli(standalone_mode=False)
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
