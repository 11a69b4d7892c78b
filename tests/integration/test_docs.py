"""The tutorials: what is marked as runnable runs, and every other command at least exists."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from tests.support.commands import run_here

from blocktrain.cli import doctor_command
from blocktrain.cli.main import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs/tutorials").glob("*.md"))
BLOCK = re.compile(r"(<!-- runnable -->\n)?```(?:console)?\n(.*?)```", re.DOTALL)
RUNNABLE = [page for page in PAGES if "<!-- runnable -->" in page.read_text()]


def commands(page: Path, *, runnable: bool) -> Iterator[list[str]]:
    """The words of the commands of blocktrain on a page: all, or those that are runnable."""
    for marker, block in BLOCK.findall(page.read_text()):
        for line in block.replace("\\\n", "").splitlines():
            command = re.match(r"(?:\w*\$ )?(blocktrain .*)", line)
            if command and (marker or not runnable):
                for part in command[1].split(" && "):
                    words = shlex.split(part, comments=True)
                    yield words[1:]


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.stem)
def test_what_is_runnable_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor_command, "MEASURED_SECONDS", 0.2)
    ran = 0
    for words in commands(page, runnable=True):
        done = run_here(words, tmp_path, os.environ)
        assert done.returncode == 0, (words, done.stderr)
        ran += 1
    assert ran


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_every_command_exists_with_its_options(page: Path):
    for words in commands(page, runnable=False):
        context, command, rest = click.Context(cli), cli, words
        while isinstance(command, click.Group):
            name, found, rest = command.resolve_command(context, rest)
            assert found, words
            context, command = click.Context(found, context, name), found
        command.make_parser(context).parse_args(list(rest))  # raises for unknown options


def test_links_of_the_site_lead_somewhere(tmp_path: Path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir"]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run([*command, tmp_path / "site"], cwd=ROOT, env=env, text=True,
                           capture_output=True, check=False)  # fmt: skip
    assert built.returncode == 0, built.stderr
    page = (tmp_path / "site/tutorials/one-machine/index.html").read_text()
    assert "fonts.googleapis" not in page
