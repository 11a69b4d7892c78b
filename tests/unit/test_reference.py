"""docs/REFERENCE.md agrees with the code, and leaves nothing out."""

import ast
import re
from pathlib import Path

import click
import pytest
from scripts import reference

from blocktrain import environment
from blocktrain.cli.main import VERBS, cli

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [path for path in (ROOT / "src").rglob("*.py") if path.name != "environment.py"]


def test_the_page_is_up_to_date():
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run `make reference`"


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_has_a_sentence(verb: str):
    command = cli.get_command(click.Context(cli), verb)
    assert command
    commands = command.commands.values() if isinstance(command, click.Group) else [command]
    for each in commands:
        options = [param for param in each.params if isinstance(param, click.Option)]
        assert [option.name for option in options if not option.hidden and not option.help] == []


def test_every_environment_variable_is_declared():
    """Code reads the environment through blocktrain.environment alone."""
    declared = {variable.name for variable in environment.OWN}
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        names = set(re.findall(r"BLOCKTRAIN_[A-Z]+(?:_[A-Z]+)*", text))
        assert {name for name in names - declared if "_SERVE" not in name} == set(), path
        reads = [
            node.lineno
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
        ]
        assert reads == [], f"{path}:{reads}"


def test_no_private_attribute_is_read_by_its_name():
    """What ruff's SLF rule does not see: getattr(thing, "_name")."""
    for path in [*SOURCES, *(ROOT / "bench").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            if node.func.id in ("getattr", "setattr", "hasattr", "delattr"):
                name = node.args[1]
                is_private = isinstance(name, ast.Constant) and str(name.value).startswith("_")
                assert not is_private, f"{path}:{node.lineno}"
