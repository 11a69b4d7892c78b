"""Write docs/REFERENCE.md: every command, environment variable and setting, read from the code."""

import dataclasses
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import click

from blocktrain import environment
from blocktrain.cli.main import VERBS, cli
from blocktrain.simulate.scenario import Scenario

PAGE = Path(__file__).resolve().parents[1] / "docs" / "REFERENCE.md"
HEAD = """\
# Reference

All commands, environment variables and settings. `make reference` writes this page from the code.

- [Commands](#commands)
- [Environment variables](#environment-variables)
- [Settings](#settings)
"""
EXIT_CODES = """\
### Exit codes

0: done. 130: interrupted by Ctrl-C or SIGTERM; the same command resumes. Every error is one line on
standard error and has the exit code of its kind:
"""


def page() -> str:
    return "\n".join([HEAD, *_commands(), *_variables(), *_settings()])


def _commands() -> Iterator[str]:
    yield "## Commands\n"
    yield "`blocktrain COMMAND --help` shows the same. `--json`, where a command has it, prints one"
    yield "JSON object (or one a line) to standard output; notes and errors go to standard error.\n"
    context = click.Context(cli, info_name="blocktrain")
    for name in VERBS:
        command = cli.get_command(context, name)
        assert command
        yield from _command(command, click.Context(command, context, name))
    yield EXIT_CODES
    from blocktrain import errors

    tree = inspect.cleandoc(errors.__doc__ or "").split("\n\n")[1]
    yield f"```text\n{inspect.cleandoc(tree)}\n```\n"


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    prefix = getattr(command, "context_settings", {}).get("auto_envvar_prefix")
    context.auto_envvar_prefix = prefix
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"### {context.command_path}\n"
    yield f"`{context.command_path} {usage}`\n"
    yield f"{inspect.cleandoc(command.help or '')}\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner
            yield from _command(inner, click.Context(inner, context, name))
        return
    shown = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
    if shown:
        yield "| option | default | |\n|---|---|---|"
        yield from (_option(option, context) for option in shown)
        yield ""


def _option(option: click.Option, context: click.Context) -> str:
    name, default, help = ", ".join(option.opts), "", option.help or ""
    if not option.is_flag:
        name += f" {_metavar(option, context)}"
        default = _default(option, context)
    if limits := _limits(getattr(option.type, "min", None), getattr(option.type, "max", None)):
        help += f" A number {limits}."
    if isinstance(option.envvar, str):
        help += f" Environment: `{option.envvar}`."
    return _row(f"`{name}`", default, help)


def _metavar(option: click.Option, context: click.Context) -> str:
    is_number = isinstance(option.type, click.types.IntRange | click.types.FloatRange)
    return "N" if is_number and option.metavar is None else option.make_metavar(context)


def _default(option: click.Option, context: click.Context) -> str:
    if option.required:
        return "required"
    value = option.get_default(context, call=False)
    is_simple = isinstance(value, str | int | float | Path) and str(value) and not option.multiple
    return f"`{value}`" if is_simple else ""


def _variables() -> Iterator[str]:
    yield "## Environment variables\n"
    yield "Each option of `blocktrain serve` can also be set as BLOCKTRAIN_SERVE_NAME, such"
    yield "as `BLOCKTRAIN_SERVE_LISTEN`.\n"
    yield "| variable | |\n|---|---|"
    yield from (_row(f"`{each.name}`", each.doc) for each in environment.OWN)
    yield "\nRead by libraries that blocktrain uses:\n"
    yield "| variable | |\n|---|---|"
    yield from (_row(f"`{each.name}`", each.doc) for each in environment.OF_LIBRARIES)
    yield ""


def _settings() -> Iterator[str]:
    yield "## Settings\n"
    yield "A config is a TOML file with these sections; a setting that is left out has its default."
    yield "`--set section.key=value` changes one. Only `blocktrain simulate` reads [simulate].\n"
    for section, kind in get_type_hints(Scenario).items():
        yield f"### [{section}]\n"
        yield "| setting | default | allowed | |\n|---|---|---|---|"
        for item in dataclasses.fields(kind):
            doc, default = str(item.metadata["doc"]), json.dumps(item.default)
            formerly = item.metadata["formerly"]
            doc += f" (formerly `{formerly}`)" if formerly else ""
            yield _row(f"`{item.name}`", f"`{default}`", _allowed(item), doc)
        yield ""


def _allowed(item: "dataclasses.Field[object]") -> str:
    rules = item.metadata
    if rules["choices"]:
        return ", ".join(f"`{choice}`" for choice in rules["choices"])
    if isinstance(item.default, bool):
        return "`true`, `false`"
    kind = "list of numbers" if isinstance(item.default, tuple) else type(item.default).__name__
    kind = {"int": "integer", "float": "number", "str": "text"}.get(kind, kind)
    return f"{kind} {_limits(rules['low'], rules['high'])}".strip()


def _limits(low: float | None, high: float | None) -> str:
    parts = [("from", low), ("to", high)]
    return " ".join(f"{word} {limit}" for word, limit in parts if limit is not None)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
