"""blocktrain completion: makes a shell complete commands, options and their values."""

import click

from blocktrain.environment import COMPLETE

INSTALL = {
    "bash": 'eval "$(blocktrain completion bash)"    # in ~/.bashrc',
    "zsh": 'eval "$(blocktrain completion zsh)"     # in ~/.zshrc, after compinit',
    "fish": "blocktrain completion fish | source     # in ~/.config/fish/config.fish",
}


@click.command("completion", epilog="\b\n" + "\n".join(INSTALL.values()))
@click.argument("shell", type=click.Choice(list(INSTALL)))
def completion_command(shell: str) -> None:
    """Print a script that makes SHELL complete blocktrain's commands. Put one of these lines into
    the shell's start-up file:"""
    from click.shell_completion import get_completion_class

    from blocktrain.cli.main import cli

    kind = get_completion_class(shell)
    assert kind
    script = kind(cli, {}, "blocktrain", COMPLETE.name)
    click.echo(script.source_template % script.source_vars())
