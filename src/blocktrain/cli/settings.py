"""blocktrain settings: every key a config may have, with its default and what it does."""

import json

import click

from blocktrain.cli import options


@click.command("settings")
@options.as_json
def command(as_json: bool) -> None:
    """List every setting, its default and a sentence about it."""
    from blocktrain.config import describe
    from blocktrain.simulate.scenario import Scenario

    settings = describe(Scenario)
    if as_json:
        keys = ("name", "default", "doc")
        click.echo(json.dumps([dict(zip(keys, setting, strict=True)) for setting in settings]))
        return
    width = max(len(name) for name, _, _ in settings)
    for name, default, doc in settings:
        shown = json.dumps(default)
        click.echo(f"{name:{width}}  {shown:12}  {doc}")
