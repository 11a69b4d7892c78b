"""Write docs/REFERENCE.md: commands, Python, environment variables and settings, from the code."""

import dataclasses
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import click

import blocktrain
from blocktrain import environment, errors
from blocktrain.cli.main import VERBS, cli
from blocktrain.config.sections import allowed_values
from blocktrain.simulate.scenario import Scenario

PAGE = Path(__file__).resolve().parents[1] / "docs" / "REFERENCE.md"
HEAD = """\
# Reference

All commands, functions, environment variables and settings. `make reference` writes this page from
the code.

- [Commands](#commands)
- [Python](#python)
- [Environment variables](#environment-variables)
- [Settings](#settings)
"""
EXIT_CODES = """\
### Exit codes

0: done. 130: interrupted by Ctrl-C or SIGTERM; the same command resumes. Every error is one line on
standard error and has the exit code of its kind:
"""


def page() -> str:
    return "\n".join([HEAD, *_commands(), *_python(), *_variables(), *_settings()])


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
    yield "| code | error | |\n|---|---|---|"
    kinds = [kind for name, kind in vars(errors).items() if name.endswith("Error")]
    yield from (_row(str(kind.exit_code), kind.__name__, inspect.getdoc(kind)) for kind in kinds)
    yield ""


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


def _python() -> Iterator[str]:
    yield "## Python\n"
    yield "`import blocktrain as bt`. A name is imported when it is first used.\n"
    for name in ("train", "load", "import_hf", "export_hf"):
        yield from _documented(f"bt.{name}", getattr(blocktrain, name))
    for name in ("Model", "Swarm"):
        kind = getattr(blocktrain, name)
        text, _, _ = (inspect.getdoc(kind) or "").partition(">>>")
        yield f"### bt.{name}\n\n{text.strip()}\n"
        for member in vars(kind):
            if not member.startswith("_") and callable(getattr(kind, member)):
                yield from _documented(f"{name}.{member}", getattr(kind, member))


def _documented(name: str, function: Any) -> Iterator[str]:
    """A function's call and its sentences, without the example."""
    signature = inspect.signature(function)
    shown = [value for key, value in signature.parameters.items() if key != "self"]
    shown = [each.replace(annotation=inspect.Parameter.empty) for each in shown]
    text, _, _ = (inspect.getdoc(function) or "").partition(">>>")
    if text:
        yield f"`{name}{inspect.Signature(shown)}`\n\n{text.strip()}\n"


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
            yield _row(f"`{item.name}`", f"`{default}`", allowed_values(item), doc)
        yield ""


def _limits(low: float | None, high: float | None) -> str:
    parts = [("from", low), ("to", high)]
    return " ".join(f"{word} {limit}" for word, limit in parts if limit is not None)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
